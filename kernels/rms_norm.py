"""RMS norms in one pass a row on the CPU, native code.

Knows no module and no model. The one idea: at a few rows a chain of small tensor operations costs its calls, not its
arithmetic; one call does the chain, and a row's result is bitwise the same alone, among 16 rows of a tree or among
512 of a prompt, in native code or in the twin here. csrc/norm.hpp says what is computed and in which order.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from longgraft.kernels import rows_linear
from longgraft.kernels.rows_linear import DTYPES

BLOCK = 64  # lanes of a sum of squares


class Style(IntEnum):
    """When a norm rounds to the dtype, and what it multiplies with; as `Style` of csrc/norm.hpp counts."""

    INNER = 0  # weight * rounded(x / size)
    OUTER = 1  # rounded(weight * x / size)
    SHIFTED = 2  # rounded((1 + weight) * x / size)


def takes(*tensors: Tensor) -> bool:
    """Say whether the native code can read these tensors now: plain, on the CPU, one known dtype, no gradient."""
    first = tensors[0].dtype
    if first not in DTYPES or not rows_linear.is_available() or torch.is_autocast_enabled("cpu"):
        return False
    for tensor in tensors:
        if tensor.dtype is not first or not rows_linear._is_plain(tensor):
            return False
    return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors)


def norm(x: Tensor, weight: Tensor, eps: float, style: Style, kernel: str | None = None) -> Tensor:
    """Return x [..., n], each row divided by its root mean square, times weight [n]; contiguous, of x's dtype.

    The caller has asked `takes(x, weight)`. `kernel` names the instruction set, for tests. Raises ValueError where
    x and weight do not fit together.
    """
    size = x.shape[-1]
    if weight.dim() != 1 or weight.shape[0] != size or size == 0:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected [..., n] and [n]")
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    assert rows_linear._native is not None
    rows_linear._native.norm(
        kernel or rows_linear.KERNEL, x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // size, size,
        DTYPES[x.dtype], style, eps, torch.get_num_threads(),
    )  # fmt: skip
    return y


def norm_twin(x: Tensor, weight: Tensor, eps: float, style: Style) -> Tensor:
    """Return what `norm` returns, bit for bit, in plain torch."""
    size = x.shape[-1]
    rows = x.reshape(-1, size).float()
    lanes = torch.zeros(len(rows), BLOCK)
    for part in rows.split(BLOCK, dim=1):
        lanes[:, : part.shape[1]] += part * part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    mean = lanes / torch.full_like(lanes, float(size))  # over a number it would be times its reciprocal
    root = (mean + eps).double().sqrt().float()  # rounded as the processor's own root is, which torch's need not be
    scaled = rows * (torch.ones_like(root) / root)
    if style is Style.INNER:
        scaled = scaled.to(x.dtype).float()
    factor = weight.float() + (1.0 if style is Style.SHIFTED else 0.0)
    return (scaled * factor).to(x.dtype).reshape(x.shape)
