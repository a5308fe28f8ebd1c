"""What a learnt index promises, native and twin alike: probabilities, trees, matches, chunks, truncation, learning."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.index.features import NUM_WEIGHTS
from longgraft.index.learnt_index import LearntIndex
from tests.index.learnt import (
    CLASSES,
    NO_PATH,
    RANDOM,
    ROWS,
    VOCAB,
    ZEROS,
    assert_same,
    cosines,
    do,
    draft,
    feed,
    ids,
    make,
    operations,
    probabilities,
    texts_of,
)
from tests.index.texts import KINDS, noisy_copy, texts

FEW = settings(deadline=None, max_examples=25, derandomize=True)
kinds = pytest.mark.parametrize("native", KINDS)


@kinds
@FEW
@given(st.lists(operations, min_size=1, max_size=8), st.lists(st.integers(0, VOCAB - 1), max_size=3), st.booleans())
def test_drafts_keep_their_promises(
    native: bool, life: list[tuple[str, Any, Any]], path: list[int], rows: bool
) -> None:
    index, table = make(native, rate=0.05), ROWS if rows else None
    side: list[int] = []
    for operation in life:
        do(index, operation, table)
        if operation[0] == "side":
            side = [*side, *operation[1], -1]
        elif operation[0] in ("reset", "clear_side"):
            side = []
    for here in ([], path):
        assert sum(probabilities(index, here, table).values()) == pytest.approx(1.0, abs=1e-12)
        nodes = draft(index, 20, here, 0.01, table)
        assert len(nodes.token_ids) <= 20
        assert len(set(zip(nodes.parents, nodes.token_ids))) == len(nodes.token_ids)
        assert all(parent < i for i, parent in enumerate(nodes.parents))
        assert np.all(np.diff(nodes.scores) <= 0)
        for parent, score in zip(nodes.parents, nodes.scores):
            assert parent < 0 or score <= nodes.scores[parent]
        check_matches(nodes, texts_of(index, side), here)


def check_matches(nodes: Any, at: dict[int, int], path: list[int]) -> None:
    """Every node was copied from where it says, and its match is one."""
    size = sum(place < 1 << 30 for place in at)
    own = [at[i] for i in range(size)]
    for node, (token, place, n) in enumerate(zip(nodes.token_ids, nodes.places, nodes.match_lens)):
        assert token >= 0
        assert place == -1 or at[place] == token
        before = [*own, *path, *nodes.path(nodes.parents[node])]
        assert n == 0 or [at[place - n + i] for i in range(n)] == before[len(before) - n :]
        assert -1 not in before[len(before) - n :] or n == 0


@kinds
def test_scores_are_shrunk_path_probabilities(native: bool) -> None:
    tokens = noisy_copy(4, 200, 9)
    for shrink in (0.0, 0.12, 0.75):
        index = make(native, tokens, shrink=shrink)
        nodes = draft(index, 30, threshold=0.02)
        for node, score in enumerate(nodes.scores):
            *before, token = nodes.path(node)
            p = 1.0
            for depth, step in enumerate([*before, token]):
                p *= probabilities(index, before[:depth])[step]
            assert p >= 0.02
            assert score == pytest.approx(np.log(p * (1 - 4 * shrink * p * (1 - p))), abs=1e-5)


@kinds
@FEW
@given(texts, st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_chunking_is_the_same(native: bool, tokens: list[int], cuts: list[int]) -> None:
    tokens = [t % VOCAB if t >= 0 else t for t in tokens]
    whole, parts = make(native, [1, 2, 3, 1], rate=0.1), make(native, [1, 2, 3, 1], rate=0.1)
    feed(whole, tokens, rows=ROWS)
    place = 0
    for size in itertools.cycle(cuts):
        if place >= len(tokens):
            break
        feed(parts, tokens[place : place + size], rows=ROWS)
        if size % 2:
            draft(parts, 3)  # looking changes nothing
        place += size
    assert_same(whole, parts, (), ROWS)


@kinds
@FEW
@given(texts, st.floats(0, 1))
def test_truncate_equals_rebuild(native: bool, tokens: list[int], share: float) -> None:
    tokens = [t % VOCAB if t >= 0 else t for t in tokens]
    kept = int(share * len(tokens))
    cut, built = make(native, rate=0.2), make(native)
    feed(cut, tokens)
    learnt = cut.weights()
    cut.truncate(kept)
    np.testing.assert_array_equal(cut.weights(), learnt)
    built = make(native, weights=learnt, rate=0.2)
    feed(built, tokens[:kept], follow=False)
    built.begin(0)
    for _ in range(2):
        assert_same(cut, built)
        for index in (cut, built):
            feed(index, [1, 0, 1])
    assert cut.check_integrity() == ""


@kinds
def test_extend_is_all_or_none(native: bool) -> None:
    index, same = (make(native, noisy_copy(1, 60, 9), rate=0.1) for _ in range(2))
    assert index.extend(ids([1, 2, VOCAB]), True, None, VOCAB) == 2
    assert index.extend(ids([-2, 1]), True, None, VOCAB) == 0
    assert index.extend(ids([]), True, None, VOCAB) == -1
    assert index.extend_side(ids([1, 99]), VOCAB) == 1
    assert (len(index), index.side_len) == (60, 0)
    assert_same(index, same)


@kinds
def test_reset_forgets_everything(native: bool) -> None:
    index = make(native, noisy_copy(1, 80, 9), rate=0.3)
    feed(index, noisy_copy(2, 40, 9))
    index.extend_side(ids([5, 6, 7]), VOCAB)
    index.hint(ids([3]), cosines(1))
    index.reset()
    assert_same(index, make(native, rate=0.3))
    assert (len(index), index.side_len, index.num_pairs) == (0, 0, 0)


@kinds
@pytest.mark.parametrize("path", [[], [1], [-1], [-5, 2**31 - 1, -(2**31)], [3] * 50])
def test_nothing_known_is_no_error(native: bool, path: list[int]) -> None:
    index = make(native)
    assert probabilities(index, path) == {-1: 1.0}
    assert draft(index, 9, path).token_ids == []
    index.truncate(0)
    assert index.check_integrity() == ""


@kinds
def test_ids_from_outside_are_safe(native: bool) -> None:
    """Hints and paths that lead nowhere, rows of any width, ids beyond the classes."""
    index = make(native, [*noisy_copy(3, 89, 12), 30], classes=CLASSES[:1])  # nothing matches
    plain = probabilities(index)
    index.hint(ids([-1, -(2**31), 90, 2**30 - 1, 2**30, 2**31 - 1]), cosines(6))
    assert set(probabilities(index)) == set(plain)
    index.hint(ids([5, 5, 6] * 400), cosines(1200))
    assert set(plain) | {index.tokens()[5], index.tokens()[6]} == set(probabilities(index))
    for rows in (np.zeros((0, 8), np.int32), np.zeros((VOCAB, 0), np.int32), np.full((VOCAB, 9), -1, np.int32)):
        assert_same(index, index, [1], rows)
    wrong = np.full((VOCAB, 3), 2**31 - 1, np.int32)
    assert 2**31 - 1 in probabilities(index, [1], wrong)
    for path in ([-1], [-7], [2**31 - 1], [1, -1, 2]):
        assert sum(probabilities(index, path, ROWS).values()) == pytest.approx(1.0)


@kinds
@pytest.mark.parametrize("budget", [0, 1, 1023])
@pytest.mark.parametrize("threshold", [0.0, 1e-300, 1.0, 2.0, -1.0])
def test_any_budget_and_threshold(native: bool, budget: int, threshold: float) -> None:
    if budget > 100 and not native:
        budget = 40
    index = make(native, noisy_copy(5, 120, 3), weights=ZEROS)
    nodes = draft(index, budget, threshold=threshold)
    assert len(nodes.token_ids) == (0 if threshold >= 1 else budget)


@kinds
def test_a_vocabulary_of_one(native: bool) -> None:
    index = make(native, [0] * 30, rate=0.5)
    feed(index, [0] * 40)
    nodes = draft(index, 8)
    assert nodes.token_ids == [0] * 8
    assert nodes.parents == list(range(-1, 7))


@kinds
def test_wrong_arguments_are_refused(native: bool) -> None:
    for weights in (ZEROS[:-1], np.full(NUM_WEIGHTS, np.nan), np.full(NUM_WEIGHTS, 51.0)):
        with pytest.raises(ValueError, match="weights: expected"):
            make(native, weights=weights)
    with pytest.raises(ValueError, match="classes: expected numbers below 8"):
        make(native, classes=np.array([1, 8], np.uint8))
    for rate in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="rate"):
            make(native, rate=rate)
    for shrink in (-0.1, 0.76, float("nan")):
        with pytest.raises(ValueError, match="shrink"):
            make(native, shrink=shrink)
    index = make(native, [1, 2, 3])
    for length in (-1, 4):
        with pytest.raises(ValueError, match="truncate"):
            index.truncate(length)
    assert index.tokens().tolist() == [1, 2, 3]
    with pytest.raises((TypeError, ValueError)):
        index.draft(np.zeros((2, 8), np.int32), NO_PATH, 0.1, None)


@kinds
def test_learning_lowers_the_loss(native: bool) -> None:
    """A text that repeats itself to the letter, which the start weights do not know."""
    unit = np.random.default_rng(5).permutation(25).tolist()
    tokens = unit * 8
    loss = {}
    for rate in (0.0, 0.05):
        index = make(native, tokens[:40], weights=ZEROS, rate=rate)
        total = 0.0
        for token in tokens[40:150]:
            p = probabilities(index)
            total -= np.log(p.get(token, p[-1]))
            feed(index, [token])
        loss[rate] = total
        assert np.any(index.weights() != 0) == (rate > 0)
    assert loss[0.05] < 0.6 * loss[0.0]


@kinds
def test_start_weights_are_not_the_callers(native: bool) -> None:
    weights = RANDOM.copy()
    index = make(native, noisy_copy(1, 50, 5), weights=weights)
    before = probabilities(index)
    weights[:] = 0.0
    index.reset()
    feed(index, noisy_copy(1, 50, 5), follow=False)
    index.begin(50)
    assert probabilities(index) == before


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: LearntIndex(0), "vocab_size is 0"),
        (lambda: LearntIndex(2.5), "vocab_size is 2.5"),  # type: ignore[arg-type]
        (lambda: LearntIndex(2**40), "vocab_size is"),
        (lambda: LearntIndex(9, token_kinds=[0, 1]), "token_kinds"),  # type: ignore[arg-type]
        (lambda: LearntIndex(9).begin(-1), "prompt_len is -1"),
        (lambda: LearntIndex(9).draft(2.5), "budget is 2.5"),  # type: ignore[arg-type]
        (lambda: LearntIndex(9).draft("a"), "budget is 'a'"),  # type: ignore[arg-type]
        (lambda: LearntIndex(9).truncate(0.5), "length is 0.5"),  # type: ignore[arg-type]
        (lambda: LearntIndex(9).truncate(-1), "truncate to -1"),
    ],
)
def test_wrong_numbers_are_named(call: Any, named: str) -> None:
    with pytest.raises(GraftError, match=named):
        call()


@pytest.mark.parametrize("call", ["extend", "extend_side"])
def test_no_memory_is_one_sentence(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = LearntIndex(10)

    class Full:
        side_len = 0

        def __len__(self) -> int:
            return 0

        def extend(self, *_: Any) -> int:
            raise MemoryError

        extend_side = extend

    monkeypatch.setattr(index, "_index", Full())
    with pytest.raises(GraftError, match="no memory for 3 more tokens: the index was emptied"):
        getattr(index, call)([1, 2, 3])
