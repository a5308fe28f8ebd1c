"""Sorting and searching suffix arrays without a compiler: the twin of `csrc/suffix_array.hpp` and `corpus_search.hpp`.

Same names, same results. It is what the native code is tested against, and what serves where no compiler was found:
building is some five times and a lookup some fifty times slower.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longgraft.index.corpus_pages import Bytes, Corrupted, Sums, check_pages

DEPTH = 32
SENTINEL = -1
Ints = npt.NDArray[np.int32]


def sort_ends(tokens: Ints, ends: Ints) -> None:
    """Fill `ends [n]` with 1 to n, sorted by the tokens before them, last one first.

    A context ends after `DEPTH` tokens, at a sentinel or at the start; equal ones are sorted by end. Doubles the
    length of context that ranks stand for: 1, 2, 4 ... tokens.
    """
    n = len(tokens)
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64) if n else np.zeros(0, np.int64)
    places = np.arange(n)
    last_stop = np.maximum.accumulate(np.where(tokens == SENTINEL, places, -1)) if n else places
    open_tokens = places - last_stop  # tokens before each end up to the sentinel or the start
    length = 1
    while length < DEPTH:
        goes_on = open_tokens > length - 1
        more = np.zeros(n, np.int64)
        reach = goes_on & (places >= length)
        more[reach] = ranks[places[reach] - length] + 1
        ranks = np.unique(ranks * (n + 2) + more, return_inverse=True)[1]
        length *= 2
    ends[:] = np.argsort(ranks, kind="stable") + 1


class _Segment(NamedTuple):
    data: Bytes
    sums: Sums
    checked: Bytes
    tokens_at: int
    ends_at: int
    n: int
    starts: Ints

    def read(self, at: int) -> int:
        """Return the int32 at a byte of the file, once its page was compared."""
        check_pages(self.data, self.sums, self.checked, at, at + 4)
        return int(self.data[at : at + 4].view(np.int32)[0])

    def end(self, rank: int) -> int:
        """Return the end at a rank."""
        value = self.read(self.ends_at + 4 * rank)
        if not 1 <= value <= self.n:
            raise Corrupted(-1)
        return value

    def follow(self, end: int, vocab_size: int, row: Ints) -> None:
        """Fill `row` with the tokens behind an end, and with -1 from the end of the document on."""
        document = int(np.searchsorted(self.starts[:-1], end - 1, "right")) - 1
        stop = min(int(self.starts[document + 1]), self.n) - 1
        for i in range(len(row)):
            row[i] = self.read(self.tokens_at + 4 * (end + i)) if end + i < stop else SENTINEL
            if end + i < stop and not 0 <= row[i] < vocab_size:
                raise Corrupted(-1)

    def shared(self, rank: int, query: list[int], start: int = 0) -> tuple[int, int]:
        """Return how many tokens the context at a rank shares with the query, and how it sorts (-1, 0, 1)."""
        end = self.end(rank)
        for j in range(start, len(query)):
            place = end - 1 - j
            token = self.read(self.tokens_at + 4 * place) if place >= 0 else SENTINEL
            if token != query[j]:
                return j, -1 if token < query[j] else 1
        return len(query), 0

    def find(self, query: list[int]) -> tuple[int, int]:
        """Return (longest match, rank where the query would stand)."""
        low, high, low_shared, high_shared, best = 0, self.n, 0, 0, 0
        while low < high:
            middle = (low + high) // 2
            here, order = self.shared(middle, query, min(low_shared, high_shared))
            best = max(best, here)
            if order < 0:
                low, low_shared = middle + 1, here
            else:
                high, high_shared = middle, here
        return best, low

    def reach(self, query: list[int], at: int, step: int) -> int:
        """Return how far down (-1) or up (1) from a rank all contexts share the whole query."""
        room = at if step < 0 else self.n - at

        def matches(i: int) -> bool:
            return self.shared(at - i if step < 0 else at + i - 1, query)[1] == 0

        good, bad, i = 0, room + 1, 1
        while i <= room:
            if not matches(i):
                bad = i
                break
            good, i = i, 2 * i
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if matches(middle) else (good, middle)
        return good


class Segments:
    """Segments that are searched together."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._reading = 0

    def add(
        self, data: Bytes, sums: Sums, checked: Bytes, *, tokens_at: int, ends_at: int, n: int, starts: Ints
    ) -> None:
        """Add a segment: tokens and ends [n] begin at these bytes of its file; `starts` are its documents'."""
        self._segments.append(_Segment(data, sums, checked, tokens_at, ends_at, n, starts))

    def lookup(self, context: Ints, min_match: int, ends: npt.NDArray[np.int64]) -> tuple[int, int, int]:
        """Fill `ends` and return (match_len, count, number of ends); (-1, segment, page) where a file is corrupted."""
        query = []
        for token in context[::-1][:DEPTH].tolist():
            if token < 0:
                break
            query.append(token)
        try:
            return self._lookup(query, min_match, ends)
        except Corrupted as where:
            return -1, self._reading, where.page

    def follow(self, ends: npt.NDArray[np.int64], vocab_size: int, out: Ints) -> tuple[int, int, int]:
        """Fill the rows of `out` with what stands behind each end, then -1; return as `lookup`, with 0 for success."""
        bases = np.cumsum([0, *(segment.n for segment in self._segments)])
        if len(ends) and not 1 <= ends.min() <= ends.max() <= bases[-1]:
            raise ValueError("an end lies outside the segments")
        for row, end in zip(out, ends.tolist()):
            i = int(np.searchsorted(bases, end, "left")) - 1
            try:
                self._segments[i].follow(end - int(bases[i]), vocab_size, row)
            except Corrupted as where:
                return -1, i, where.page
        return 0, 0, 0

    def _lookup(self, query: list[int], min_match: int, ends: npt.NDArray[np.int64]) -> tuple[int, int, int]:
        found = []
        for i, segment in enumerate(self._segments):
            self._reading = i
            found.append(segment.find(query))
        best = max((length for length, _ in found), default=0)
        if best < max(min_match, 1):
            return 0, 0, 0
        ranges = []
        for i, (segment, (length, at)) in enumerate(zip(self._segments, found)):
            self._reading = i
            part = query[:best]
            is_best = length == best
            down = segment.reach(part, at, -1) if is_best else 0
            ranges.append((at - down, at + segment.reach(part, at, 1) if is_best else at))
        count = sum(end - begin for begin, end in ranges)
        picks = self._spread(ranges, count, len(ends))
        ends[: len(picks)] = picks
        return best, count, len(picks)

    def _spread(self, ranges: list[tuple[int, int]], count: int, limit: int) -> list[int]:
        """Look at 2 * limit occurrences at even distances; take one a document before a second of any."""
        num_seen, before, j = min(count, 2 * limit), 0, 0
        first: dict[tuple[int, int], int] = {}
        later = []
        bases = np.cumsum([0, *(segment.n for segment in self._segments)]).tolist()
        for i in reversed(range(len(ranges))):
            self._reading = i
            segment, (begin, stop) = self._segments[i], ranges[i]
            while j < num_seen and j * count // num_seen < before + stop - begin:
                end = segment.end(begin + j * count // num_seen - before)
                document = int(np.searchsorted(segment.starts[:-1], end - 1, "right"))
                later.append(bases[i] + end)
                if (i, document) not in first:
                    first[i, document] = later.pop()
                j += 1
            before += stop - begin
        return [*first.values(), *later][:limit]
