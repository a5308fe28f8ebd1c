"""Attention behind a prefix of unknown length: within a bound, the answer of attention that knows it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from longgraft.kernels.bounded import BoundedPrefix, bounded_attention
from tests.host_reads import no_host_reads
from tests.kernels.attention_cases import CHUNK, Call, Case, assert_close, make

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs triton, and its interpreter"
)
CASES = [
    Case(),
    Case(rows=1, prefix=1),
    Case(rows=5, prefix=0),
    Case(rows=64, prefix=511, kv_heads=1, group=8, dim=32),
    Case(rows=9, prefix=700, tree="chain", window=300),
    Case(rows=17, prefix=257, window=3, softcap=5.0, sinks=True),
    Case(rows=17, prefix=300, dim=48, value_dim=64, dtype=torch.bfloat16),
    Case(rows=17, prefix=300, dtype=torch.float16),
]


def in_chunks(rows: Tensor, bound: int, fill: float) -> tuple[Tensor, Tensor]:
    """Return a pool whose chunks hold the rows in mixed order, and where each row lies; others hold `fill`."""
    chunks = -(-bound // CHUNK)
    order = torch.randperm(chunks, generator=torch.Generator().manual_seed(chunks))
    pool = torch.full((chunks * CHUNK, *rows.shape[1:]), fill, dtype=rows.dtype)
    places = (order[:, None] * CHUNK + torch.arange(CHUNK)).flatten()[:bound]
    pool[places[: len(rows)]] = rows
    return pool, places


def attend(call: Call, bound: int, backend: str, fill: float = float("nan")) -> Tensor:
    keys, places = in_chunks(call.keys, bound, fill)
    values, _ = in_chunks(call.values, bound, fill)
    if not len(call.keys):
        keys[places[0]], values[places[0]] = 0.0, 0.0
    prefix = BoundedPrefix(places, torch.tensor([len(call.keys)]), CHUNK)
    arguments: Any = (call.query, (keys, values), prefix, (call.tree_keys, call.tree_values), call.spec, call.mask)
    positions = torch.tensor(call.positions)
    if backend == "reference":
        with no_host_reads():
            return bounded_attention(*arguments, positions, backend)
    return bounded_attention(*arguments, positions, backend)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("more", [0, 1, 600])
def test_reference_is_as_exact_as_torch(case: Case, more: int) -> None:
    call = make(case)
    assert_close(case, attend(call, max(1, case.prefix + more), "reference"))


QUICK = [
    pytest.param(Case(rows=3, prefix=260, kv_heads=1, dim=16), marks=pytest.mark.slow),
    Case(rows=5, prefix=40, kv_heads=1, dim=16, window=3, sinks=True),
]


@needs_triton
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)], ids=str)
@pytest.mark.parametrize("more", [0, 300])
def test_triton_is_as_exact_as_torch(case: Case, more: int) -> None:
    call = make(case)
    assert_close(case, attend(call, max(1, case.prefix + more), "triton"))


@needs_triton
def test_layers_share_what_is_worked_out_once() -> None:
    prefix = BoundedPrefix(torch.arange(48), torch.tensor([40]), CHUNK)
    for window, plans in ((None, 1), (3, 2), (None, 2), (3, 2)):
        case = Case(rows=5, prefix=40, kv_heads=1, dim=16, window=window)
        call = make(case)
        pool = (torch.cat([call.keys, call.keys[:8]]), torch.cat([call.values, call.values[:8]]))
        tree = (call.tree_keys, call.tree_values)
        args = (call.query, pool, prefix, tree, call.spec, call.mask, torch.tensor(call.positions))
        assert_close(case, bounded_attention(*args, "triton"))
        assert len(prefix.memo) == plans and prefix.bound == 48


def test_other_backends_are_named() -> None:
    with pytest.raises(ValueError, match="expected one of reference, triton"):
        attend(make(Case()), 300, "flash")
    if find_spec("triton") is not None and not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"float64"):
            attend(make(Case(dtype=torch.float64)), 300, "triton")
