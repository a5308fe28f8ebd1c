"""Chooses one token from one row of logits: the same function for plain decoding and for every tree node.

Knows no tree, no model and no stop rule. Order as in transformers: processors, temperature, top-k, top-p,
min-p, then Gumbel-max with counter-based noise (`noise`), so that a draw depends on the logits, the tokens
before it and the seed alone; temperature 0 is one argmax. Scores are fp32, or float64 where the logits are.

Filters work on the host: there a partition or a sort of the few best tokens is quick, and a pool of them is
known to suffice by its mass. Equal scores count as ordered by token id, so survivors do not depend on the
route taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longgraft.config import GraftError, SamplingParams, TokenLogprob
from longgraft.noise import Floats, Ints, winner, winner_plain
from longgraft.processors import Pipeline, Processor, build, split
from longgraft.resolve import resolve

__all__ = ["Draw", "Sampler", "resolve", "survivors", "survivors_plain"]

# How far below the best score (nats) a pool of tokens reaches before all of them are looked at.
_REACHES = (4.0, 8.0, 12.0, 16.0, np.inf)
_WIDE = (torch.float32, torch.float64)
# More survivors than this are screened over the whole vocabulary, which costs about as much.
_MANY = 4096


@dataclass(frozen=True, slots=True)
class Draw:
    """One chosen token, with its log-probability when that was asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


class Mask(Protocol):
    """Says which tokens may come; `longgraft.matcher.Matcher` is the real one."""

    def mask(self, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        """Return `scores [V]` with -inf for every token that may not follow `token_ids`."""


class Sampler:
    """Draws the tokens of one sequence. `seed`, `params` and `mask` are what makes them reproducible."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, mask: Mask | None = None
    ) -> None:
        """Take resolved params (`resolve`); raises `GraftError` if they are not, or hold an unusable processor."""
        if params.temperature is None or params.seed is None:
            raise GraftError("the sampling parameters are not resolved: call longgraft.sampler.resolve first")
        split(params.processors)
        self.params = params
        self.seed = params.seed
        self.mask = mask
        self._temperature = params.temperature
        self._prompt_ids = list(prompt_ids)
        self._prompt_len = len(prompt_ids)
        self._vocab_size = vocab_size
        self._history: _History | None = None
        self._pipeline: Pipeline | None = None
        self._is_ready = False

    def draw(self, logits: Tensor, token_ids: Sequence[int]) -> Draw:
        """Draw the token that follows `token_ids` (prompt and output so far) from raw `logits [V]`.

        Of `token_ids` only the length and the entries after the previous call's are read. Processors run once
        per call. Raises `GraftError` for NaN or infinite logits and where every token is forbidden.
        """
        if logits.ndim != 1 or logits.shape[0] < self._vocab_size:
            raise GraftError(f"logits have shape {list(logits.shape)}: expected [{self._vocab_size}]")
        position = len(token_ids) - self._prompt_len
        logits = logits.detach() if logits.dtype in _WIDE else logits.detach().float()
        self._prepare(logits.device)
        scores, is_filtered = self._processed(logits, token_ids)
        num_top = self.params.logprobs
        with np.errstate(all="ignore"):  # scores at the ends of the range overflow to the right infinity
            if self._temperature == 0:
                token_id = self._greedy(scores, position)
            else:
                token_id = self._sample(scores, position, is_filtered)
            return Draw(token_id, None if num_top is None else _logprob(_host(logits), token_id, num_top))

    def reads_text(self, device: torch.device) -> bool:
        """Say whether a draw from logits on `device` needs the text so far, beyond its length."""
        self._prepare(device)
        return self._pipeline is not None or self.mask is not None

    def _prepare(self, device: torch.device) -> None:
        """Build the processors when the device is known: at the first draw."""
        if self._is_ready:
            return
        self._pipeline = build(self.params, self._prompt_ids, self._vocab_size, device)
        if self._pipeline is not None:
            self._history = _History(self._prompt_ids, device)
        self._prompt_ids = []  # a long prompt; only its length is needed from here on
        self._is_ready = True

    def _processed(self, logits: Tensor, token_ids: Sequence[int]) -> tuple[Tensor, bool]:
        """Return the scores, and whether temperature and filters are already in them."""
        if self._pipeline is None or self._history is None:
            return self._masked(token_ids, logits), False
        input_ids, after = self._history.rows(token_ids), self._pipeline.after
        scores = _applied(self._pipeline.before, input_ids, logits.clone()[None])
        scores = self._masked(token_ids, scores[0])[None]
        return _applied(after or [], input_ids, scores)[0], after is not None

    def _masked(self, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        return scores if self.mask is None else self.mask.mask(token_ids, scores)

    def _greedy(self, scores: Tensor, position: int) -> int:
        # On 152K scores numpy takes 12 us where torch takes 300; both return the lowest index of a tie.
        on_host = scores.device.type == "cpu"
        best = int(_host(scores).argmax()) if on_host else int(torch.argmax(scores))
        _require_usable(float(scores[best]), position)
        return best

    def _sample(self, scores: Tensor, position: int, is_filtered: bool) -> int:
        params, host = self.params, _host(scores)
        if not is_filtered and self._temperature != 1.0:
            host = host / host.dtype.type(self._temperature)
        peak = float(host.max())
        if not np.isfinite(peak):
            _require_usable(float(scores.max()), position)
            raise GraftError(
                f"a score at output position {position} is infinite at temperature {self._temperature}: sampling "
                "needs finite logits; for the likeliest token use temperature 0"
            )
        key = (self.seed, params.sample_index, position)
        top_k, top_p, min_p = params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0
        if is_filtered or not (0 < top_k < len(host) or top_p < 1 or min_p > 0):
            return winner(host, key)
        token_ids = survivors(host, top_k, top_p, min_p)
        if len(token_ids) == 1:
            return int(token_ids[0])
        if len(token_ids) <= _MANY:
            return winner_plain(host[token_ids], token_ids, key)
        kept = np.full_like(host, -np.inf)
        kept[token_ids] = host[token_ids]
        return winner(kept, key)


class _History:
    """The tokens of a sequence as one growing LongTensor, so that a draw copies only what is new."""

    def __init__(self, prompt_ids: Sequence[int], device: torch.device) -> None:
        self._prompt_len = len(prompt_ids)
        self._tokens = torch.tensor(list(prompt_ids), dtype=torch.int64, device=device)
        self._filled = self._prompt_len
        self._last = int(prompt_ids[-1]) if self._prompt_len else -1

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        """Return `token_ids` as [1, n]; after a truncation the output part is read anew."""
        n = len(token_ids)
        if n < self._filled or (self._filled and token_ids[self._filled - 1] != self._last):
            self._filled = self._prompt_len
        if n > self._tokens.shape[0]:
            grown = self._tokens.new_empty(2 * n)
            grown[: self._filled] = self._tokens[: self._filled]
            self._tokens = grown
        if n > self._filled:
            self._tokens[self._filled : n] = torch.tensor(list(token_ids[self._filled : n]))
            self._filled, self._last = n, int(token_ids[n - 1])
        return self._tokens[None, :n]


def _applied(processors: Sequence[Processor], input_ids: Tensor, scores: Tensor) -> Tensor:
    """Return `scores [1, V]` as the processors leave them, one after the other."""
    for processor in processors:
        shape = scores.shape
        scores = processor(input_ids, scores)
        if not isinstance(scores, Tensor) or scores.shape != shape:
            raise GraftError(f"{type(processor).__name__} returned no scores of shape {list(shape)}")
    return scores


def _host(scores: Tensor) -> Floats:
    return (scores if scores.dtype in _WIDE else scores.float()).cpu().numpy()


def _require_usable(best: float, position: int) -> None:
    """Raise if the best score says that there is nothing to choose: NaN sorts above everything."""
    if best != best:
        raise GraftError(f"the logits at output position {position} contain NaN: check the model and its dtype")
    if best == -np.inf:
        raise GraftError(f"every token is forbidden at output position {position}: loosen the processors")


def _logprob(scores: Floats, token_id: int, num_top: int) -> TokenLogprob:
    """Return the log-softmax of raw logits at `token_id` and at the `num_top` likeliest tokens."""
    peak = scores.max()
    total = peak + np.log(np.exp(scores - peak).sum())
    edge = np.partition(scores, -num_top)[-num_top] if 0 < num_top < len(scores) else -np.inf
    likeliest = np.flatnonzero(scores >= edge)
    likeliest = likeliest[np.argsort(-scores[likeliest], kind="stable")[:num_top]]
    top = tuple((int(i), float(scores[i] - total)) for i in likeliest)
    own = scores[token_id]
    rank = 1 + int(np.count_nonzero(scores > own)) + int(np.count_nonzero(scores[:token_id] == own))
    return TokenLogprob(token_id, float(own - total), top, rank)


def survivors(scores: Floats, top_k: int, top_p: float, min_p: float) -> Ints:
    """Return the token ids, ascending, that top-k, top-p and min-p leave of `scores [V]` (after temperature).

    As transformers filters: top-k keeps all that equal the k-th score, top-p keeps a token while the mass
    before it is below `top_p`, min-p keeps what has at least `min_p` of the best token's probability. 0, 1
    and 0 turn them off.
    """
    peak = scores.max()
    if 0 < top_k < len(scores):
        token_ids = _down_to(scores, np.partition(scores, -top_k)[-top_k])
        if top_p < 1:
            token_ids, _ = _nucleus(scores, token_ids, peak, top_p * _mass(scores[token_ids], peak))
    elif top_p < 1:
        token_ids = _whole_nucleus(scores, peak, top_p * _mass(scores, peak))
    else:
        token_ids = _down_to(scores, -np.inf)
    return token_ids[np.exp(scores[token_ids] - peak) >= min_p]


def survivors_plain(scores: Floats, top_k: int, top_p: float, min_p: float) -> Ints:
    """Return what `survivors` returns by one full sort: its oracle."""
    peak = scores.max()
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > -np.inf]
    total = _mass(scores, peak)
    if 0 < top_k < len(scores):
        order = order[scores[order] >= scores[order[min(top_k, len(order)) - 1]]]
        total = _mass(scores[np.sort(order)], peak)
    if top_p < 1:
        mass = np.cumsum(np.exp(scores[order] - peak), dtype=np.float64)
        order = order[np.concatenate(([0.0], mass[:-1])) < top_p * total]
    return np.sort(order[np.exp(scores[order] - peak) >= min_p])


def _down_to(scores: Floats, edge: Any) -> Ints:
    """Return the tokens that score at least `edge`, ascending; never a forbidden one."""
    return np.flatnonzero(scores >= np.maximum(edge, np.finfo(scores.dtype).min))


def _mass(scores: Floats, peak: Any) -> float:
    return float(np.exp(scores - peak).sum())


def _whole_nucleus(scores: Floats, peak: Any, goal: float) -> Ints:
    """Return the nucleus of all tokens, from the smallest pool whose mass reaches `goal`."""
    for reach in _REACHES:
        pool = _down_to(scores, peak - reach)
        # A cheap look before the sort; the sorted sum decides.
        if reach == np.inf or _mass(scores[pool], peak) >= goal:
            kept, is_enough = _nucleus(scores, pool, peak, goal)
            if is_enough:
                break
    return kept


def _nucleus(scores: Floats, pool: Ints, peak: Any, goal: float) -> tuple[Ints, bool]:
    """Return the tokens of `pool` whose preceding mass is below `goal`, and whether the pool reaches `goal`.

    A pool holds every token down to some score, so once its mass reaches the goal nothing outside can be
    kept.
    """
    values = scores[pool]
    ranked = np.sort(values)[::-1]
    mass = np.cumsum(np.exp(ranked - peak), dtype=np.float64)
    count = min(int(np.searchsorted(mass, goal)) + 1, len(pool))
    edge = ranked[count - 1]
    kept = values > edge
    kept[np.flatnonzero(values == edge)[: count - int(kept.sum())]] = True
    return pool[kept], bool(mass[-1] >= goal)
