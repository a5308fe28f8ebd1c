"""Baselines that propose trees: Token Recycling and REST.

Know no model. Rules and defaults are the papers'; the code is not. Sources:

- Token Recycling (arXiv 2408.08696, github Luowaterbi/TokenRecycling): a row of 8 likely successors per token, filled
  from the target's logits of every verified node, read through a fixed tree of ranks.
- REST (arXiv 2311.08252, github FasterDecoding/REST): the longest suffix of 16 to 2 tokens found in a datastore, up to
  5,000 matches x 10 tokens, the 64 most frequent prefixes of those continuations.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from longgraft.eval.baseline_draft import EMPTY, Draft

NUM_SUCCESSORS = 8
FIRST_SHARE, NEXT_SHARE = 0.55, 0.5  # how often the likeliest successor is right, and each next one against it
LONGEST_SUFFIX, SHORTEST_SUFFIX = 16, 2
MAX_MATCHES, CONTINUATION_LEN, MAX_NODES = 5000, 10, 64
LADDER = (16, 8, 4, 2)  # sizes of n-grams whose occurrences are linked; sizes between are told apart by comparing


@cache
def rank_tree(size: int) -> tuple[tuple[int, int], ...]:
    """Return the `size` likeliest (parent, rank) nodes where ranks hit by a geometric law; parents first, -1 = root."""
    nodes: list[tuple[int, int]] = []
    heap = [(-FIRST_SHARE, -1, 0)]
    while len(nodes) < size:
        share, parent, rank = heapq.heappop(heap)
        node = len(nodes)
        nodes.append((parent, rank))
        heapq.heappush(heap, (share * FIRST_SHARE, node, 0))
        if rank + 1 < NUM_SUCCESSORS:
            heapq.heappush(heap, (share * NEXT_SHARE, parent, rank + 1))
    return tuple(nodes)


class Recycling:
    """Successors of successors through a fixed tree.

    Differs from the original: a replay has no logits, so a row holds the 8 newest distinct tokens that followed; rows
    start empty, not with token 0; the tree is the likeliest of the budget's size, not the published one of 80 nodes.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.last = -1
        self.rows: dict[int, list[int]] = {}

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]. O(n)"""
        rows, last = self.rows, self.last
        for token in token_ids.tolist():
            row = rows.get(last)
            if row is None:
                rows[last] = [token]
            elif row[0] != token:
                if token in row:
                    row.remove(token)
                row.insert(0, token)
                del row[NUM_SUCCESSORS:]
            last = token
        self.last = last

    def draft(self, budget: int) -> Draft:
        """Propose the nodes of the fixed tree for which a successor is known."""
        rows = self.rows
        token_ids: list[int] = []
        parents: list[int] = []
        placed: dict[int, int] = {-1: -1}  # nodes of the fixed tree -> nodes of the draft
        for node, (parent, rank) in enumerate(rank_tree(budget)):
            at = placed.get(parent)
            if at is not None:
                row = rows.get(token_ids[at] if at >= 0 else self.last, ())
                if rank < len(row):
                    placed[node] = len(token_ids)
                    token_ids.append(row[rank])
                    parents.append(at)
        return Draft(token_ids, parents)


class Rest:
    """The commonest continuations of the longest suffix that occurred before.

    Differs from the original: the datastore is the request's own text and grows with it (theirs is built beforehand
    from a corpus); of more than 5,000 matches the newest count (theirs: those that sort first).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.text: list[int] = []
        self.newest: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in LADDER}
        self.older: dict[int, list[int]] = {size: [] for size in LADDER}

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]. O(n x sizes)"""
        before = len(self.text)
        self.text += token_ids.tolist()
        for size in LADDER:
            newest, older = self.newest[size], self.older[size]
            older += [-1] * (min(size - 1, len(self.text)) - len(older))
            start = max(before - size + 1, 0)
            tail = self.text[start:]
            for end, gram in enumerate(zip(*(tail[i:] for i in range(size))), start + size):
                older.append(newest.get(gram, -1))
                newest[gram] = end

    def _occurrences(self, size: int) -> Iterator[int]:
        """Yield the earlier ends of the last `size` tokens, newest first."""
        older = self.older[size]
        end = older[-1] if len(self.text) >= size else -1
        while end >= 0:
            yield end
            end = older[end - 1]

    def matches(self) -> list[int]:
        """Return where the longest suffix of 16 to 2 tokens ended before: at most 5,000 ends, newest first."""
        text, size_all = self.text, len(self.text)
        above = LONGEST_SUFFIX
        for size in LADDER:
            longest, ends = 0, []
            for seen, end in enumerate(self._occurrences(size)):
                if seen == MAX_MATCHES:
                    break
                length = size
                while length < above and length < end and text[end - length - 1] == text[size_all - length - 1]:
                    length += 1
                if length > longest:
                    longest, ends = length, [end]
                elif length == longest:
                    ends.append(end)
            if ends:
                return ends
            above = size - 1
        return []

    def draft(self, budget: int) -> Draft:
        """Propose the most frequent prefixes of what followed the matches."""
        counts: list[int] = []
        nodes: list[tuple[int, int]] = []
        numbers: dict[tuple[int, int], int] = {}
        for end in self.matches():
            at = -1
            for token in self.text[end : end + CONTINUATION_LEN]:
                node = numbers.setdefault((at, token), len(nodes))
                if node == len(nodes):
                    nodes.append((at, token))
                    counts.append(0)
                counts[node] += 1
                at = node
        if not nodes:
            return EMPTY
        # A parent is at least as frequent as its children and was met first, so a stable order puts it before them.
        kept = sorted(range(len(nodes)), key=lambda node: -counts[node])[: min(budget, MAX_NODES)]
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return Draft([nodes[node][1] for node in kept], [place[nodes[node][0]] for node in kept])
