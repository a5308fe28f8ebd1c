"""Texts that are hard for a suffix automaton, and what the index tests share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from longgraft.index.suffix_automaton import SuffixAutomaton

try:
    from longgraft.index import _native as NATIVE_MODULE
except ImportError:  # the twin alone is tested where there is no compiler
    NATIVE_MODULE = None  # type: ignore[assignment]

KINDS = [False] if NATIVE_MODULE is None else [False, True]
both = pytest.mark.skipif(NATIVE_MODULE is None, reason="needs the native index")
QUICK = settings(deadline=None, max_examples=60, derandomize=True)


def fibonacci(n: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


def thue_morse(n: int) -> list[int]:
    return [i.bit_count() & 1 for i in range(n)]


def de_bruijn(n: int) -> list[int]:
    """Every binary word of some length exactly once (prefer-one), as often as `n` needs: the widest automaton."""
    order = max((n - 1).bit_length(), 1)
    seen, word, out = {0}, 0, [0] * order
    while len(out) < n:
        longer = (word << 1) & ((1 << order) - 1)
        word = longer | 1 if longer | 1 not in seen else longer
        seen.add(word)
        out.append(word & 1)
    return out[:n]


def long_period(n: int) -> list[int]:
    """A random stretch over and over, with one token changed each time."""
    rng = np.random.default_rng(7)
    unit = rng.integers(0, 50, max(n // 20, 1))
    out: list[int] = []
    while len(out) < n:
        unit[int(rng.integers(0, len(unit)))] = int(rng.integers(0, 50))
        out += unit.tolist()
    return out[:n]


def noisy_copy(seed: int, n: int, alphabet: int) -> list[int]:
    """Random text that keeps copying from itself, as real text does."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, alphabet, 20).tolist()
    while len(text) < n:
        start = int(rng.integers(0, len(text)))
        text += text[start : start + int(rng.integers(1, 30))]
        text += rng.integers(0, alphabet, int(rng.integers(0, 3))).tolist()
    return text[:n]


TEXTS: dict[str, list[int]] = {
    "empty": [],
    "one": [0],
    "zeros": [0] * 300,
    "period 2": [0, 1] * 150,
    "period 7": [3, 0, 1, 0, 2, 0, 0] * 40,
    "fibonacci": fibonacci(400),
    "all different": list(range(200)),
    "twice": list(range(150)) * 2,
    "documents": [1, 2, 3, -1, 1, 2, 3, 4, -1, -1, 2, 3, 4, 1, 2, 3],
    "sentinels only": [-1, -1, -1],
    "copies": noisy_copy(1, 500, 12),
    "copies of many": noisy_copy(2, 500, 200),
    "wide": list(itertools.chain.from_iterable((7, 10 + i) for i in range(120))) * 2,
    "wide clone": [t for i in range(60) for t in (8, 7, 10 + i)] + [9, 7, 5, 9, 7],
    "periods broken": ([0, 1, 2] * 60 + [5]) * 3,
}
texts = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(st.integers(-1, 3), max_size=60),
    st.lists(st.integers(0, 30), max_size=80),
    st.builds(
        lambda unit, n, tail: unit * n + tail,
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
        st.integers(1, 12),
        st.lists(st.integers(0, 3), max_size=6),
    ),
    st.builds(noisy_copy, st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 20)),
)


def successor_rows(vocab_size: int) -> np.ndarray:
    rows = np.full((vocab_size, 8), -1, np.int32)
    for token in range(0, vocab_size, 2):
        rows[token, :5] = [(token * 3 + k) % vocab_size for k in range(5)]
    rows[0, 2] = 0
    return rows


def assert_same_lists(a: SuffixAutomaton, b: SuffixAutomaton, path: Sequence[int], rows: np.ndarray | None) -> None:
    for x, y in zip(a.options(path, rows), b.options(path, rows)):
        np.testing.assert_array_equal(x, y)
    for budget, threshold in ((1, 0.002), (40, 0.1), (150, 1e-4)):
        ours, theirs = a.draft(budget, path, threshold, rows), b.draft(budget, path, threshold, rows)
        for name in ("token_ids", "parents", "match_lens", "origins", "cells"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-6, rtol=0)
