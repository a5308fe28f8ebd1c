"""Keys on a device are found as on the host, by tensors alone; here the device is the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longgraft.config import GraftError
from longgraft.index.dense_store import DenseStore
from longgraft.index.device_keys import NO_HIT, DeviceDense, DeviceKeys, TorchShortlist
from longgraft.index.nearest import NearestRows
from longgraft.index.projection import Projection
from tests.host_reads import HostRead, no_host_reads


def unit_rows(seed: int, n: int, dim: int = 16) -> torch.Tensor:
    rows = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))
    return rows / rows.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("n", [1, 7, 300])
def test_search_is_brute_force(n: int) -> None:
    keys, exact = DeviceKeys(16, 400, "cpu"), NearestRows(16, backend="numpy")
    rows = unit_rows(1, n)
    for part in rows.split(60):
        keys.extend(part)
        exact.extend(part.numpy())
    for query in unit_rows(2, 5):
        found, scores = keys.search(query, 9)
        expected, known = exact.search(query.numpy(), 9)
        there = min(n, 9)
        assert found[:there].tolist() == expected.tolist()
        np.testing.assert_allclose(scores[:there].numpy(), known, rtol=0, atol=1e-6)
        assert found[there:].tolist() == [NO_HIT] * (9 - there)
        assert torch.isneginf(scores[there:]).all()


def test_a_limit_and_a_count_lie_on_the_device() -> None:
    keys, rows = DeviceKeys(16, 100, "cpu"), unit_rows(1, 20)
    keys.extend(rows, torch.tensor([5]))
    assert int(keys.length) == 5
    assert set(keys.search(rows[0], 20)[0].tolist()) == {0, 1, 2, 3, 4, NO_HIT}
    keys.extend(rows[5:])
    assert keys.search(rows[9], 1)[0].tolist() == [9]
    assert 9 not in keys.search(rows[9], 20, torch.tensor([9]))[0].tolist()
    keys.truncate(3)
    keys.extend(rows[9:10])
    assert keys.search(rows[9], 2)[0].tolist()[0] == 3 and int(keys.length) == 4


def test_equal_keys_go_newest_first() -> None:
    keys = DeviceKeys(4, 50, "cpu")
    keys.extend(torch.eye(4)[[0, 1, 0, 2, 0]])
    assert keys.search(torch.eye(4)[0], 3)[0].tolist() == [4, 2, 0]


def test_beyond_the_capacity_keys_are_dropped() -> None:
    keys, rows = DeviceKeys(16, 10, "cpu"), unit_rows(1, 14)
    keys.extend(rows[:8])
    keys.extend(rows[8:])
    assert int(keys.length) == 10
    assert sorted(keys.search(rows[13], 12)[0].tolist()) == [NO_HIT, NO_HIT, *range(10)]


def test_states_are_found_as_in_the_dense_store() -> None:
    rng = np.random.default_rng(1)
    states = rng.standard_normal((500, 24)).astype(np.float32)
    projection = Projection.fit(states[:200], 16)
    store, device = DenseStore(projection=projection, backend="numpy"), DeviceDense(projection, 600, "cpu")
    for start in range(0, 500, 90):
        store.extend(states[start : start + 90])
        device.extend(torch.from_numpy(states[start : start + 90]))
    for state in states[::50]:
        positions, scores = store.search(state, 6)
        found, cosines = device.search(torch.from_numpy(state), 6)
        np.testing.assert_allclose(cosines.numpy(), scores, rtol=0, atol=1e-5)
        assert found.tolist() == positions.tolist()


def test_nothing_is_waited_for() -> None:
    rows = unit_rows(1, 30)
    with no_host_reads():
        keys = DeviceKeys(16, 100, "cpu")
        keys.extend(rows, torch.tensor([20]))
        keys.search(rows[0], 5, torch.tensor([9]))
    with pytest.raises(HostRead), no_host_reads():
        rows[0, 0].item()
    dense = DeviceDense(Projection(np.zeros(24, np.float32), np.ones((24, 16), np.float32)), 100, "meta")
    dense.extend(torch.zeros(30, 24, device="meta"), torch.ones(1, dtype=torch.int64, device="meta"))
    assert dense.search(torch.zeros(24, device="meta"), 5)[0].shape == (5,)


def test_doors() -> None:
    with pytest.raises(GraftError, match="expected 1 or more"):
        DeviceKeys(0, 5, "cpu")
    keys = DeviceKeys(4, 5, "cpu")
    with pytest.raises(GraftError, match=r"expected \[n, 4\]"):
        keys.extend(torch.zeros(2, 3))
    assert keys.search(torch.zeros(4), 0)[0].shape == (0,)
    with pytest.raises(GraftError, match="expected one of"):
        NearestRows(4, backend="numpy:cuda")
    with pytest.raises(GraftError, match="no room for"):
        NearestRows(4, backend="torch:meta:cuda")
    if not torch.cuda.is_available():
        with pytest.raises(GraftError, match="no room for 7 on cuda"):
            NearestRows(4, capacity=7, backend="torch:cuda")


def test_a_device_that_misses_the_nearest_key_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = unit_rows(1, 200).numpy()
    nearest = NearestRows(16, capacity=300, backend="torch")
    nearest.extend(rows)
    monkeypatch.setattr(DeviceKeys, "_scores", lambda self, query: torch.arange(200.0))
    with pytest.raises(GraftError, match="missed the nearest key"):
        nearest.search(rows[3], 2)
    monkeypatch.setattr(TorchShortlist, "search", lambda self, query, k: np.full(k, NO_HIT))
    with pytest.raises(GraftError, match="missed the nearest key"):
        nearest.search(rows[3], 2)
