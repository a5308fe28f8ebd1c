"""The dense store finds the places whose state was most alike, whatever the backend and however states arrive."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.index.dense_store import LEAST_TO_FIT, DenseStore, places_after
from longgraft.index.nearest import faiss_module
from longgraft.index.projection import Projection
from tests.index.texts import QUICK

HIDDEN = 24
BACKENDS = ["numpy", "torch"] if faiss_module() is None else ["numpy", "torch", "faiss"]
backends = pytest.mark.parametrize("backend", BACKENDS)


def states(seed: int, n: int, hidden: int = HIDDEN) -> np.ndarray:
    """Random states with repeats, one dimension that dwarfs the others and one that never moves."""
    rng = np.random.default_rng(seed)
    array = rng.standard_normal((n, hidden)).astype(np.float32)
    copies = rng.integers(0, n, n // 4)
    array[rng.integers(0, n, n // 4)] = array[copies]
    array[:, 0] = 1000 + array[:, 0]
    array[:, 1] = 3
    return array


def brute_force(store: DenseStore, array: np.ndarray, query: np.ndarray, k: int, fitted: int) -> np.ndarray:
    projection = Projection.fit(array[:fitted], 16)
    keys = projection.keys(array).astype(np.float64)
    scores = (keys * projection.keys(query[None])[0]).sum(axis=1)[: len(array) - store.recent]
    return np.array(sorted(range(len(scores)), key=lambda j: (-round(scores[j], 6), -j))[:k])


@backends
@pytest.mark.parametrize("n", [64, 200, 900])
def test_finds_what_brute_force_finds(backend: str, n: int) -> None:
    array = states(n, n)
    store = DenseStore(dim=16, fit_after=100, backend=backend)
    store.extend(array)
    for j in (0, n // 2, n - 1):
        positions, scores = store.search(array[j], 9)
        np.testing.assert_array_equal(positions, brute_force(store, array, array[j], 9, min(n, 100)))
        assert np.all(np.diff(scores) <= 0)
    assert store.check_integrity() == ""


@QUICK
@given(st.integers(0, 10**6), st.lists(st.integers(0, 90), max_size=8), st.integers(0, 12))
def test_backends_and_chunks_do_not_matter(seed: int, cuts: list[int], k: int) -> None:
    array = states(seed, 300)
    stores = [DenseStore(dim=16, fit_after=80, backend=backend) for backend in BACKENDS for _ in range(2)]
    bounds = [*np.minimum(np.cumsum([0, *cuts]), 300).tolist(), 300]
    for number, store in enumerate(stores):
        pieces = [array] if number % 2 else [array[a:b] for a, b in itertools.pairwise(bounds)]
        for piece in pieces:
            store.extend(piece)
    expected = stores[0].search(array[7], k)
    for store in stores[1:]:
        for mine, theirs in zip(store.search(array[7], k), expected):
            np.testing.assert_array_equal(mine, theirs)


@backends
def test_equal_scores_go_to_the_newest_even_when_there_are_many(backend: str) -> None:
    array = np.concatenate([states(1, 200), np.repeat(states(2, 1), 500, axis=0)])
    store = DenseStore(dim=16, backend=backend, recent=0)
    store.extend(array)
    positions, scores = store.search(array[-1], 5)
    assert positions.tolist() == [699, 698, 697, 696, 695]
    assert len(set(scores.tolist())) == 1


@backends
def test_recent_positions_are_left_out(backend: str) -> None:
    array = states(3, 200)
    store = DenseStore(dim=16, recent=5, backend=backend)
    store.extend(array)
    positions, _ = store.search(array[199], 300)
    assert sorted(positions.tolist()) == list(range(195))


@backends
@QUICK
@given(st.integers(0, 10**6), st.integers(0, 250), st.integers(0, 60))
def test_truncate_equals_rebuild(backend: str, seed: int, keep: int, more: int) -> None:
    array, other = states(seed, 250), states(seed + 1, 60)
    projection = Projection.fit(array, 16)
    store, rebuilt = (DenseStore(projection=projection, backend=backend) for _ in range(2))
    store.extend(array)
    store.truncate(keep)
    rebuilt.extend(array[:keep])
    for one in (store, rebuilt):
        one.extend(other[:more])
        assert len(one) == keep + more and one.check_integrity() == ""
    for mine, theirs in zip(store.search(array[1], 7), rebuilt.search(array[1], 7)):
        np.testing.assert_array_equal(mine, theirs)


def test_truncate_before_the_projection_is_fitted() -> None:
    array = states(4, 120)
    store, rebuilt = DenseStore(dim=16), DenseStore(dim=16)
    store.extend(array)
    store.truncate(70)
    rebuilt.extend(array[:70])
    np.testing.assert_array_equal(store.search(array[3], 4)[1], rebuilt.search(array[3], 4)[1])
    assert store.check_integrity() == rebuilt.check_integrity() == ""


def test_at_its_cap_it_counts_on_and_keeps_answering() -> None:
    array = states(5, 400)
    store = DenseStore(dim=16, capacity=150, fit_after=100)
    for start in range(0, 400, 33):
        store.extend(array[start : start + 33])
    assert store.is_full and len(store) == 400 and store.num_keys == 150
    assert set(store.search(array[20], 400)[0].tolist()) == set(range(150))
    size = store.memory_bytes
    store.extend(states(6, 5000))
    assert store.memory_bytes == size and store.check_integrity() == ""
    store.truncate(100)
    store.extend(array[200:230])
    assert len(store) == store.num_keys == 130 and not store.is_full


def test_skipped_positions_are_never_found() -> None:
    array = states(7, 200)
    store = DenseStore(dim=16, recent=0)
    store.extend(array[:100])
    store.skip(1000)
    store.extend(array[100:])
    found = sorted(store.search(array[0], 5000)[0].tolist())
    assert found == [*range(100), *range(1100, 1200)] and len(store) == 1200
    store.truncate(500)
    assert len(store) == 500 and store.num_keys == 100 and store.check_integrity() == ""


def test_scores_of_given_positions_are_those_of_search() -> None:
    array = states(7, 200)
    store = DenseStore(dim=16, recent=0)
    assert store.scores(array[0], [1, 2]).tolist() == [-1, -1]
    store.extend(array[:100])
    store.skip(10)
    store.extend(array[100:])
    positions, scores = store.search(array[5], 200)
    np.testing.assert_array_equal(store.scores(array[5], positions), scores)
    assert store.scores(array[5], [-2, 105, 210, 10**9]).tolist() == [-1, -1, -1, -1]
    assert store.scores(array[5], []).shape == (0,)


def test_reset_forgets_states_and_projection() -> None:
    store = DenseStore(dim=16)
    store.extend(states(8, 2000))
    store.reset()
    assert len(store) == store.num_keys == 0 and store.check_integrity() == ""
    array = states(9, 200, hidden=40)
    store.extend(array)
    fresh = DenseStore(dim=16)
    fresh.extend(array)
    np.testing.assert_array_equal(store.search(array[0], 3)[1], fresh.search(array[0], 3)[1])


def test_little_or_nothing_is_no_error() -> None:
    store = DenseStore()
    assert len(store.search(np.zeros(8), 3)[0]) == 0
    store.extend(np.zeros((0, 8)))
    store.extend(states(1, LEAST_TO_FIT - 1, 8))
    assert len(store.search(np.ones(8), 3)[0]) == 0
    store.extend(np.ones((1, 8)))
    assert len(store.search(np.ones(8), 3)[0]) == 3
    assert len(store.search(np.ones(8), 0)[0]) == 0


def test_states_that_never_differ_give_finite_scores() -> None:
    store = DenseStore(fit_after=10)
    store.extend(np.full((100, 8), 5.0))
    positions, scores = store.search(np.full(8, 5.0), 4)
    assert positions.tolist() == [97, 96, 95, 94] and scores.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 8), bool), "bool"),
        (np.zeros(8), "shape"),
        (np.zeros((2, 2, 2)), "shape"),
        (np.zeros((2, 0)), "shape"),
        (np.zeros((2, 9)), "9 dimensions"),
        (np.array([[1.0] * 7 + [np.nan]]), "finite"),
        (np.array([[1.0] * 7 + [1e300]]), "finite"),
        (np.array([["a"] * 8]), "expected floating"),
        (np.zeros((2, 8), complex), "complex"),
        (np.array([[None] * 8]), "object"),
    ],
)
def test_bad_states_change_nothing(array: Any, message: str) -> None:
    store = DenseStore(dim=16)
    store.extend(states(1, 100, 8))
    with pytest.raises(GraftError, match=message):
        store.extend(array)
    assert len(store) == 100 and store.check_integrity() == ""
    if array.ndim == 2:
        with pytest.raises(GraftError, match=message):
            store.search(array[0], 3)


def test_what_is_no_array_is_one_sentence() -> None:
    store = DenseStore(dim=16)
    with pytest.raises(GraftError, match="cannot be read as an array"):
        store.extend([[1.0, 2.0], [3.0]])


def test_a_long_prompt_at_once_equals_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longgraft.index.projection.MOST_ROWS", 100)
    array = states(11, 1000)
    projection = Projection.fit(array, 16)
    np.testing.assert_array_equal(projection.keys(array)[377:777], projection.keys(array[377:777]))


@pytest.mark.parametrize("name", ["dim", "capacity", "fit_after", "exact_below"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_bad_settings_are_named(name: str, value: Any) -> None:
    with pytest.raises(GraftError, match=name):
        DenseStore(**{name: value})


def test_bad_lengths_are_named() -> None:
    store = DenseStore()
    store.extend(states(1, 10))
    for length in (-1, 11):
        with pytest.raises(GraftError, match="holds 10"):
            store.truncate(length)
    with pytest.raises(GraftError, match="k is -1"):
        store.search(states(1, 1)[0], -1)


def test_places_after_prefers_hits_before_which_the_root_stood() -> None:
    text = [5, 6, 7, 5, 9, 7, 6, 7]
    # Hit j stands for root = token j + 1, and place j + 2 may follow.
    assert places_after([0, 2, 4, 6, 5], text, root=7).tolist() == [6, 2, 4, 7]
    assert places_after([], text, root=7).tolist() == []
    assert places_after([-1, -2, 100], text, root=5).tolist() == [1]


def test_memory_is_what_was_touched_and_reset_gives_it_back() -> None:
    store = DenseStore(dim=16, capacity=1 << 20)
    store.extend(states(1, 3000))
    full = store.memory_bytes
    assert 3000 * (16 * 4 + 8) <= full <= 3000 * (16 * 4 + 8) + 10_000
    store.reset()
    assert store.memory_bytes == 0
    store.extend(states(1, 3000))
    assert store.memory_bytes == full


def test_a_capacity_beyond_all_memory_is_one_sentence() -> None:
    with pytest.raises(GraftError, match="lower its capacity"):
        DenseStore(capacity=10**17)
