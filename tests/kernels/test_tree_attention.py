"""Every backend against a row-by-row float64 oracle; errors are held to twice those of torch's attention."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from longgraft.kernels import native
from longgraft.kernels.tree_attention import BACKENDS, AttentionSpec, tree_attention
from tests.kernels.attention_cases import Case, check, make, oracle

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = ("cpu", "reference")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 63, 255, 256, 257, 1541])
def test_sizes(backend: str, dtype: torch.dtype, prefix: int) -> None:
    for rows, tree in ((1, "chain"), (2, "chain"), (17, "bushy"), (64, "star"), (65, "chain")):
        if prefix < 1541 or rows in (1, 17, 65):
            check(Case(rows, prefix, kv_heads=1, group=2, tree=tree, dtype=dtype), backend)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_heads, group", [(3, 1), (2, 2), (1, 4), (2, 7)])
def test_heads(backend: str, dtype: torch.dtype, dim: int, kv_heads: int, group: int) -> None:
    check(Case(9, 300, kv_heads, group, dim, dtype=dtype), backend)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", ["chain", "bushy", "star"])
@pytest.mark.parametrize("window", [1, 3, 40, 200, 700, 5000])
def test_windows(backend: str, dtype: torch.dtype, tree: str, window: int) -> None:
    check(Case(13, 600, 1, 2, tree=tree, window=window, dtype=dtype), backend)
    check(Case(33, 20, 1, 2, tree=tree, window=window, dtype=dtype), backend)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("softcap, sinks", [(None, True), (1.5, False), (30.0, True)])
def test_sinks_and_softcap(
    backend: str, dtype: torch.dtype, window: int | None, softcap: float | None, sinks: bool
) -> None:
    case = Case(17, 600, 1, 3, window=window, softcap=softcap, sinks=sinks, dtype=dtype)
    check(case, backend)
    check(replace(case, rows=1, tree="chain"), backend)
    check(replace(case, prefix=0, tree="chain"), backend)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_values_of_another_size(backend: str, softcap: float | None) -> None:
    call = make(Case(9, 300, dim=64, value_dim=40, softcap=softcap, window=100))
    torch.testing.assert_close(call.attend(backend).double(), oracle(call), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", [8, 31, 32, 64])
def test_fp32_rows_around_the_matmul_rule(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six heads on one key: 48, 186, 192 and 384 folded rows, on both sides of the rule."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    check(Case(rows, 1541, 1, 6), "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 4, 300])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, window: int | None) -> None:
    call = make(Case(40, 900, 1, 4, window=window, dtype=dtype))
    whole = call.attend("cpu")
    for node in (0, 7, 39):
        path = [i for i, on_path in enumerate(call.mask[node].tolist()) if on_path]
        alone = replace(
            call,
            query=call.query[path],
            tree_keys=call.tree_keys[path],
            tree_values=call.tree_values[path],
            parents=list(range(-1, len(path) - 1)),
        )
        got = alone.attend("cpu", mask=None)[-1]
        atol = 4 * torch.finfo(dtype).eps * float(whole[node].abs().max())
        torch.testing.assert_close(got, whole[node], rtol=0, atol=atol)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("window", [None, 6, 100])
def test_a_chain_is_a_triangular_mask(backend: str, window: int | None) -> None:
    call = make(Case(50, 300, tree="chain", window=window, dtype=torch.float64))
    torch.testing.assert_close(call.attend(backend, mask=None), call.attend(backend), rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("window, sinks", [(None, False), (50, True)])
def test_own_key_may_lie_in_the_prefix(backend: str, window: int | None, sinks: bool) -> None:
    call = make(Case(1, 300, tree="chain", window=window, sinks=sinks, dtype=torch.float64))
    runs = [*call.runs, (call.tree_keys, call.tree_values)]
    got = tree_attention(call.query, runs, None, None, call.spec, None, call.positions, backend)
    torch.testing.assert_close(got, oracle(call), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_takes_native_where_it_pays(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(Case(dtype=dtype))
    backend = "native" if native.pays(call.query) else "cpu"
    assert torch.equal(call.attend("auto"), call.attend(backend))
    monkeypatch.setattr(native, "pays", lambda query: False)
    assert torch.equal(call.attend("auto"), call.attend("cpu"))


def test_float64_and_large_prompt_chunks_stay_with_cpu() -> None:
    assert not native.pays(torch.zeros(4, 2, 8, dtype=torch.float64))
    assert not native.pays(torch.zeros(native.DECODE_ROWS + 1, 2, 8, dtype=torch.bfloat16))


def test_positions_may_be_a_tensor() -> None:
    call = make(Case(window=20))
    args = (call.query, call.runs, call.tree_keys, call.tree_values, call.spec, call.mask)
    got = tree_attention(*args, torch.tensor(call.positions))
    assert torch.equal(got, call.attend("auto"))


def test_unknown_backend_names_the_choices() -> None:
    with pytest.raises(ValueError, match=rf"'fast' is unknown.*{', '.join(BACKENDS)}"):
        make(Case()).attend("fast")


def test_a_backend_says_why_it_cannot() -> None:
    query, key = torch.zeros(2, 4, 8, device="meta"), torch.zeros(2, 2, 8, device="meta")
    with pytest.raises(ValueError, match="cpu: tensors are on meta"):
        tree_attention(query, [], key, key, AttentionSpec(1.0), None, [0, 1], "cpu")
    ints = torch.zeros(2, 2, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cpu: dtype torch.int32.*reference: dtype torch.int32"):
        tree_attention(ints, [], ints, ints, AttentionSpec(1.0), None, [0, 1])


def test_keys_and_values_come_together() -> None:
    call = make(Case())
    with pytest.raises(ValueError, match="both or neither"):
        tree_attention(call.query, call.runs, call.tree_keys, None, call.spec, None, call.positions)
