"""The conditional logit of the learnt index in plain Python: additive weight tables that learn from every token.

Knows no texts: it takes a `Listing` whose options hold their table entries, and gives each a probability, and "none of
these" what is left. Floats are added in the order of `csrc/learnt.hpp`, so the numbers are the same bit for bit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longgraft.index.features import BASES, LENGTH_EDGES, NUM_CLASSES, NUM_WEIGHTS, RECENT_EDGES, Listing, Recent

MOST_WEIGHT = 50.0  # of the tables at the start: no sum of them overflows exp
MOST_SHRINK = 0.75  # beyond, the score of a path could grow along it


class Scored(NamedTuple):
    """A listed token and its probability, given the context."""

    token: int
    match_len: int
    place: int
    p: float


class Logit:
    """Weight tables; `rate` of the gradient steps on them, 0: they stay. Raises ValueError for what is neither."""

    def __init__(self, weights: npt.NDArray[np.float64], rate: float) -> None:
        if weights.shape != (NUM_WEIGHTS,) or not np.all(np.abs(weights) <= MOST_WEIGHT):
            raise ValueError(f"weights: expected {NUM_WEIGHTS} numbers from -{MOST_WEIGHT:.0f} to {MOST_WEIGHT:.0f}")
        if not 0 <= rate <= 1:
            raise ValueError(f"rate is {rate}: expected 0 to 1")
        self._start: list[float] = weights.tolist()
        self.rate = rate
        self.reset()

    def reset(self) -> None:
        """Forget what was learnt."""
        self.weights = list(self._start)

    def score(self, listing: Listing) -> tuple[list[Scored], float]:
        """Return options, then recent tokens with their probabilities, and the probability of none of them."""
        options = listing.options.values()
        none = self._sum(listing.none)
        sums = [self._sum(option.entries) for option in options]
        most = max([none, *sums])
        odds = [math.exp(z - most) for z in sums]
        shared = math.exp(self.weights[_shared_entry(listing)] - most)
        for recent in listing.recents:
            rank, classes = _recent_entries(listing, recent)
            odds.append(shared * math.exp(self.weights[rank] + self.weights[classes]))
        rest = total = math.exp(none - most)
        for value in odds:  # not sum(): it compensates for rounding
            total += value
        listed = [(o.token, o.match_len, o.place) for o in options]
        listed += [(recent.token, 0, recent.place) for recent in listing.recents]
        return [Scored(*what, value / total) for what, value in zip(listed, odds)], rest / total

    def learn(self, token: int, listing: Listing) -> None:
        """One gradient step on the log-likelihood of `token` among what is listed."""
        options, rest = self.score(listing)
        entries: list[Sequence[int]] = [option.entries for option in listing.options.values()]
        entries += [(*_recent_entries(listing, recent), _shared_entry(listing)) for recent in listing.recents]
        for option, at in zip(options, entries):
            self._descend(at, option.p - (1.0 if option.token == token else 0.0))
        is_listed = any(option.token == token for option in options)
        self._descend(listing.none, rest - (0.0 if is_listed else 1.0))

    def _sum(self, entries: Sequence[int]) -> float:
        total = 0.0
        for entry in entries:
            total += self.weights[entry]
        return total

    def _descend(self, entries: Sequence[int], slope: float) -> None:
        for entry in entries:
            self.weights[entry] -= self.rate * slope


def _recent_entries(listing: Listing, recent: Recent) -> tuple[int, int]:
    """Return the two entries of a token that is only recent; the third is shared by all."""
    rank = BASES["recent_rank"] + 18 + bisect_right(RECENT_EDGES, recent.rank)
    return rank, BASES["recent_classes"] + listing.last_class * NUM_CLASSES + recent.own_class


def _shared_entry(listing: Listing) -> int:
    """Return the entry that all tokens share that are only recent."""
    return BASES["recent_match"] + bisect_right(LENGTH_EDGES, listing.longest)
