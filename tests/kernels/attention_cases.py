"""Tree-attention calls for tests of every backend: cases, a row-by-row float64 oracle, and what error is allowed."""

import random
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from longgraft.kernels.spec import AttentionSpec, Run, TreeInput
from longgraft.kernels.tree_attention import tree_attention

CHUNK = 256


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

    @property
    def inputs(self) -> TreeInput:
        tree = (self.tree_keys, self.tree_values)
        return TreeInput(self.query, self.runs, tree, self.spec, self.mask, self.positions)

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


def assert_close(case: Case, got: Tensor) -> None:
    """Assert that `got [T, Hq, Dv]` answers the case as exactly as torch's own attention would."""
    true, allowed = expected(case)
    assert (got.dtype, got.shape) == (case.dtype, true.shape)
    assert (got.double() - true).abs().max() <= allowed


def check(case: Case, backend: str) -> None:
    """Compare a backend with the oracle; where the tree is a chain, also without a mask."""
    call = make(case)
    assert_close(case, call.attend(backend))
    if case.tree == "chain":
        assert_close(case, call.attend(backend, mask=None))
