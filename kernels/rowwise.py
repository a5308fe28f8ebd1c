"""What stands between linear layers, in one pass a row on the CPU: RMS norm and gated activation, native code.

Knows no module and no model. The one idea: at a few rows a chain of small tensor operations costs its calls, not its
arithmetic; one call does the chain, and a row's result is bitwise the same alone, among 16 rows of a tree or among
512 of a prompt, in native code or in the twins here. csrc/rowwise.hpp says what is computed and in which order.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from longgraft.kernels import rows_linear
from longgraft.kernels.rows_linear import DTYPES

BLOCK = 64  # lanes of a sum of squares


class Style(IntEnum):
    """When a norm rounds to the dtype, and what it multiplies with; as `Style` of csrc/rowwise.hpp counts."""

    INNER = 0  # weight * rounded(x / size)
    OUTER = 1  # rounded(weight * x / size)
    SHIFTED = 2  # rounded((1 + weight) * x / size)


Curve = tuple[float, float]
"""An activation g / (1 + exp(-g * (linear + cubic * g * g))), as (linear, cubic)."""

SILU: Curve = (1.0, 0.0)
GELU_TANH: Curve = (1.5957691216057308, 0.07135481627260025)  # 2 sqrt(2 / pi), and 0.044715 times that
GELU_QUICK: Curve = (1.702, 0.0)
CURVES = (SILU, GELU_TANH, GELU_QUICK)


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


def gated(gate: Tensor, up: Tensor, curve: Curve, kernel: str | None = None) -> Tensor:
    """Return activation(gate) * up for gate and up [..., n], contiguous, of their dtype.

    The activation is rounded to the dtype before the product. Halves of one tensor's rows are read in place. The
    caller has asked `takes(gate, up)`. Raises ValueError where the two differ in shape.
    """
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)}: expected one shape")
    gate, up = _in_rows(gate), _in_rows(up)
    y = torch.empty(gate.shape, dtype=gate.dtype)
    size = gate.shape[-1]
    if y.numel() == 0:
        return y
    gate_row, up_row = (x.stride(-2) if x.dim() > 1 else size for x in (gate, up))
    assert rows_linear._native is not None
    rows_linear._native.gate(
        kernel or rows_linear.KERNEL, gate.data_ptr(), up.data_ptr(), y.data_ptr(), y.numel() // size, size,
        gate_row, up_row, DTYPES[y.dtype], *curve, torch.get_num_threads(),
    )  # fmt: skip
    return y


def _in_rows(x: Tensor) -> Tensor:
    """Return x itself if its rows follow one another at equal distances, else a copy."""
    if x.is_contiguous():
        return x
    lone = all(count == 1 for count in x.shape[:-2])
    return x if lone and x.dim() > 1 and x.stride(-1) == 1 else x.contiguous()


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


def gated_twin(gate: Tensor, up: Tensor, curve: Curve) -> Tensor:
    """Return what `gated` returns, bit for bit, in plain torch."""
    linear, cubic = (torch.tensor(number, dtype=torch.float32) for number in curve)
    g = gate.float()
    square = torch.where(g * g < 2.0**100, g * g, 2.0**100)
    active = g / (_exponential(-(g * (linear + cubic * square))) + 1.0)
    return (active.to(gate.dtype).float() * up.float()).to(gate.dtype)


def _exponential(x: Tensor) -> Tensor:
    x = torch.where(x < 120.0, x, 120.0)
    x = torch.where(x > -120.0, x, -120.0)
    whole = (x * torch.tensor(1.4426950408889634, dtype=torch.float32)).round()
    r = (x - whole * 0.693359375) - whole * -2.12194440e-4
    p = torch.full_like(r, 1.0 / 5040.0)
    for number in (1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
        p = p * r + number
    n = whole.int()
    half = n >> 1
    for factor in (half, n - half):
        p = p * ((factor + 127) << 23).view(torch.float32)
    return p
