"""Baseline: SAM decoding, the longest suffix that occurred before and what followed its earliest occurrence.

Knows no model. Source: "SAM Decoding: Speculative Decoding via Suffix Automaton" (arXiv 2411.10666, github
hyx1999/SAM-Decoding): an automaton over the text with the earliest end of every state; a match of at least 5 tokens is
copied on, anything shorter is left to another drafter (there: Token Recycling or EAGLE-2). Rule and defaults are
theirs, the code is not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longgraft.eval.baseline_draft import EMPTY, Draft, chain
from longgraft.eval.baseline_tree import Recycling

LEAST_MATCH = 5


class EarliestSuffix:
    """A plain suffix automaton in dicts that remembers where each state ended first."""

    def __init__(self) -> None:
        self.links, self.lengths, self.ends = [-1], [0], [0]
        self.edges: list[dict[int, int]] = [{}]
        self.last = 0

    def _add(self, length: int, end: int, edges: dict[int, int]) -> int:
        self.links.append(0)
        self.lengths.append(length)
        self.ends.append(end)
        self.edges.append(edges)
        return len(self.links) - 1

    def append(self, token: int) -> None:
        """Take in one token; amortised O(1)."""
        edges, links, lengths = self.edges, self.links, self.lengths
        at, size = self.last, lengths[self.last] + 1
        fresh = self.last = self._add(size, size, {})
        while at >= 0 and token not in edges[at]:
            edges[at][token] = fresh
            at = links[at]
        if at < 0:
            return
        target = edges[at][token]
        if lengths[at] + 1 < lengths[target]:
            long = target
            target = self._add(lengths[at] + 1, self.ends[long], edges[long].copy())
            links[target] = links[long]
            links[long] = target
            while at >= 0 and edges[at].get(token) == long:
                edges[at][token] = target
                at = links[at]
        links[fresh] = target

    def match(self) -> tuple[int, int]:
        """Return (length, earliest end) of the longest suffix that occurred before; (0, 0) if there is none."""
        state = max(self.links[self.last], 0)
        return self.lengths[state], self.ends[state]


class Sam:
    """Copy from the earliest occurrence of the longest suffix; below `least_match` tokens ask `fallback`.

    Differs from the original: the copied chain is as long as the budget (theirs: 40 tokens), no corpus automaton.
    """

    def __init__(self, least_match: int = LEAST_MATCH, fallback: Recycling | None = None) -> None:
        self.least_match = least_match
        self.fallback = fallback
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.text: list[int] = []
        self.automaton = EarliestSuffix()
        if self.fallback is not None:
            self.fallback.reset()

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]. Amortised O(n)"""
        more = token_ids.tolist()
        self.text += more
        for token in more:
            self.automaton.append(token)
        if self.fallback is not None:
            self.fallback.extend(token_ids)

    def draft(self, budget: int) -> Draft:
        """Propose what followed the match, as a chain, or what the fallback has."""
        length, end = self.automaton.match()
        if length >= self.least_match:
            return chain(self.text[end : end + budget])
        return EMPTY if self.fallback is None else self.fallback.draft(budget)
