"""What linear layers with 8-bit and with 4-bit weights have in common: rows made whole, and the call of native code.

Knows no width's layout, no module and no model. The one idea: each row of x is made whole by itself, in groups of 128
inputs that share a scale, and products of whole numbers are summed exactly; so a row's result is bitwise the same
whatever other rows are computed with it. csrc/packed.hpp says what is computed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longgraft.kernels import rows_linear
from longgraft.kernels.rows_linear import DTYPES

PANEL = 64  # outputs
STEP = 4  # inputs
GROUP = 128  # inputs that share a scale in a row of x
LEAST_TOP = 2.0**-100
MOST = 2.0**100  # magnitudes of 4-bit weights from here on could overflow in sums

KERNEL: str | None = rows_linear._native.best_packed_kernel() if rows_linear._native is not None else None
"""Instruction set in use: "vnni", "avx512", "avx2", "plain", or None when not built (then the twins compute)."""


class _Weight(Protocol):
    """A packed weight `[outputs, inputs]` as native code takes it; `scale` is None where it is among the values."""

    @property
    def bits(self) -> int: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor | None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...


def native_linear(x: Tensor, weight: _Weight, bias: Tensor | None, kernel: str | None) -> Tensor | None:
    """Return x [..., K] times the weight transposed, plus fp32 bias [N], as [..., N] of x's dtype; no gradient.

    None where the width's twin has to compute: for dtypes other than fp32, bf16 and fp16, and where the native module
    was not built. Uses at most `torch.get_num_threads()` threads of torch's own pool. Raises ValueError for x on
    another device, of another width, or where a gradient is wanted. `kernel` names the instruction set, for tests.
    """
    inputs, outputs = weight.inputs, weight.outputs
    if not x.is_cpu or x.dim() == 0 or x.shape[-1] != inputs:
        raise ValueError(f"x {tuple(x.shape)} on {x.device}; expected [..., {inputs}] on the CPU")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{weight.bits}-bit linear layers have no gradients; call them under torch.no_grad()")
    chosen = kernel or KERNEL
    if chosen is None or x.dtype not in DTYPES:
        return None
    x = x if x.is_contiguous() else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty((*x.shape[:-1], outputs))
    scale = weight.scale
    at = (x.data_ptr(), weight.values.data_ptr(), 0 if scale is None else scale.data_ptr())
    more = (0 if bias is None else bias.data_ptr(), y.data_ptr())
    sizes = (x.numel() // inputs, inputs, outputs)
    assert rows_linear._native is not None
    rows_linear._native.packed_linear(
        weight.bits, chosen, (*at, *more), sizes, DTYPES[x.dtype], torch.get_num_threads()
    )
    return y


def whole_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each fp32 row's whole numbers and its scale: 0 for a row of zeros, NaN where a value is not finite."""
    top = rows.abs().amax(-1)
    finite, used = top.isfinite(), top >= LEAST_TOP
    most = torch.full_like(top, 127.0)  # a number over a tensor would be its reciprocal times the number
    factor = torch.where(finite & used, most / top, 0.0)
    scale = torch.where(finite, torch.where(used, top / most, 0.0), torch.nan)
    whole = torch.where(finite[:, None], rows * factor[:, None], 0.0).round()
    return whole, scale


def refuse_empty(weight: Tensor) -> None:
    """Raise ValueError for a weight without outputs or inputs."""
    if weight.numel() == 0:
        shape = " x ".join(map(str, weight.shape))
        raise ValueError(f"a weight of shape {shape}; expected at least one input and output")
