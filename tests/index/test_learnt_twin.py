"""The native learnt index and its Python twin give the same lists, trees, copies and weights, whatever happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.index.features import TABLES
from tests.index.learnt import CLASSES, NO_PATH, RANDOM, ROWS, VOCAB, ZEROS, assert_same, do, feed, make, operations
from tests.index.texts import NATIVE_MODULE, TEXTS, both, noisy_copy

pytestmark = both
LIFE = settings(deadline=None, max_examples=100, derandomize=True)


def test_tables_are_the_same() -> None:
    assert NATIVE_MODULE.table_sizes() == list(TABLES.values())


@LIFE
@given(
    st.lists(operations, min_size=1, max_size=14),
    st.lists(st.integers(-2, VOCAB + 1), max_size=4),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.booleans(),
)
def test_a_life_is_the_same(life: list[tuple[str, Any, Any]], path: list[int], rate: float, with_rows: bool) -> None:
    rows = ROWS if with_rows else None
    native, twin = (make(kind, rate=rate, classes=CLASSES if with_rows else None) for kind in (True, False))
    for i, operation in enumerate(life):
        for index in (native, twin):
            do(index, operation, rows)
        assert native.copy() == twin.copy()
        if i % 4 == 3 or i == len(life) - 1:
            assert_same(native, twin, (), rows)
            assert_same(native, twin, path, rows)
    assert native.check_integrity() == twin.check_integrity() == ""
    assert native.tokens().tolist() == twin.tokens().tolist()


@pytest.mark.parametrize("name", TEXTS)
def test_hard_texts_are_the_same(name: str) -> None:
    tokens = [t % VOCAB if t >= 0 else t for t in TEXTS[name]]
    native, twin = (make(kind, tokens[: len(tokens) // 3], weights=ZEROS, rate=0.1) for kind in (True, False))
    for index in (native, twin):
        feed(index, tokens[len(tokens) // 3 :][:160])
    assert_same(native, twin)


def test_long_matches_far_back_are_the_same() -> None:
    """Beyond the visit caps only the automaton knows the longest match."""
    rng = np.random.default_rng(3)
    unit = rng.integers(0, 3, 40).tolist()
    tokens = [9, *unit, 8] + [t for _ in range(300) for t in (*unit[3:14], int(rng.integers(0, 3)))] + [9, *unit]
    native, twin = (make(kind, tokens) for kind in (True, False))
    for index in (native, twin):
        found, lens, places, _, _ = index.options(NO_PATH, None)
        best = int(np.argmax(lens))
        assert (found[best], lens[best], places[best]) == (8, 32, 41)
    assert_same(native, twin)


def test_texts_that_copy_are_the_same() -> None:
    for seed in range(4):
        tokens = noisy_copy(seed, 260, 12)
        native, twin = (make(kind, tokens[:120], weights=RANDOM, rate=0.05) for kind in (True, False))
        for index in (native, twin):
            feed(index, tokens[120:], rows=ROWS)
        assert_same(native, twin, rows=ROWS)
