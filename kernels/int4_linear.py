"""Linear layers with 4-bit weights whose rows do not depend on one another, on the CPU.

Knows no module and no model. The one idea: 32 inputs of an output share a step d and a least value m, both bfloat16,
so that what is added up is exact and its order alone has to be fixed; 5 bits a weight, one stream. `packed_linear.py`
has what is done with x. csrc/int4.hpp says what is computed; the twin here gives the same bits.

Letters: K in_features, N out_features, B blocks of 32 inputs; x [..., K].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from longgraft.kernels import rows_linear
from longgraft.kernels.packed_linear import GROUP, MOST, PANEL, STEP, native_linear, refuse_empty, whole_rows

BLOCK = 32  # inputs that share d and m
LEVELS = 15  # steps from the least value to the greatest
HALVES, FACTORS = PANEL * BLOCK // 2, PANEL * 2  # bytes of q, and of d or m, in a block of 64 outputs
BLOCK_BYTES = HALVES + 2 * FACTORS
_SLICE = 1 << 21  # elements that are packed at a time, or 64 outputs of more

# (share of the range of a block's values that is kept, around its middle; steps in it). Fewer than 15 steps, because
# weights that come from a file with 4 bits lie on a grid of which not all steps are used.
TRIES = (*((1.0, steps) for steps in range(LEVELS, 7, -1)), (0.95, LEVELS), (0.9, LEVELS), (0.85, LEVELS))
LINES = 2  # how often a line is then laid through what was found; a third gains 0.1 % (Qwen2.5-Coder-0.5B)


@dataclass(frozen=True, slots=True, eq=False)
class Packed4:
    """A 4-bit weight `[outputs, inputs]`.

    `values [panels, blocks, 1280]` uint8: for 64 outputs and 32 inputs 1024 bytes `[pair, output, input]` with input 8
    pair + i in the low half and input 8 pair + 4 + i in the high half, then 64 d and 64 m in bfloat16. What fills up
    panels has d = m = 0, what fills up blocks q = 0.
    """

    values: Tensor
    outputs: int
    inputs: int
    bits: ClassVar[int] = 4
    scale: ClassVar[None] = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory, filling included."""
        return self.values.nbytes


def pack(weight: Tensor) -> Packed4:
    """Return `weight [N, K]` (any floating dtype, on the CPU) in 4 bits: of some d and m for each block the best.

    Best is the least squared error; csrc/int4_pack.hpp says it exactly. Native code and the twin, which is for where it
    was not built, give the same bytes. Raises ValueError for an empty weight and for values that are not finite or not
    below 2^100 in magnitude. Takes 8 bytes of scratch (the twin 32) for each of 2^21 elements, or of 64 outputs.
    """
    outputs, inputs = weight.shape
    refuse_empty(weight)
    panels, blocks = -(-outputs // PANEL), -(-inputs // BLOCK)
    values = torch.empty(panels, blocks, BLOCK_BYTES, dtype=torch.uint8)
    taken = max(1, _SLICE // (PANEL * BLOCK * blocks)) * PANEL
    for begin in range(0, outputs, taken):
        part = weight.detach()[begin : begin + taken].float()
        if not bool((torch.stack(part.aminmax()).abs() < MOST).all()):
            raise ValueError("a weight with infinite or undefined values, or with magnitudes from 2^100 on")
        rows = -(-len(part) // PANEL) * PANEL
        filled = torch.zeros(rows, blocks * BLOCK)
        filled[: len(part), :inputs] = part
        filled[: len(part), inputs:] = part[:, -1:]  # within the range of its block
        _write(values[begin // PANEL : (begin + rows) // PANEL], filled, inputs)
    return Packed4(values, outputs, inputs)


def _write(values: Tensor, weight: Tensor, inputs: int) -> None:
    """Pack fp32 `weight [64 * panels, 32 * B]` into `values [panels, B, 1280]`."""
    tries = torch.tensor([(share / steps, (1 - share) / 2) for share, steps in TRIES])
    if rows_linear._native is None:
        _write_twin(values, weight, inputs, tries)
    else:
        at, sizes = (weight.data_ptr(), tries.data_ptr(), values.data_ptr()), (*values.shape[:2], inputs, len(tries))
        rows_linear._native.pack_int4(at, sizes, LINES, torch.get_num_threads())


def _write_twin(values: Tensor, weight: Tensor, inputs: int, tries: Tensor) -> None:
    """Do what native code does, byte for byte, in plain torch."""
    panels, blocks = values.shape[:2]
    d, m = _factors(weight.view(-1, BLOCK), tries)
    q = _levels(weight.view(-1, BLOCK), d, m).to(torch.uint8)
    q.view(len(weight), -1)[:, inputs:] = 0
    steps = q.view(panels, PANEL, blocks, -1, 2, STEP)
    halves = (steps[..., 0, :] | steps[..., 1, :] << 4).view(torch.int32)[..., 0]  # inputs of a step move together
    values[..., :HALVES].view(torch.int32).view(panels, blocks, -1, PANEL).copy_(halves.permute(0, 2, 3, 1))
    for place, factor in enumerate((d, m)):
        begin = HALVES + place * FACTORS
        there = values[..., begin : begin + FACTORS].view(torch.bfloat16)
        there.copy_(factor.view(panels, PANEL, blocks).transpose(1, 2))


def _factors(weight: Tensor, tries: Tensor) -> tuple[Tensor, Tensor]:
    """Return d and m of each block of `weight [n, 32]`, fp32 that bfloat16 holds."""
    low, high = weight.aminmax(dim=-1)
    span = high - low
    first, *others = [(_rounded(span * factor), _rounded(low + span * offset)) for factor, offset in tries]
    best = (*first, _error(weight, *first))
    for d, m in others:
        _keep_better(best, weight, d, m)
    for _ in range(LINES):
        _keep_better(best, weight, *_line(weight, *best[:2]))
    return best[:2]


def _line(weight: Tensor, d: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the straight line through the values over their q of least squared error; d and m where there is none."""
    q = _levels(weight, d, m)
    mean, middle = _sum(q) / BLOCK, _sum(weight) / BLOCK
    q = q - mean[:, None]
    spread = _sum(q * q)
    slope = _sum(q * weight) / spread
    is_line = (spread > 0) & (slope > 0)
    return torch.where(is_line, _rounded(slope), d), torch.where(is_line, _rounded(middle - slope * mean), m)


def _keep_better(best: tuple[Tensor, Tensor, Tensor], weight: Tensor, d: Tensor, m: Tensor) -> None:
    """Write d, m and their error over those of `best` where the error is less."""
    error = _error(weight, d, m)
    is_better = error < best[2]
    for kept, new in zip(best, (d, m, error), strict=True):
        kept.copy_(torch.where(is_better, new, kept))


def _levels(weight: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """Return q of every value, in fp32."""
    step = torch.where(d > 0, d, 1.0)
    return ((weight - m[:, None]) / step[:, None]).clamp_(0, LEVELS).round_()


def _error(weight: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """Return the root of each block's squared error."""
    scale = torch.where(d >= 2.0**-120, 1 / d, 0.0)  # a finite one
    exact = (weight * scale[:, None]).add_((-m * scale)[:, None])
    off = exact.clamp(0, LEVELS).round_().sub_(exact)
    return _sum(off * off).sqrt() * d


def _sum(numbers: Tensor) -> Tensor:
    """Add each row's 32 numbers in a fixed order."""
    while numbers.shape[1] > 1:
        first, second = numbers.chunk(2, dim=1)
        numbers = first + second
    return numbers[:, 0]


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().float() + 0.0  # no -0


def unpack(packed: Packed4) -> tuple[Tensor, Tensor, Tensor]:
    """Return q `[N, B, 32]` in uint8, what fills up inputs included, and d and m `[N, B]` in fp32."""
    panels, blocks = packed.values.shape[:2]
    words = packed.values[..., :HALVES].view(torch.int32).view(panels, blocks, -1, PANEL).permute(0, 3, 1, 2)
    halves = words.contiguous()[..., None].view(torch.uint8)
    q = torch.stack((halves & 15, halves >> 4), dim=-2).view(panels * PANEL, blocks, BLOCK)
    factors = packed.values[..., HALVES:].view(torch.bfloat16).view(panels, blocks, 2, PANEL).float()
    d, m = factors.permute(2, 0, 3, 1).reshape(2, panels * PANEL, blocks)[:, : packed.outputs]
    return q[: packed.outputs], d, m


def dequantized(packed: Packed4) -> Tensor:
    """Return the weight that the values stand for, fp32 `[N, K]`."""
    q, d, m = unpack(packed)
    return (q * d[..., None]).add_(m[..., None]).view(packed.outputs, -1)[:, : packed.inputs]


def int4_linear(x: Tensor, packed: Packed4, bias: Tensor | None = None, kernel: str | None = None) -> Tensor:
    """Return x [..., K] times the weight transposed, plus fp32 bias [N], as [..., N] of x's dtype; no gradient.

    Computed by native code where that can, else by `twin`. Raises ValueError; see `native_linear`.
    """
    y = native_linear(x, packed, bias, kernel)
    return twin(x, packed, bias) if y is None else y


def twin(x: Tensor, packed: Packed4, bias: Tensor | None = None) -> Tensor:
    """Return what `int4_linear` returns, bit for bit, in plain torch."""
    rows = x.reshape(-1, packed.inputs).float()
    q, d, m = unpack(packed)
    totals, block = torch.zeros(len(rows), packed.outputs), 0
    for group in rows.split(GROUP, dim=1):
        whole, scale = whole_rows(group)
        part = torch.zeros_like(totals)
        for numbers in pad(whole, (0, -whole.shape[1] % BLOCK)).split(BLOCK, dim=1):
            sums = numbers @ q[:, block].float().T  # exact in any order: 15 * 127 * 32 < 2^16
            part += sums * d[:, block]  # exact products, too: 16 bits times 8
            part += numbers.sum(1, keepdim=True) * m[:, block]
            block += 1
        totals += part * scale[:, None]
    totals = totals if bias is None else totals + bias
    return totals.to(x.dtype).reshape(*x.shape[:-1], packed.outputs)
