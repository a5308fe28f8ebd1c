"""Draws the next token of many rows where their logits lie: temperature, top-k and Gumbel-max without the host.

Knows torch only: no tree, no model. The one idea: the noise is `noise`'s own function, written in 64-bit integers and
doubles of which every operation rounds by itself, so it has the host's bits on every device, and a draw is the
host's: the same comparisons of the same numbers. What a draw would need the host for (processors, which see the text;
top-p and min-p, which compare sums and exponentials that a device rounds otherwise) is not drawn here: `why_not`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longgraft.config import GraftError, SamplingParams
from longgraft.noise import LN2_HIGH, LN2_LOW, MULTIPLIERS, SERIES, WEYL

_MASK = 0xFFFFFFFF
_MANTISSA, _HALF = (1 << 52) - 1, 1022 << 52
BLOCK_CELLS = 1 << 22
"""Noise of so many tokens at a time: some dozens of 32 MiB tensors come and go."""


def why_not(params: SamplingParams, reads_text: bool) -> str:
    """Return why these resolved params cannot be drawn from here, or an empty string."""
    if reads_text:
        return "a logits processor or a grammar needs the text so far"
    if params.logprobs is not None:
        return "log-probabilities are asked for"
    if params.temperature and ((params.top_p or 1.0) < 1 or (params.min_p or 0.0) > 0):
        return "top_p and min_p are decided on the host"
    return ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """How one request draws: `temperature [1]` in the logits' dtype, or None for greedy; `top_k` 0 = all."""

    temperature: Tensor | None
    top_k: int
    seed: int
    sample_index: int

    @classmethod
    def of(cls, params: SamplingParams, dtype: torch.dtype, device: torch.device) -> Drawing:
        """Make it of resolved params; `dtype` is the model's. Raises `GraftError` for what is drawn on the host."""
        if params.temperature is None or params.seed is None:
            raise GraftError("the sampling parameters are not resolved: call longgraft.sampler.resolve first")
        if reason := why_not(params, False):
            raise GraftError(f"draws on a device: {reason}")
        exact = dtype if dtype == torch.float64 else torch.float32
        # A tensor: by a plain number CUDA would multiply with its reciprocal.
        heat = torch.full((1,), params.temperature, dtype=exact, device=device) if params.temperature else None
        return cls(heat, params.top_k or 0, params.seed, params.sample_index)

    def draw(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token id for each row of `logits [N, V]` at output `positions [N]`, and whether it can be used [N].

        It cannot where the host's sampler would raise its error: NaN, or infinite scores.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature is None:
            best, token_ids = scores.max(dim=-1)
            return token_ids, best > -torch.inf  # NaN is the largest, and not above anything
        scores = scores / self.temperature
        peak = scores.amax(dim=-1)
        if 0 < self.top_k < scores.shape[-1]:
            edge = torch.topk(scores, self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < edge.clamp_min(torch.finfo(scores.dtype).min), -torch.inf)
        return winners(scores, positions, (self.seed, self.sample_index)), peak.isfinite()


def winners(scores: Tensor, positions: Tensor, key: tuple[int, int]) -> Tensor:
    """Return, for each row of `scores [N, V]`, the token id with the largest score + noise, the lowest of equal ones.

    `key`: seed and sample index.
    """
    rows, size = scores.shape
    step = max(4, BLOCK_CELLS // rows // 4 * 4)
    best = torch.full((rows,), -torch.inf, dtype=torch.float64, device=scores.device)
    winner = torch.zeros(rows, dtype=torch.int64, device=scores.device)
    for first in range(0, size, step):
        part = scores[:, first : first + step].double()
        part = part + gumbel(key, positions, first, part.shape[1])
        top, at = part.max(dim=-1)
        winner = torch.where(top > best, at + first, winner)
        best = torch.maximum(best, top)
    return winner


def gumbel(key: tuple[int, int], positions: Tensor, first: int, count: int) -> Tensor:
    """Return the noise of tokens first .. first + count - 1 at every position: doubles [N, count]; `first` % 4 is 0."""
    numbers = torch.arange(first // 4, -(-(first + count) // 4), device=positions.device)
    words = philox(numbers, positions, key).flatten(1)[:, :count]
    return -log(-log((words.double() + 0.5) * 2.0**-32))


def philox(numbers: Tensor, positions: Tensor, key: tuple[int, int]) -> Tensor:
    """Return the four words of every block number at every position, as int64 [N, B, 4]; see `longgraft.noise`."""
    seed, sample_index = key
    keys = [seed & _MASK, seed >> 32]
    shape = (len(positions), len(numbers))
    a, b = numbers.expand(shape), positions.long()[:, None].expand(shape)
    c, d = torch.full_like(a, sample_index & _MASK), torch.full_like(a, sample_index >> 32)
    for _ in range(10):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # wrapped: their 64 bits are what is meant
        a, b = ((right >> 32) & _MASK) ^ b ^ keys[0], right & _MASK
        c, d = ((left >> 32) & _MASK) ^ d ^ keys[1], left & _MASK
        keys = [(word + weyl) & _MASK for word, weyl in zip(keys, WEYL)]
    return torch.stack((a, b, c, d), dim=-1)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal doubles, with the bits of `longgraft.noise.log`."""
    bits = x.view(torch.int64)
    mantissa = ((bits & _MANTISSA) | _HALF).view(torch.float64)
    exponent = (bits >> 52) - 1022
    low = mantissa < 0.7071067811865476
    mantissa = torch.where(low, mantissa + mantissa, mantissa)
    scale = (exponent - low.long()).double()
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = f * f
    total = torch.full_like(f, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        total = total * square
        total = total + coefficient
    tail = scale * LN2_LOW + total * f
    return scale * LN2_HIGH + tail
