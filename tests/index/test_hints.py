"""Hints: places that a dense store proposes for the root, weighed by rank and cosine, native and twin alike."""

from __future__ import annotations

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.index.features import BASES, COSINE_EDGES
from longgraft.index.learnt_index import LearntIndex
from tests.index.learnt import (
    NO_PATH,
    ROWS,
    VOCAB,
    assert_same,
    cosines,
    feed,
    ids,
    make,
    probabilities,
    weights_with,
)
from tests.index.texts import KINDS, both, noisy_copy

kinds = pytest.mark.parametrize("native", KINDS)


@kinds
def test_hints_are_for_the_root(native: bool) -> None:
    tokens = [*range(1, 30), 2]
    index = make(native, tokens)
    index.extend_side(ids([35, 36, 37]), VOCAB)
    index.hint(ids([2**30 + 1]), cosines(1))
    _, _, places, _, _ = index.options(NO_PATH, None)
    assert 2**30 + 1 in places
    assert 36 not in probabilities(index, [9])


@kinds
def test_hints_move_probability_to_their_tokens(native: bool) -> None:
    """By rank and cosine, also of tokens that the text lists anyway; only the first four hints add a token."""
    weights = weights_with(length=1.0)
    weights[BASES["hint"] + 8] = weights[BASES["alike"] + 9 * 3 : BASES["alike"] + 10 * 3] = 1.5
    tokens = [1, 2, 1, 3, 1, 4, *range(5, 12), 1]
    index = make(native, tokens, weights=weights)
    plain = probabilities(index)
    index.hint(ids([3, 7, 8, 9, 10]), np.array([0.95, 0.5, 0.5, 0.5, 0.5]))
    hinted = probabilities(index)
    assert hinted[3] > 2 * plain[3]
    assert hinted[2] == hinted[4] < plain[2]
    assert set(hinted) - set(plain) <= set(tokens[7:10])
    index.hint(ids([3]), np.array([0.2]))
    assert probabilities(index) == pytest.approx(plain)


@kinds
def test_hints_are_forgotten_when_the_text_changes(native: bool) -> None:
    tokens = [*noisy_copy(6, 79, 9), 30]
    for change in ("extend", "truncate", "nothing"):
        index, plain = make(native, tokens, rate=0.0), make(native, tokens, rate=0.0)
        index.hint(ids([3, 9]), cosines(2))
        for each in (index, plain):
            if change == "extend":
                feed(each, [4, 5])
            elif change == "truncate":
                each.truncate(0)
            else:
                feed(each, [])
        assert (probabilities(index) == probabilities(plain)) == (change != "nothing")


@kinds
def test_a_long_match_knows_better_than_hints(native: bool) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    for length, is_heard in ((3, True), (4, False)):
        index = make(native, tokens[: 8 + length])
        plain = probabilities(index)
        index.hint(ids([6, 1]), cosines(2))
        assert (probabilities(index) != plain) == is_heard


@kinds
def test_hints_without_a_finite_cosine_are_refused(native: bool) -> None:
    index = make(native, [*noisy_copy(6, 79, 9), 30])
    plain = probabilities(index)
    for places, scores in (([1, 2], [0.5]), ([], [0.5]), ([1], [np.nan]), ([1], [-np.inf])):
        with pytest.raises(ValueError, match="hint: expected a finite cosine"):
            index.hint(ids(places), np.array(scores))
    assert probabilities(index) == plain


@both
def test_hints_are_the_same() -> None:
    rng = np.random.default_rng(2)
    for _ in range(120):
        tokens = rng.integers(0, VOCAB, 60).tolist()
        places = rng.integers(0, 62, rng.integers(0, 20)).astype(np.int32)
        # Edges of bins among them, also as float32 rounds them.
        scores = np.concatenate([rng.choice(COSINE_EDGES, 10), np.float32(COSINE_EDGES), rng.uniform(-1, 1, 4)])
        scores = rng.permutation(scores)[: len(places)]
        native, twin = (make(kind, tokens, rate=0.05) for kind in (True, False))
        for index in (native, twin):
            index.hint(places, scores)
        assert_same(native, twin, (), ROWS)
        for index in (native, twin):
            feed(index, [3, 1], rows=ROWS)
        assert_same(native, twin, (), ROWS)


@kinds
@pytest.mark.parametrize(
    ("places", "scores", "message"),
    [
        ([1], [0.5, 0.2], "1 hints with 2 cosines"),
        ([9], [0.5], "expected places from 0 to 4"),
        ([-1], [0.5], "expected places from 0 to 4"),
        ([1], [np.nan], "from -1 to 1"),
        ([1], [1.5], "from -1 to 1"),
        ([1], [[0.5]], "from -1 to 1"),
        ([1], ["x"], "cannot be read as numbers"),
    ],
)
def test_the_face_refuses_what_are_no_hints(native: bool, places: object, scores: object, message: str) -> None:
    index = LearntIndex(VOCAB, native=native)
    index.extend([1, 2, 3, 4, 5])
    with pytest.raises(GraftError, match=message):
        index.hint(places, scores)


@kinds
def test_the_face_takes_float32_and_nothing(native: bool) -> None:
    index = LearntIndex(VOCAB, native=native)
    index.extend([1, 2, 3, 4, 5])
    plain = index.options().token_ids.tolist()
    index.hint([], [])
    assert index.options().token_ids.tolist() == plain
    index.hint(np.array([1, 2]), np.array([0.9, 0.7], np.float32))
    assert set(index.options().token_ids.tolist()) >= {2, 3}
