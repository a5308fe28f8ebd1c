"""The native index and its Python twin give the same lists, trees and learning, however they were fed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.index import rank
from longgraft.index.suffix_automaton import SuffixAutomaton
from tests.index.texts import KINDS, NATIVE_MODULE, QUICK, TEXTS, assert_same_lists, both, successor_rows, texts


def pair(tokens: Sequence[int] = (), learn: bool = False) -> tuple[SuffixAutomaton, SuffixAutomaton]:
    made = SuffixAutomaton(native=True), SuffixAutomaton(native=False)
    for automaton in made:
        automaton.extend(list(tokens), learn=learn)
    return made


@both
@pytest.mark.parametrize("name", TEXTS)
def test_native_equals_twin_at_every_step(name: str) -> None:
    native, twin = pair()
    tokens = TEXTS[name]
    for place, token in enumerate(tokens):
        for automaton in (native, twin):
            automaton.extend([token], learn=place % 3 == 0)
        assert native.match() == twin.match()
        if place % 23 == 0 or place == len(tokens) - 1:
            assert native.check_integrity() == ""
            assert_same_lists(native, twin, [], None)
    for trials, hits in zip(native.learnt(), twin.learnt()):
        np.testing.assert_array_equal(trials, hits)


@both
@QUICK
@given(texts, st.lists(st.integers(0, 30), max_size=6), st.booleans(), st.booleans())
def test_native_equals_twin(tokens: list[int], path: list[int], learn: bool, rows: bool) -> None:
    native, twin = pair(tokens, learn)
    assert native.match() == twin.match()
    assert native.check_integrity() == twin.check_integrity() == ""
    assert_same_lists(native, twin, path, successor_rows(31) if rows else None)


@pytest.mark.parametrize("native", KINDS)
@QUICK
@given(texts, st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_chunking_is_the_same(native: bool, tokens: list[int], cuts: list[int]) -> None:
    whole, parts = SuffixAutomaton(native=native), SuffixAutomaton(native=native)
    whole.extend(tokens, learn=True)
    place, sizes = 0, itertools.cycle(cuts)
    while place < len(tokens):
        step = next(sizes)
        parts.extend(np.array(tokens[place : place + step], np.int64), learn=True)
        place += step
    assert whole.match() == parts.match()
    assert whole.tokens().tolist() == parts.tokens().tolist() == tokens
    assert_same_lists(whole, parts, [], None)
    np.testing.assert_array_equal(whole.learnt(), parts.learnt())


@pytest.mark.parametrize("native", KINDS)
@QUICK
@given(texts, st.data())
def test_truncate_equals_rebuild(native: bool, tokens: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(tokens)))
    cut, built = SuffixAutomaton(native=native), SuffixAutomaton(native=native)
    cut.extend(tokens)
    cut.truncate(length)
    built.extend(tokens[:length])
    assert len(cut) == length
    for _ in range(2):
        assert cut.match() == built.match()
        assert_same_lists(cut, built, [], None)
        assert cut.check_integrity() == ""
        for automaton in (cut, built):
            automaton.extend([1, 0, 1])


@both
def test_caps_are_the_same() -> None:
    assert {name: getattr(rank, name) for name in NATIVE_MODULE.CAPS} == NATIVE_MODULE.CAPS
    assert len(NATIVE_MODULE.CAPS) == 8
