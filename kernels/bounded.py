"""Tree attention behind a prefix whose length lies on the device: shapes depend on a bound, never on the length.

Knows tensors only. The one idea: a round that the host does not wait for cannot know how long its prefix is, only
that it is not longer than so many rows; where they lie is a table, how many of them count is a number beside it, and
rows behind that number are masked. `triton` reads them in place and skips nothing but their contents; `reference`
gathers them all, which costs a copy of the bound each layer: it is the oracle, and what runs without Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from math import gcd
from typing import Any

import torch
from torch import Tensor

from longgraft.kernels.parts import grouped, matmul, merge
from longgraft.kernels.spec import AttentionSpec, Run, TreeInput

BACKENDS = ("reference", "triton")


@dataclass(frozen=True, slots=True)
class BoundedPrefix:
    """Where the cached rows of one sequence lie: row i in row `rows[i]` of the pool, of which `length [1]` count.

    `rows [C]` int64, C the bound; `run_rows`: so many rows of the sequence, from each multiple of it on, are
    neighbours. A pool row that a row number names must have been written once, whatever its number (row 0 stands in
    for those that do not count). `memo`: what is worked out once for all layers of a forward.
    """

    rows: Tensor
    length: Tensor
    run_rows: int = 1
    memo: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def bound(self) -> int:
        """C, the most rows there can be."""
        return len(self.rows)


def bounded_attention(
    query: Tensor,
    pool: Run,
    prefix: BoundedPrefix,
    tree: Run,
    spec: AttentionSpec,
    mask: Tensor,
    positions: Tensor,
    backend: str = "reference",
) -> Tensor:
    """Attend from `query [T, Hq, D]` to the prefix and to the rows' own tree; return [T, Hq, Dv].

    As `tree_attention`, but `pool` (K [R, Hk, D], V [R, Hk, Dv]) holds the rows that `prefix` names; `mask [T, T]` and
    `positions [T]` lie on the device. Nothing waits for it. ValueError for a backend that cannot take this.
    """
    inputs = TreeInput(query, [pool], tree, spec, mask, positions)
    if backend == "triton":
        return _in_place(inputs, prefix)
    if backend != "reference":
        raise ValueError(f"bounded attention on {backend!r}: expected one of {', '.join(BACKENDS)}")
    return _gathered(inputs, prefix)


def _gathered(inputs: TreeInput, prefix: BoundedPrefix) -> Tensor:
    query, spec, mask = inputs.query, inputs.spec, inputs.mask
    assert inputs.tree is not None and mask is not None
    at = torch.arange(prefix.bound, device=query.device)
    counts = at < prefix.length
    own = torch.as_tensor(inputs.positions)
    seen = counts.expand(len(query), -1)
    if spec.window is not None:
        oldest = own[:, None] - spec.window
        seen, mask = seen & (at > oldest), mask & (own > oldest)
    rows = torch.where(counts, prefix.rows, prefix.rows[:1])
    cached = tuple(x.index_select(0, rows) for x in inputs.prefix[0])
    folded = grouped(query, inputs.kv_heads)
    parts = [part for run, sees in ((cached, seen), (inputs.tree, mask)) for part in matmul(folded, run, spec, sees)]  # type: ignore[arg-type]
    return merge(parts, spec.sinks)[0].transpose(0, 1).to(query.dtype)


def _in_place(inputs: TreeInput, prefix: BoundedPrefix) -> Tensor:
    triton: Any = import_module("longgraft.kernels.triton")
    plans: Any = import_module("longgraft.kernels.triton_plan")
    if reason := triton.why_not(inputs):
        raise ValueError(f"bounded attention on 'triton': {reason}")
    keys, values = inputs.prefix[0]
    kind = ("bounded", inputs.spec.window, keys.stride(), values.stride(), plans.block_keys(inputs))
    plan = prefix.memo.get(kind)
    if plan is None:
        step = gcd(prefix.run_rows, plans.PIECE_KEYS)
        plan = prefix.memo[kind] = plans.bounded_plan(inputs, prefix.rows, prefix.length, step)
    return triton.attend_planned(inputs, plan)
