"""What is known of one filled chunk, and what a look-up found: the vocabulary of the prefix cache.

Knows tokens and numbers; no pool. The one idea: a chunk is called by the hash of its tokens and of the name before it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from longgraft.pool import Span
from longgraft.tree import IntArray


@dataclass(frozen=True, slots=True)
class Entry:
    """One chunk: `token_ids` of its rows (a whole chunk, or fewer at the end of a text), `parent`: the name before.

    `side`: which of its rows have side rows. The end of a running sequence's text has no name (b"") and is not held.
    """

    name: bytes
    parent: bytes
    token_ids: IntArray
    chunk: int
    side: Span


@dataclass(slots=True)
class Match:
    """What was found of a text: chunks in order, each with one reference for whoever asked; the last may count in part.

    `rows` of the text are there; side rows are known from row `side_begin` on.
    """

    chunks: list[int] = field(default_factory=list)
    rows: int = 0
    side_begin: int = 0


def name_of(parent: bytes, token_ids: IntArray) -> bytes:
    """Return the name of a chunk behind the one called `parent`. 32 bytes"""
    return hashlib.sha256(parent + np.ascontiguousarray(token_ids, np.int32).tobytes()).digest()


def common(one: IntArray, other: IntArray) -> int:
    """Return how many tokens two texts have in common at their beginnings."""
    rows = min(len(one), len(other))
    differs = np.flatnonzero(one[:rows] != other[:rows])
    return int(differs[0]) if len(differs) else rows


def within(rows: Span, index: int, size: int) -> Span:
    """Return which rows of chunk `index` lie in `rows`, counted from its first."""
    first, last = (min(max(row - index * size, 0), size) for row in rows)
    return first, max(first, last)
