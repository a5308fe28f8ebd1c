"""Linear layers with 8-bit weights whose rows do not depend on one another, on the CPU.

Knows no module and no model. The one idea: each row of x is made whole by itself (every 128 inputs get a scale) and
products of whole numbers are summed exactly, so that a row's result is bitwise the same whether it is computed alone,
among 16 rows of a tree or among 512 of a prompt, in native code or in its twin here. Weights take one byte each and
are kept in the order in which they are read. csrc/int8.hpp says what is computed.

Letters: K in_features, N out_features; x [..., K].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longgraft.kernels import rows_linear
from longgraft.kernels.rows_linear import DTYPES

PANEL = 64  # outputs
STEP = 4  # inputs
GROUP = 128  # inputs that share a scale in a row of x
OFFSET = 128
LEAST_TOP = 2.0**-100
_SLICE = 64 * PANEL  # outputs that are packed at a time, so that few are ever held in fp32

KERNEL: str | None = rows_linear._native.best_int8_kernel() if rows_linear._native is not None else None
"""Instruction set in use: "vnni", "avx512", "avx2", "plain", or None when not built (then the twin computes)."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """An 8-bit weight `[outputs, inputs]`.

    `values [panels, steps, 64, 4]` uint8: output 64p + o, input 4s + i, plus 128; `scale [64 * panels]` fp32: what an
    output's values are multiplied with. What fills up panels and steps counts as 0.
    """

    values: Tensor
    scale: Tensor
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory, filling included."""
        return self.values.nbytes + self.scale.nbytes


def pack(weight: Tensor) -> Packed:
    """Return `weight [N, K]` (any floating dtype, on the CPU) in 8 bits, each output by its own largest magnitude.

    Raises ValueError for an empty weight and for values that are not finite in fp32. Takes 16 bytes of scratch for
    each element of 4096 outputs.
    """
    outputs, inputs = weight.shape
    if outputs == 0 or inputs == 0:
        raise ValueError(f"a weight of shape {outputs} x {inputs}; expected at least one input and output")
    panels, steps = -(-outputs // PANEL), -(-inputs // STEP)
    values = torch.empty(panels, steps, PANEL, STEP, dtype=torch.uint8)
    words = values.view(torch.int32)[..., 0]  # a step's inputs of one output move together
    scale = torch.zeros(panels * PANEL)
    for begin in range(0, outputs, _SLICE):
        part = weight.detach()[begin : begin + _SLICE].float()
        whole, factor = _whole(part)
        if not factor.isfinite().all():
            raise ValueError("a weight with infinite or undefined values")
        scale[begin : begin + len(part)] = factor
        filled = torch.full((-(-len(part) // PANEL) * PANEL, steps * STEP), OFFSET, dtype=torch.uint8)
        filled[: len(part), :inputs] = (whole + OFFSET).to(torch.uint8)
        first, last = begin // PANEL, (begin + len(filled)) // PANEL
        words[first:last] = filled.view(torch.int32).view(-1, PANEL, steps).transpose(1, 2)
    return Packed(values, scale, outputs, inputs)


def unpack(packed: Packed) -> Tensor:
    """Return the values as int8 `[N, K]`."""
    panels, steps = packed.values.shape[:2]
    words = packed.values.view(torch.int32)[..., 0].transpose(1, 2).clone(memory_format=torch.contiguous_format)
    flat = words.view(panels * PANEL, steps).view(torch.uint8)
    return (flat[: packed.outputs, : packed.inputs] ^ OFFSET).view(torch.int8)


def dequantized(packed: Packed) -> Tensor:
    """Return the weight that the values stand for, fp32 `[N, K]`."""
    return unpack(packed) * packed.scale[: packed.outputs, None]


def int8_linear(x: Tensor, packed: Packed, bias: Tensor | None = None, kernel: str | None = None) -> Tensor:
    """Return x [..., K] times the weight transposed, plus fp32 bias [N], as [..., N] of x's dtype; no gradient.

    Uses at most `torch.get_num_threads()` threads of torch's own pool. Dtypes other than fp32, bf16 and fp16, and
    everything where the native module was not built, are computed by `twin`. Raises ValueError for x on another
    device, of another width, or where a gradient is wanted. `kernel` names the instruction set, for tests.
    """
    if not x.is_cpu or x.dim() == 0 or x.shape[-1] != packed.inputs:
        raise ValueError(f"x {tuple(x.shape)} on {x.device}; expected [..., {packed.inputs}] on the CPU")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("8-bit linear layers have no gradients; call them under torch.no_grad()")
    chosen = kernel or KERNEL
    if chosen is None or x.dtype not in DTYPES:
        return twin(x, packed, bias)
    x = x if x.is_contiguous() else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty((*x.shape[:-1], packed.outputs))
    at = (x.data_ptr(), packed.values.data_ptr(), packed.scale.data_ptr(), bias.data_ptr() if bias is not None else 0)
    sizes = (x.numel() // packed.inputs, packed.inputs, packed.outputs)
    assert rows_linear._native is not None
    rows_linear._native.int8_linear(chosen, (*at, y.data_ptr()), sizes, DTYPES[x.dtype], torch.get_num_threads())
    return y


def twin(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Return what `int8_linear` returns, bit for bit, in plain torch."""
    rows = x.reshape(-1, packed.inputs).float()
    totals = torch.zeros(len(rows), packed.outputs)
    for part, weight in zip(rows.split(GROUP, dim=1), unpack(packed).split(GROUP, dim=1), strict=True):
        whole, scale = _whole(part)
        sums = whole @ weight.float().T  # exact in any order: 127 * 127 * 128 < 2^24
        totals += sums * scale[:, None]
    y = totals * packed.scale[: packed.outputs]
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], packed.outputs)


def _whole(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each fp32 row's whole numbers and its scale: 0 for a row of zeros, NaN where a value is not finite."""
    top = rows.abs().amax(-1)
    finite, used = top.isfinite(), top >= LEAST_TOP
    most = torch.full_like(top, 127.0)  # a number over a tensor would be its reciprocal times the number
    factor = torch.where(finite & used, most / top, 0.0)
    scale = torch.where(finite, torch.where(used, top / most, 0.0), torch.nan)
    whole = torch.where(finite[:, None], rows * factor[:, None], 0.0).round()
    return whole, scale
