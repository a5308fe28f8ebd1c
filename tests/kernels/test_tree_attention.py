"""Every backend against a row-by-row float64 oracle; errors are held to twice those of torch's attention."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longgraft.kernels import native
from longgraft.kernels.tree_attention import BACKENDS, AttentionSpec, Run, tree_attention

CHUNK = 256
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = ("cpu", "reference")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """One call: a tree of `rows` nodes behind `prefix` cached rows, in runs as a pool would give them."""

    rows: int = 17
    prefix: int = 257
    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    value_dim: int | None = None
    tree: str = "bushy"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Call:
    """The tensors of a case; `parents` describe the tree, `keys` and `values` [P, ..] the prefix in order."""

    query: Tensor
    keys: Tensor
    values: Tensor
    runs: list[Run]
    tree_keys: Tensor
    tree_values: Tensor
    spec: AttentionSpec
    parents: list[int]

    @property
    def positions(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return [len(self.keys) + depth for depth in depths]

    @property
    def mask(self) -> Tensor:
        mask = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def attend(self, backend: str, mask: Tensor | str | None = "tree") -> Tensor:
        chosen = self.mask if isinstance(mask, str) else mask
        rows = (self.query, self.runs, self.tree_keys, self.tree_values)
        return tree_attention(*rows, self.spec, chosen, self.positions, backend)


def grow(kind: str, rows: int) -> list[int]:
    rng = random.Random(rows)
    ways = {"chain": lambda i: i - 1, "star": lambda i: 0, "bushy": lambda i: rng.randrange(max(0, i - 6), i)}
    return [-1] + [ways[kind](i) for i in range(1, rows)]


def in_pool(rows: Tensor, cuts: list[int], gap: int) -> list[Tensor]:
    """Put the rows into a pool of chunks, cut after `cuts` rows; return its views."""
    space = [(b - a + CHUNK - 1) // CHUNK * CHUNK + gap * CHUNK for a, b in zip([0, *cuts], [*cuts, len(rows)])]
    pool = torch.full((sum(space) + CHUNK, *rows.shape[1:]), float("nan"), dtype=rows.dtype)
    views, start = [], 0
    for a, b, size in zip([0, *cuts], [*cuts, len(rows)], space):
        views.append(pool[start : start + b - a])
        views[-1].copy_(rows[a:b])
        start += size
    return views


def make(case: Case) -> Call:
    rng = torch.Generator().manual_seed(case.rows * 7919 + case.prefix)
    hk, d, dv = case.kv_heads, case.dim, case.value_dim or case.dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(case.dtype)

    keys, values = randn(case.prefix, hk, d), randn(case.prefix, hk, dv)
    cuts = [c for c in (CHUNK, 3 * CHUNK) if c < case.prefix]
    runs = list(zip(in_pool(keys, cuts, gap=1), in_pool(values, cuts, gap=2))) if case.prefix else []
    # The model's own layout: heads first, seen as rows first.
    query = randn(hk * case.group, case.rows, d).transpose(0, 1)
    tree_keys, tree_values = randn(hk, case.rows, d).transpose(0, 1), randn(hk, case.rows, dv).transpose(0, 1)
    sinks = randn(hk * case.group) if case.sinks else None
    spec = AttentionSpec(d**-0.5, case.window, case.softcap, sinks)
    return Call(query, keys, values, runs, tree_keys, tree_values, spec, grow(case.tree, case.rows))


def oracle(call: Call) -> Tensor:
    """Row by row, each over exactly the keys it may see, in float64."""
    spec, positions, mask = call.spec, call.positions, call.mask
    group = call.query.shape[1] // call.tree_keys.shape[1]
    keys = torch.cat([call.keys, call.tree_keys]).double().repeat_interleave(group, dim=1)
    values = torch.cat([call.values, call.tree_values]).double().repeat_interleave(group, dim=1)
    keys_at = [*range(len(call.keys)), *positions]
    rows, heads, _ = call.query.shape
    out = torch.zeros(rows, heads, values.shape[-1], dtype=torch.float64)
    for row in range(rows):
        lineage = [True] * len(call.keys) + mask[row].tolist()
        oldest = -1 if spec.window is None else positions[row] - spec.window
        seen = [j for j, (at, own) in enumerate(zip(keys_at, lineage)) if own and at > oldest]
        logits = (keys[seen] * call.query[row].double()).sum(dim=-1) * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        mass = logits.exp().sum(dim=0) + (0 if spec.sinks is None else spec.sinks.double().exp())
        out[row] = (logits.exp()[..., None] * values[seen]).sum(dim=0) / mass[:, None]
    return out


def torch_attention(call: Call) -> Tensor:
    """What the model would compute without us: torch's SDPA, or eager attention for what SDPA lacks."""
    keys, values = torch.cat([call.keys, call.tree_keys]), torch.cat([call.values, call.tree_values])
    group = call.query.shape[1] // keys.shape[1]
    q = call.query.transpose(0, 1)[None]
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1)[None] for x in (keys, values))
    spec, keys_at = call.spec, torch.tensor([*range(len(call.keys)), *call.positions])
    seen = torch.cat([torch.ones(len(call.parents), len(call.keys), dtype=torch.bool), call.mask], dim=1)
    if spec.window is not None:
        seen &= keys_at > torch.tensor(call.positions)[:, None] - spec.window
    if spec.softcap is None and spec.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=spec.scale)[0].transpose(0, 1)
    logits = q @ k.transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    logits = logits.masked_fill(~seen, float("-inf"))
    if spec.sinks is not None:
        logits = torch.cat([logits, spec.sinks[None, :, None, None].expand(1, -1, len(seen), 1)], dim=-1)
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weights = torch.softmax(logits, dim=-1, dtype=exact).to(q.dtype)[..., : k.shape[2]]
    return (weights @ v)[0].transpose(0, 1)


@cache
def expected(case: Case) -> tuple[Tensor, Tensor]:
    """The true result, and how far off an answer may be: twice torch's own error and two roundings."""
    call = make(case)
    true = oracle(call)
    error = (torch_attention(call).double() - true).abs().max()
    return true, 2 * error + 2 * torch.finfo(case.dtype).eps * true.abs().max()


def check(case: Case, backend: str) -> None:
    call, (true, allowed) = make(case), expected(case)
    got = call.attend(backend)
    assert (got.dtype, got.shape) == (case.dtype, true.shape)
    assert (got.double() - true).abs().max() <= allowed
    if case.tree == "chain":
        assert (call.attend(backend, mask=None).double() - true).abs().max() <= allowed


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
