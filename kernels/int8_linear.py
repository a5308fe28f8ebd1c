"""Linear layers with 8-bit weights whose rows do not depend on one another, on the CPU.

Knows no module and no model. The one idea: an output's weights are whole numbers of one byte times one scale, kept in
the order in which they are read; `packed_linear.py` has what is done with x. csrc/int8.hpp says what is computed; the
twin here gives the same bits.

Letters: K in_features, N out_features; x [..., K].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longgraft.kernels.packed_linear import GROUP, PANEL, STEP, native_linear, refuse_empty, whole_rows

OFFSET = 128
_SLICE = 64 * PANEL  # outputs that are packed at a time, so that few are ever held in fp32


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
    bits: ClassVar[int] = 8

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
    refuse_empty(weight)
    panels, steps = -(-outputs // PANEL), -(-inputs // STEP)
    values = torch.empty(panels, steps, PANEL, STEP, dtype=torch.uint8)
    words = values.view(torch.int32)[..., 0]  # a step's inputs of one output move together
    scale = torch.zeros(panels * PANEL)
    for begin in range(0, outputs, _SLICE):
        part = weight.detach()[begin : begin + _SLICE].float()
        whole, factor = whole_rows(part)
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

    Computed by native code where that can, else by `twin`. Raises ValueError; see `native_linear`.
    """
    y = native_linear(x, packed, bias, kernel)
    return twin(x, packed, bias) if y is None else y


def twin(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Return what `int8_linear` returns, bit for bit, in plain torch."""
    rows = x.reshape(-1, packed.inputs).float()
    totals = torch.zeros(len(rows), packed.outputs)
    for part, weight in zip(rows.split(GROUP, dim=1), unpack(packed).split(GROUP, dim=1), strict=True):
        whole, scale = whole_rows(part)
        sums = whole @ weight.float().T  # exact in any order: 127 * 127 * 128 < 2^24
        totals += sums * scale[:, None]
    y = totals * packed.scale[: packed.outputs]
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], packed.outputs)
