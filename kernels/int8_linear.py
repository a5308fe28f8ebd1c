"""Linear layers with 8-bit weights whose rows do not depend on one another, on the CPU.

Knows no module and no model. The one idea: each row of x gets a scale of its own and the products of whole numbers
are summed exactly, so that a row's result is bitwise the same whether it is computed alone, among 16 rows of a tree
or among 512 of a prompt, in native code or in its twin here. Weights take one byte each; they are kept in the order
in which they are read. csrc/int8.hpp says what is computed.

Letters: K in_features, N out_features; x [..., K].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longgraft.kernels import rows_linear
from longgraft.kernels.rows_linear import DTYPES

PANEL = 64  # outputs
STEP = 4  # inputs
MOST_INPUTS = 131072  # 127 * 127 * so many is less than 2^31
LEAST_TOP = 2.0**-100
_EXACT = 1024  # products of two values whose sum is exact in fp32: 127 * 127 * 1024 < 2^24
_SLICE = 64 * PANEL  # outputs that are packed at a time, so that few are ever held in fp32

KERNEL: str | None = rows_linear._native.best_int8_kernel() if rows_linear._native is not None else None
"""Instruction set in use: "vnni", "avx512", "avx2", "plain", or None when not built (then the twin computes)."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """An 8-bit weight `[outputs, inputs]`.

    `values [panels, steps, 64, 4]` int8: output 64p + o, input 4s + i; `scale [64 * panels]` fp32: what an output's
    values are multiplied with; `sums [64 * panels]` int32 of an output's values. What fills up panels and steps is 0.
    """

    values: Tensor
    scale: Tensor
    sums: Tensor
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory, filling included."""
        return self.values.nbytes + self.scale.nbytes + self.sums.nbytes


def pack(weight: Tensor) -> Packed:
    """Return `weight [N, K]` (any floating dtype, on the CPU) in 8 bits, each output by its own largest magnitude.

    Raises ValueError for shapes the kernel does not take (K from 1 to 131072, N from 1) and for values that are not
    finite in fp32. Takes 4 bytes of scratch for each element of 4096 outputs.
    """
    outputs, inputs = weight.shape
    if not 0 < inputs <= MOST_INPUTS or outputs == 0:
        raise ValueError(f"a weight of shape {outputs} x {inputs}; expected up to {MOST_INPUTS} inputs, and outputs")
    panels, steps = -(-outputs // PANEL), -(-inputs // STEP)
    values = torch.zeros(panels, steps, PANEL, STEP, dtype=torch.int8)
    scale, sums = torch.zeros(panels * PANEL), torch.zeros(panels * PANEL, dtype=torch.int32)
    for begin in range(0, outputs, _SLICE):
        part = weight.detach()[begin : begin + _SLICE].float()
        whole, scale[begin : begin + len(part)] = _whole(part)
        if not scale[begin : begin + len(part)].isfinite().all():
            raise ValueError("a weight with infinite or undefined values")
        sums[begin : begin + len(part)] = whole.sum(1, dtype=torch.int32)
        filled = torch.zeros(-(-len(part) // PANEL) * PANEL, steps * STEP, dtype=torch.int8)
        filled[: len(part), :inputs] = whole
        first = begin // PANEL
        values[first : first + len(filled) // PANEL] = filled.view(-1, PANEL, steps, STEP).transpose(1, 2)
    return Packed(values, scale, sums, outputs, inputs)


def unpack(packed: Packed) -> Tensor:
    """Return the values as int8 `[N, K]`."""
    panels, steps = packed.values.shape[:2]
    flat = packed.values.transpose(1, 2).reshape(panels * PANEL, steps * STEP)
    return flat[: packed.outputs, : packed.inputs]


def dequantized(packed: Packed) -> Tensor:
    """Return the weight that the values stand for, fp32 `[N, K]`."""
    return unpack(packed) * packed.scale[: packed.outputs, None]


def int8_linear(x: Tensor, packed: Packed, bias: Tensor | None = None, kernel: str | None = None) -> Tensor:
    """Return x [..., K] times the weight transposed, plus fp32 bias [N], as [..., N] of x's dtype; no gradient.

    Uses at most `torch.get_num_threads()` threads of torch's own pool. Dtypes other than fp32, bf16 and fp16, and
    everything where the native module was not built, are computed by `twin`. Raises ValueError for x on another
    device, of another width, or where a gradient is wanted. `kernel` names the instruction set, for tests.
    """
    if x.device.type != "cpu" or x.dim() == 0 or x.shape[-1] != packed.inputs:
        raise ValueError(f"x {tuple(x.shape)} on {x.device}; expected [..., {packed.inputs}] on the CPU")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("8-bit linear layers have no gradients; call them under torch.no_grad()")
    chosen = kernel or KERNEL
    if chosen is None or x.dtype not in DTYPES:
        return twin(x, packed, bias)
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty((*x.shape[:-1], packed.outputs))
    parts = (x, packed.values, packed.scale, packed.sums, bias, y)
    addresses = [0 if part is None else part.data_ptr() for part in parts]
    sizes = (x.numel() // packed.inputs, packed.inputs, packed.outputs)
    assert rows_linear._native is not None
    rows_linear._native.int8_linear(chosen, addresses, sizes, DTYPES[x.dtype], torch.get_num_threads())
    return y


def twin(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Return what `int8_linear` returns, bit for bit, in plain torch."""
    rows = x.reshape(-1, packed.inputs).float()
    whole, row_scale = _whole(rows)
    sums = torch.zeros(len(rows), packed.outputs, dtype=torch.int32)
    for left, right in zip(_cuts(whole), _cuts(unpack(packed)), strict=True):
        sums += (left @ right.T).to(torch.int32)
    y = sums.float() * packed.scale[: packed.outputs] * row_scale[:, None]
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], packed.outputs)


def _whole(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's whole numbers, int8, and its scale: 0 for a row of zeros, NaN where a value is not finite."""
    top = rows.abs().amax(-1)
    finite, used = top.isfinite(), top >= LEAST_TOP
    most = torch.full_like(top, 127.0)  # a number over a tensor would be its reciprocal times the number
    factor = torch.where(finite & used, most / top, 0.0)
    scale = torch.where(finite, torch.where(used, top / most, 0.0), torch.nan)
    whole = torch.where(finite[:, None], rows * factor[:, None], 0.0).round()
    return whole.to(torch.int8), scale


def _cuts(whole: Tensor) -> Iterator[Tensor]:
    """Yield columns of whole numbers as fp32, so few at a time that their products add up exactly in any order."""
    return (part.float() for part in whole.split(_EXACT, dim=1))
