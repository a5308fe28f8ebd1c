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

from longgraft.kernels.packed_linear import GROUP, PANEL, STEP, native_linear, refuse_empty, whole_rows

BLOCK = 32  # inputs that share d and m
LEVELS = 15  # steps from the least value to the greatest
HALVES, FACTORS = PANEL * BLOCK // 2, PANEL * 2  # bytes of q, and of d or m, in a block of 64 outputs
BLOCK_BYTES = HALVES + 2 * FACTORS
MOST = 2.0**100  # magnitudes from here on could overflow in sums
_SLICE = 1 << 18  # elements that are packed at a time, or 64 outputs of more
_CHUNK = 1 << 11  # blocks whose factors are sought at a time: their tries stay in a processor's own cache

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

    Best is the least squared error. Raises ValueError for an empty weight and for values that are not finite or not
    below 2^100 in magnitude. Takes 24 bytes of scratch for each of 2^18 elements, or of 64 outputs if they have more.
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
        _write(values[begin // PANEL : (begin + rows) // PANEL], filled.view(rows, blocks, BLOCK), inputs)
    return Packed4(values, outputs, inputs)


def _write(values: Tensor, weight: Tensor, inputs: int) -> None:
    """Pack `weight [64 * panels, B, 32]` into `values [panels, B, 1280]`."""
    panels, blocks = values.shape[:2]
    found = [_factors(chunk) for chunk in weight.view(-1, BLOCK).split(_CHUNK)]
    d, m = (torch.cat(parts).view(-1, blocks) for parts in zip(*found, strict=True))
    q = _levels(weight, d, m).to(torch.uint8)
    q.view(len(weight), -1)[:, inputs:] = 0
    steps = q.view(panels, PANEL, blocks, -1, 2, STEP)
    halves = (steps[..., 0, :] | steps[..., 1, :] << 4).view(torch.int32)[..., 0]  # inputs of a step move together
    values[..., :HALVES].view(torch.int32).view(panels, blocks, -1, PANEL).copy_(halves.permute(0, 2, 3, 1))
    for place, factor in enumerate((d, m)):
        begin = HALVES + place * FACTORS
        there = values[..., begin : begin + FACTORS].view(torch.bfloat16)
        there.copy_(factor.view(panels, PANEL, blocks).transpose(1, 2))


def _factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return d and m of each block of `weight [n, 32]`, fp32 that bfloat16 holds; of equally good ones the first."""
    low, high = weight.aminmax(dim=-1)
    span = high - low
    best = (d := _rounded(span / LEVELS), m := _rounded(low), _error(weight, d, m))
    for share, steps in TRIES[1:]:
        _keep_better(best, weight, _rounded(span * (share / steps)), _rounded(low + span * ((1 - share) / 2)))
    for _ in range(LINES):
        _keep_better(best, weight, *_line(weight, *best[:2]))
    return best[:2]


def _line(weight: Tensor, d: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the straight line through the values over their q of least squared error; d and m where there is none."""
    q = _levels(weight, d, m)
    mean, middle = q.mean(-1), weight.mean(-1)
    q -= mean[..., None]
    spread = (q * q).sum(-1)
    slope = (q * weight).sum(-1) / spread
    is_line = (spread > 0) & (slope > 0)
    return _rounded(torch.where(is_line, slope, d)), _rounded(torch.where(is_line, middle - slope * mean, m))


def _keep_better(best: tuple[Tensor, Tensor, Tensor], weight: Tensor, d: Tensor, m: Tensor) -> None:
    """Write d, m and their error over those of `best` where the error is less."""
    error = _error(weight, d, m)
    is_better = error < best[2]
    for kept, new in zip(best, (d, m, error), strict=True):
        kept.copy_(torch.where(is_better, new, kept))


def _levels(weight: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """Return q of every value, in fp32."""
    step = torch.where(d > 0, d, 1.0)[..., None]
    return (weight - m[..., None]).div_(step).round_().clamp_(0, LEVELS)


def _error(weight: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """Return the root of each block's squared error; undefined, so never less, where 1 / d is infinite."""
    scale = torch.where(d > 0, 1 / d, 0.0)
    exact = torch.addcmul((-m * scale)[..., None], weight, scale[..., None])
    off = exact.round().clamp_(0, LEVELS).sub_(exact)
    return torch.linalg.vector_norm(off, dim=-1).mul_(d)


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().float()


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
    y = totals if bias is None else totals + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], packed.outputs)
