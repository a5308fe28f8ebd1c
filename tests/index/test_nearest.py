"""Inverted lists find nearly what exact search finds, and follow a set that grows and shrinks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.index import nearest
from longgraft.index.nearest import NearestRows, faiss_module

needs_faiss = pytest.mark.skipif(faiss_module() is None, reason="needs faiss")


def unit_rows(seed: int, n: int, dim: int = 16) -> np.ndarray:
    """Unit vectors in clumps, as keys of real text are."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((40, dim))[rng.integers(0, 40, n)] + 0.3 * rng.standard_normal((n, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "NUM_LISTS", 16)
    monkeypatch.setattr(nearest, "NUM_PROBES", 4)
    monkeypatch.setattr(nearest, "BLOCK", 64)


@needs_faiss
@pytest.mark.usefixtures("small_lists")
def test_lists_find_most_of_what_exact_search_finds() -> None:
    rows = unit_rows(1, 4000)
    lists, exact = NearestRows(16, exact_below=2000), NearestRows(16, backend="numpy")
    for start in range(0, 4000, 250):
        for one in (lists, exact):
            one.extend(rows[start : start + 250])
        assert lists.check_integrity() == ""
    assert exact.is_exact and not lists.is_exact
    shared = 0
    for query in unit_rows(2, 50):
        (a, scores), (b, _) = lists.search(query, 8), exact.search(query, 8)
        assert np.all(np.diff(scores) <= 0) and len(set(a.tolist())) == 8
        np.testing.assert_array_equal(scores, (rows[a] * query).sum(axis=1))
        shared += len(set(a.tolist()) & set(b.tolist()))
    assert shared >= 0.8 * 50 * 8


@needs_faiss
@pytest.mark.usefixtures("small_lists")
def test_lists_search_the_newest_rows_exactly() -> None:
    lists = NearestRows(16, exact_below=1000)
    lists.extend(unit_rows(1, 1000))
    newest = unit_rows(9, 7)
    lists.extend(newest)
    assert lists.search(newest[3], 1)[0].tolist() == [1003]
    assert 1003 not in lists.search(newest[3], 20, limit=1003)[0]


@needs_faiss
@pytest.mark.usefixtures("small_lists")
def test_dropped_rows_are_never_found_again() -> None:
    rows = unit_rows(1, 3000)
    lists = NearestRows(16, exact_below=1000)
    lists.extend(rows)
    lists.truncate(1500)
    other = unit_rows(5, 1500)
    lists.extend(other)
    now = np.concatenate([rows[:1500], other])
    for query in rows[1500:1600]:
        found, scores = lists.search(query, 10)
        np.testing.assert_array_equal(scores, (now[found] * query).sum(axis=1))
    lists.truncate(10)
    assert lists.is_exact and sorted(lists.search(rows[0], 50)[0].tolist()) == list(range(10))


@needs_faiss
@pytest.mark.usefixtures("small_lists")
def test_same_order_of_calls_same_answers() -> None:
    rows = unit_rows(1, 3000)
    one, two = NearestRows(16, exact_below=1000), NearestRows(16, exact_below=1000)
    for each in (one, two):
        each.extend(rows[:1200])
        each.extend(rows[1200:])
    for query in unit_rows(3, 20):
        for a, b in zip(one.search(query, 6), two.search(query, 6)):
            np.testing.assert_array_equal(a, b)


def test_limits_and_sizes() -> None:
    rows = NearestRows(4, backend="numpy")
    assert len(rows.search(np.ones(4, np.float32), 3)[0]) == 0
    rows.extend(unit_rows(1, 5, 4))
    query = rows.matrix()[2]
    assert len(rows.search(query, 99)[0]) == 5
    assert len(rows.search(query, 99, limit=-3)[0]) == 0
    assert len(rows.search(query, 99, limit=2)[0]) == 2
    rows.truncate(99)
    assert len(rows) == 5 and rows.memory_bytes >= 5 * 16


def test_more_than_there_is_room_for_is_refused_whole() -> None:
    rows = NearestRows(4, capacity=6, backend="numpy")
    rows.extend(unit_rows(1, 5, 4))
    with pytest.raises(GraftError, match="room for 6"):
        rows.extend(unit_rows(2, 2, 4))
    assert len(rows) == 5 and rows.check_integrity() == ""
    rows.extend(unit_rows(2, 1, 4))
    assert len(rows) == 6


def test_spoilt_keys_are_noticed() -> None:
    rows = NearestRows(4, backend="numpy")
    rows.extend(unit_rows(1, 5, 4))
    rows.matrix()[3, 0] += 1
    assert "key 3" in rows.check_integrity()


@pytest.mark.parametrize(("dim", "backend"), [(0, "auto"), (4, "annoy"), (4, "")])
def test_bad_settings_are_named(dim: int, backend: str) -> None:
    with pytest.raises(GraftError, match="expected"):
        NearestRows(dim, backend=backend)


@pytest.mark.parametrize("backend", ["faiss", "faiss-gpu"])
def test_a_backend_that_is_not_there_is_one_sentence(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    faiss_module.cache_clear()
    try:
        with pytest.raises(GraftError, match=f"'{backend}': faiss is not installed; install {backend.split('-')[0]}"):
            NearestRows(4, backend=backend)
        rows = NearestRows(4)
        rows.extend(unit_rows(1, 50, 4))
        assert len(rows.search(unit_rows(2, 1, 4)[0], 3)[0]) == 3
    finally:
        faiss_module.cache_clear()


@needs_faiss
def test_a_gpu_that_is_not_there_is_one_sentence() -> None:
    faiss: Any = faiss_module()
    if getattr(faiss, "get_num_gpus", lambda: 0)():
        pytest.skip("there is one")
    with pytest.raises(GraftError, match="sees no GPU"):
        NearestRows(4, backend="faiss-gpu")


class FakeGpu:
    """What `_Device` uses of faiss-gpu, answered by numpy; `blind`: it misses the nearest row."""

    METRIC_INNER_PRODUCT = 0

    def __init__(self, blind: bool) -> None:
        self.blind = blind

    def get_num_gpus(self) -> int:
        return 1

    def StandardGpuResources(self) -> None:
        return None

    class GpuIndexFlatConfig:
        useFloat16 = False

    def GpuIndexFlatIP(self, _resources: None, dim: int, _config: Any) -> Any:
        return FakeFlat(dim, self.blind)


class FakeFlat:
    def __init__(self, dim: int, blind: bool) -> None:
        self.d, self.blind, self.rows = dim, blind, np.empty((0, dim), np.float32)

    def add(self, rows: np.ndarray) -> None:
        self.rows = np.concatenate([self.rows, rows])

    def reset(self) -> None:
        self.rows = self.rows[:0]

    def search(self, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(-(self.rows @ query[0]), kind="stable")[1 if self.blind else 0 :][:k]
        return np.zeros((1, len(order))), order[None]


@pytest.mark.usefixtures("small_lists")
def test_the_gpu_path_keeps_books_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the books: what the device itself answers is not run here."""
    monkeypatch.setattr(nearest, "faiss_module", lambda: FakeGpu(blind=False))
    device, exact = NearestRows(16, backend="faiss-gpu"), NearestRows(16, backend="numpy")
    for seed, size, keep in ((1, 10, 10), (2, 200, 210), (3, 130, 100), (4, 300, 400)):
        for one in (device, exact):
            one.extend(unit_rows(seed, size))
            one.truncate(keep)
            assert one.check_integrity() == ""
        for query in unit_rows(5, 5):
            for limit in (len(exact), len(exact) - 3):
                np.testing.assert_array_equal(device.search(query, 6, limit)[0], exact.search(query, 6, limit)[0])


@pytest.mark.usefixtures("small_lists")
def test_a_gpu_that_misses_the_nearest_key_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "faiss_module", lambda: FakeGpu(blind=True))
    device = NearestRows(16, backend="faiss-gpu")
    device.extend(unit_rows(1, 500))
    with pytest.raises(GraftError, match="missed the nearest key"):
        device.search(device.matrix()[7], 4)
