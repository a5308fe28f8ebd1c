"""What one tree-attention call is about: the layer's constants and the tensors, checked once.

Knows torch only: no model, no cache, no tree. Every backend takes a `TreeInput` and nothing else, so a new
one is a module with `why_not` and `attend`.

Shapes: T rows (tree nodes or prompt rows), P prefix keys, Hq query heads, Hk key heads, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Run = tuple[Tensor, Tensor]
"""Neighbouring cached rows: keys [n, Hk, D] and values [n, Hk, Dv]."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The constants of one attention layer.

    `scale` multiplies query . key. `window`: a row at position p sees positions above p - window (None: all).
    `softcap` c: logits become c * tanh(logit / c) before masking. `sinks [Hq]`: one extra logit per head that
    enters the softmax denominator once and carries no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: expected 1 or more, or None")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}: expected above 0, or None")


@dataclass(frozen=True, slots=True)
class TreeInput:
    """The rows of one sequence in one layer, and the keys they may see.

    `query [T, Hq, D]`; `prefix`: runs that cover positions 0 .. P-1 in order; `tree [T]`: the rows' own keys
    and values, or None for a single row whose own key is the prefix's last; `mask [T, T]` bool, True = row
    sees that tree key, or None for a causal chain; `positions [T]`. `memo`: where a backend may keep what it worked
    out for other layers of the same forward, None = nowhere. Raises ValueError where these do not fit.
    """

    query: Tensor
    prefix: Sequence[Run]
    tree: Run | None
    spec: AttentionSpec
    mask: Tensor | None
    positions: Tensor | Sequence[int]
    memo: dict[object, Any] | None = None

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise ValueError(fault)

    def _fault(self) -> str:
        """What does not fit, or an empty string. Runs once per layer and forward: words on failure only."""
        query, mask, sinks = self.query, self.mask, self.spec.sinks
        if query.dim() != 3 or query.shape[0] == 0:
            return f"query is {list(query.shape)}: expected [rows, heads, head size] with at least one row"
        rows, heads, _ = query.shape
        if self.tree is None and (rows != 1 or self.prefix_len == 0):
            return f"{rows} rows without tree keys: expected one row, and its key at the end of the prefix"
        if self.tree is not None and self.tree[0].shape[0] != rows:
            return f"{self.tree[0].shape[0]} tree keys for {rows} rows: expected one each"
        shape = (self.tree or self.prefix[0])[1].shape[1:]
        for run in self._runs():
            if not self._fits(*run, shape):
                return self._misfit(*run)
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != (rows, rows)):
            return f"mask is {mask.dtype} {list(mask.shape)}: expected bool [{rows}, {rows}]"
        if len(self.positions) != rows:
            return f"{len(self.positions)} positions for {rows} rows: expected one each"
        if sinks is not None and tuple(sinks.shape) != (heads,):
            return f"sinks are {list(sinks.shape)}: expected [{heads}], one per query head"
        return ""

    def _runs(self) -> list[Run]:
        return [*self.prefix] if self.tree is None else [*self.prefix, self.tree]

    def _fits(self, keys: Tensor, values: Tensor, shape: torch.Size) -> bool:
        _, heads, size = self.query.shape
        return (
            keys.dtype is values.dtype is self.query.dtype
            and keys.shape[1:] == (shape[0], size)
            and values.shape[1:] == shape
            and keys.shape[0] == values.shape[0]
            and heads % shape[0] == 0
        )

    def _misfit(self, keys: Tensor, values: Tensor) -> str:
        return (
            f"keys {keys.dtype} {list(keys.shape)} and values {values.dtype} {list(values.shape)} do not fit "
            f"the query {self.query.dtype} {list(self.query.shape)}: expected one dtype, [n, key heads, "
            f"size], key heads that divide {self.query.shape[1]}, and one shape of value rows in every run"
        )

    @property
    def prefix_len(self) -> int:
        """P, the number of prefix keys."""
        return sum(keys.shape[0] for keys, _ in self.prefix)

    @property
    def kv_heads(self) -> int:
        """Hk, the number of key heads."""
        return (self.tree or self.prefix[0])[0].shape[1]

    @property
    def value_dim(self) -> int:
        """Dv, the size of a value row of one head."""
        return (self.tree or self.prefix[0])[1].shape[2]

    def position_list(self) -> list[int]:
        """Return the rows' positions as plain integers (on a device: one synchronisation)."""
        return self.positions.tolist() if isinstance(self.positions, Tensor) else list(self.positions)
