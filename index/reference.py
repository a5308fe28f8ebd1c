"""The plain suffix automaton, in dicts, and two oracles that share no code with any automaton.

Knows no ranking and no tree (`twin.py` builds those on it). The spine layout of the native automaton is not
repeated here: one dict of edges a state, oldest edge first. Kept for ever: it is what the native one is
tested against, and what serves where no compiler was found.
"""

from __future__ import annotations

from collections.abc import Sequence

from longgraft.index.rank import WALK_CAP

SENTINEL = -1


class Automaton:
    """Suffix automaton; state 0 is the root. Ends are numbers of tokens, so an end's last token is end - 1."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.links = [-1]
        self.lengths = [0]
        self.counts = [0]
        self.ends = [0]
        self.edges: list[dict[int, int]] = [{}]
        self.last = 0
        self.match_len = 0
        self.match_end = 0
        self.steps = 0

    def _add_state(self, link: int, length: int, count: int, end: int) -> int:
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        self.ends.append(end)
        self.edges.append({})
        return len(self.links) - 1

    def append(self, token: int) -> None:
        """Take in one token, or the sentinel, which nothing matches across."""
        self.tokens.append(token)
        size = len(self.tokens)
        fresh = self._add_state(0, size, 1, size)
        if token != SENTINEL:
            p = self.last
            while p >= 0 and token not in self.edges[p]:
                self.edges[p][token] = fresh
                p = self.links[p]
                self.steps += 1
            if p >= 0:
                self.links[fresh] = self._target_of_length(p, token)
        self.last = fresh
        self._credit(size)

    def _target_of_length(self, p: int, token: int) -> int:
        """Return the state of exactly `p` and the token, split off from a longer one if need be."""
        q = self.edges[p][token]
        if self.lengths[p] + 1 == self.lengths[q]:
            return q
        clone = self._add_state(self.links[q], self.lengths[p] + 1, self.counts[q], self.ends[q])
        self.edges[clone] = dict(self.edges[q])
        self.links[q] = clone
        while p >= 0 and self.edges[p].get(token) == q:
            self.edges[p][token] = clone
            p = self.links[p]
            self.steps += 1
        return clone

    def _credit(self, size: int) -> None:
        p = self.links[self.last]
        self.match_len, self.match_end = self.lengths[p], self.ends[p]
        for _ in range(WALK_CAP):
            if p == 0:
                break
            self.counts[p] += 1
            self.ends[p] = size
            p = self.links[p]
            self.steps += 1

    def text_end(self) -> tuple[int, int]:
        """Return (state, length) of the longest suffix that occurred before."""
        state = max(self.links[self.last], 0)
        return state, self.lengths[state]

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return (state, length) after one more token; a long walk gives up all but that token."""
        for _ in range(WALK_CAP + 1):
            target = self.edges[state].get(token)
            if target is not None:
                return target, length + 1
            if state == 0:
                return 0, 0
            state = self.links[state]
            length = self.lengths[state]
        target = self.edges[0].get(token)
        return (0, 0) if target is None else (target, 1)

    def check_integrity(self) -> str:
        """Return "" or the first broken invariant."""
        size = len(self.tokens)
        for state in range(1, len(self.links)):
            if self.lengths[self.links[state]] >= self.lengths[state]:
                return "a suffix link does not lead to a shorter state"
            if not 1 <= self.counts[state] <= size:
                return "a count lies outside 1 to the length of the text"
            if not self.lengths[state] <= self.ends[state] <= size:
                return "an end lies outside the text"
        for state, edges in enumerate(self.edges):
            for token, target in edges.items():
                if self.lengths[target] <= self.lengths[state]:
                    return "an edge does not lead to a longer state"
                if self.tokens[self.ends[target] - 1] != token:
                    return "an edge's token is not the one that its end holds"
        return ""


def scan_match(tokens: Sequence[int]) -> tuple[int, int]:
    """Return (length, most recent earlier end) of the longest suffix that occurred before, by scanning."""
    size, best = len(tokens), (0, 0)
    for end in range(size - 1, 0, -1):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[size - 1 - length] != SENTINEL:
            length += 1
        if length > best[0]:
            best = (length, end)
    return best


def suffix_array_match(tokens: Sequence[int]) -> tuple[int, int]:
    """As `scan_match`, for text without sentinels, by the package pysuffixarray."""
    from pysuffixarray.core import SuffixArray

    ranks = {token: chr(37 + i) for i, token in enumerate(sorted(set(tokens)))}
    text = "".join(ranks[token] for token in tokens)
    array = SuffixArray(text[:-1])
    length, end = 0, 0
    while length < len(text) - 1:
        starts = array.match(text[len(text) - length - 1 :])
        if -1 in starts:
            break
        length += 1
        end = max(starts) + length
    return length, end
