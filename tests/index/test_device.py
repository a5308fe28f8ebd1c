"""The device's automaton gives the host's drafts, hazards and text; without a GPU its kernel runs as host code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.index import device as device_module
from longgraft.index import host_kernel, nvrtc
from longgraft.index.device import DeviceAutomaton, checked_launch, differs
from longgraft.index.suffix_automaton import SuffixAutomaton
from tests.index.texts import TEXTS, both, noisy_copy, successor_rows, texts

pytestmark = both
FEW = settings(deadline=None, max_examples=25, derandomize=True)
Make = Callable[..., DeviceAutomaton]


@pytest.fixture(scope="session")
def host_launch(tmp_path_factory: pytest.TempPathFactory) -> nvrtc.Launch:
    """The kernel's own source compiled as C++."""
    if not any(map(shutil.which, host_kernel.COMPILERS)):
        pytest.skip("needs a C++ compiler")
    return host_kernel.host_launch(tmp_path_factory.mktemp("device"))


@pytest.fixture(
    params=[pytest.param("cpu", id="as host code"), pytest.param("cuda", id="on a GPU", marks=pytest.mark.gpu)]
)
def make(request: pytest.FixtureRequest, host_launch: nvrtc.Launch) -> Make:
    if request.param == "cuda":
        return lambda host, **options: DeviceAutomaton(host, "cuda", **options)
    return lambda host, **options: DeviceAutomaton(host, "cpu", launch=host_launch, **options)


def put(mirror: DeviceAutomaton, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=mirror.device)


def assert_same_draft(
    mirror: DeviceAutomaton, host: SuffixAutomaton, path: list[int], rows: np.ndarray | None = None, budget: int = 40
) -> None:
    on_device = None if rows is None else put(mirror, rows, torch.int32)
    ours = mirror.draft(budget, put(mirror, path) if path else None, 1e-3, on_device)
    theirs = host.draft(budget, path, 1e-3, rows)
    n = int(ours.num_nodes)
    assert n == len(theirs.token_ids)
    for name in ("token_ids", "parents", "match_lens", "origins", "cells"):
        np.testing.assert_array_equal(getattr(ours, name)[:n].cpu().numpy(), getattr(theirs, name), err_msg=name)
    scores = np.log(ours.probabilities[:n].cpu().numpy()).astype(np.float32)
    np.testing.assert_allclose(scores, theirs.scores, rtol=0, atol=1e-6)


def assert_same_all(mirror: DeviceAutomaton, host: SuffixAutomaton) -> None:
    back = mirror.to_host()
    np.testing.assert_array_equal(back.tokens(), host.tokens())
    np.testing.assert_array_equal(back.states(), host.states())
    for x, y in zip(back.learnt(), host.learnt()):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", TEXTS)
def test_extend_and_draft_equal_the_host(make: Make, name: str) -> None:
    tokens = TEXTS[name]
    host = SuffixAutomaton(1000)
    host.extend(tokens[: len(tokens) // 3])
    mirror = make(host, room=1000)
    for place in range(len(tokens) // 3, len(tokens), 7):
        new = tokens[place : place + 7]
        host.extend(new, learn=True)
        mirror.extend(put(mirror, new), learn=True)
        if place % 5 == 0:
            assert_same_draft(mirror, host, [])
    assert_same_draft(mirror, host, tokens[:2] if -1 not in tokens[:2] else [])
    assert_same_draft(mirror, host, [], successor_rows(300))
    assert_same_all(mirror, host)


def test_any_text_equals_the_host(host_launch: nvrtc.Launch) -> None:
    @FEW
    @given(texts, st.integers(0, 200), st.integers(1, 9), st.booleans())
    def check(tokens: list[int], start: int, step: int, learn: bool) -> None:
        host = SuffixAutomaton(100)
        host.extend(tokens[:start])
        mirror = DeviceAutomaton(host, "cpu", room=300, launch=host_launch)
        for place in range(start, len(tokens), step):
            host.extend(tokens[place : place + step], learn=learn)
            mirror.extend(put(mirror, tokens[place : place + step]), learn=learn)
        assert_same_draft(mirror, host, [])
        assert_same_all(mirror, host)

    check()


@pytest.mark.parametrize("alphabet", [2, 5, 1000])
def test_room_is_enough_for_any_text(make: Make, alphabet: int) -> None:
    """What was reserved for n tokens takes n of the worst tokens: clones and edges do not run out before."""
    rng = np.random.default_rng(alphabet)
    host = SuffixAutomaton()
    host.extend(rng.integers(0, alphabet, 50))
    mirror = make(host, room=2000)
    more = rng.integers(0, alphabet, 2000)
    mirror.extend(put(mirror, more))
    host.extend(more)
    assert not int(mirror._fault)
    assert_same_all(mirror, host)


def test_lack_of_room_is_made_good(make: Make) -> None:
    tokens = noisy_copy(4, 400, 9)
    host = SuffixAutomaton(50)
    host.extend(tokens[:100])
    mirror = make(host, room=40)
    mirror.extend(put(mirror, tokens[100:160]))  # 60 for 40
    assert int(mirror._control[nvrtc.FIELDS.index("FAULT")]) == device_module.FULL
    before = mirror.memory_bytes
    host.extend(tokens[100:160])
    assert_same_draft(mirror, host, [])
    assert mirror.memory_bytes > before
    for place in range(160, 400, 11):
        mirror.extend(put(mirror, tokens[place : place + 11]))
    host.extend(tokens[160:])
    assert_same_all(mirror, host)


def test_while_it_is_full_it_drafts_nothing_and_keeps_the_text(make: Make) -> None:
    host = SuffixAutomaton(50)
    host.extend([1, 2, 3] * 9)
    mirror = make(host, room=5)
    mirror.extend(put(mirror, [1, 2, 3] * 2 + [4]))
    mirror._fault.zero_()  # as if the copy had not arrived
    assert int(mirror.draft(8).num_nodes) == 0
    assert mirror.to_host().tokens().tolist() == [1, 2, 3] * 11 + [4]
    mirror.extend(put(mirror, [5] * 20))
    with pytest.raises(GraftError, match="upload the index again"):
        mirror.draft(8)
    mirror.upload(host)
    assert_same_draft(mirror, host, [])


def test_count_on_the_device(make: Make) -> None:
    host = SuffixAutomaton(50)
    host.extend([1, 2, 3, 1])
    mirror = make(host)
    mirror.extend(put(mirror, [2, 3, 9, 9]), count=put(mirror, [2]))
    host.extend([2, 3])
    assert_same_draft(mirror, host, [])
    mirror.extend(put(mirror, [9, 9]), count=put(mirror, [0]))
    mirror.extend(put(mirror, []))
    assert_same_all(mirror, host)


@pytest.mark.parametrize("bad", [[1, 50], [-2], [2**31 - 1], [2**32 + 1], [-(2**40)]])
def test_bad_token_is_one_error_later(make: Make, bad: list[int]) -> None:
    host = SuffixAutomaton(50)
    host.extend([1, 2, 1])
    mirror = make(host)
    mirror.extend(put(mirror, bad))
    with pytest.raises(GraftError, match="outside -1 to 49"):
        mirror.to_host()


@pytest.mark.parametrize("bad", [[-1], [3, 50], [2**32 + 1]])
def test_no_nodes_after_what_is_no_path(make: Make, bad: list[int]) -> None:
    host = SuffixAutomaton(50)
    host.extend([1, 2, -1, 3, 1, 2])
    mirror = make(host)
    assert int(mirror.draft(8, put(mirror, bad)).num_nodes) == 0
    assert int(mirror.draft(8).num_nodes) > 0


def test_doors(make: Make, host_launch: nvrtc.Launch) -> None:
    host = SuffixAutomaton(50)
    mirror = make(host, max_budget=8)
    assert int(mirror.draft(8).num_nodes) == 0
    for budget in (0, 9, -1):
        with pytest.raises(GraftError, match="budget"):
            mirror.draft(budget)
    with pytest.raises(GraftError, match="threshold"):
        mirror.draft(4, threshold=1.0)
    for wrong in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)):
        with pytest.raises(GraftError, match="row of integers"):
            mirror.extend(wrong.to(mirror.device))
    with pytest.raises(GraftError, match="count"):
        mirror.extend(put(mirror, [1]), count=put(mirror, [1, 1]))
    with pytest.raises(GraftError, match="int32"):
        mirror.draft(4, successors=torch.zeros(3, 3, device=mirror.device))
    with pytest.raises(GraftError, match="max_budget"):
        make(host, max_budget=0)
    with pytest.raises(GraftError, match="at most"):
        make(host, room=2**29)
    with pytest.raises(GraftError, match="native"):
        DeviceAutomaton(SuffixAutomaton(50, native=False), "cpu", launch=host_launch)


def test_check_before_first_use_finds_a_difference(host_launch: nvrtc.Launch) -> None:
    assert differs(host_launch, "cpu") == ""
    assert differs(lambda *values: host_launch(*values[:4], 0, *values[5:]), "cpu") != ""  # never learns
    assert differs(lambda *values: None, "cpu") == "after 303 tokens"


def test_no_gpu_is_one_sentence() -> None:
    with pytest.raises(GraftError, match="no such CUDA device"):
        checked_launch(torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(GraftError, match="no such CUDA device"):
            DeviceAutomaton(SuffixAutomaton(50))


@pytest.mark.gpu
def test_gpu_gives_the_hosts_results() -> None:
    assert differs(checked_launch(torch.device("cuda")), "cuda") == ""
