"""Plugs our attention into transformers: one registered function, no modelling code, no mask builder.

Under a name that has no mask function transformers passes `attention_mask=None`, and an unknown keyword of
`forward` reaches the attention function untouched; that keyword carries the flat batch. K/V of the new rows
are written into the chunk pool here, so the model never sees a cache object, and its argument's name (which
changed between releases) does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from longgraft.config import GraftError
from longgraft.kernels.tree_attention import AttentionSpec, tree_attention

NAME = "longgraft"
_LOAN = "_longgraft_loan"
# What models pass besides the arguments we use, and that changes nothing for us: positions are taken from the
# flat batch, and there is no dropout outside training.
HARMLESS = {"position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}
_KNOWN = HARMLESS | {"dropout", "sliding_window", "softcap", "s_aux"}


class RowCache(Protocol):
    """What attention needs of a sequence's cache; `longgraft.cache.SequenceCache` is the real one."""

    def write(self, layer: int, keys: Tensor, values: Tensor, behind: int = 0) -> None:
        """Store K/V of the reserved rows of one layer, from reserved row `behind` on."""

    def runs(self, layer: int, reserved: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return the prefix as runs of rows, and so many reserved rows after it."""


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence in a flat batch: rows [begin, end), their positions [rows], mask or None.

    `earlier`: rows that an earlier forward left reserved and that these may see; mask and positions then cover
    them too, before the new rows. `memo`: what a backend works out once for all layers of this forward.
    """

    cache: RowCache
    begin: int
    end: int
    positions: Tensor
    mask: Tensor | None
    earlier: int = 0
    memo: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def attend(self, layer: int, rows: tuple[Tensor, ...], spec: AttentionSpec, backend: str) -> Tensor:
        """Store K/V of the new rows and attend them: queries, keys and values -> [rows, Hq, Dv]."""
        q, k, v = rows
        self.cache.write(layer, k, v, self.earlier)
        prefix = self.cache.runs(layer)
        if self.earlier:
            q, k, v = _behind_earlier(self, layer, q)
        seen = tree_attention(q, prefix, k, v, spec, self.mask, self.positions, backend, self.memo)
        return seen[self.earlier :] if self.earlier else seen


class AnyPart(Protocol):
    """The rows of one sequence in a flat batch, however they are stored: rows [begin, end)."""

    @property
    def begin(self) -> int:
        """First row."""

    @property
    def end(self) -> int:
        """First row behind."""

    def attend(self, layer: int, rows: tuple[Tensor, ...], spec: AttentionSpec, backend: str) -> Tensor:
        """Store K/V of the new rows and attend them: queries, keys and values -> [rows, Hq, Dv]."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """All parts of one forward; rows of no part (padding) attend to themselves alone."""

    parts: Sequence[AnyPart]
    backend: str


class _Loan:
    """A model that runs with our attention: what it had before, and how many contexts hold it."""

    def __init__(self, model: Any) -> None:
        self.before = model.config.get_text_config()._attn_implementation
        self.experts = getattr(model.config.get_text_config(), "_experts_implementation", None)
        # transformers' grouped experts take no float64; float64 is what our own tests run in.
        self.eager_experts = model.dtype == torch.float64 and self.experts not in (None, "eager")
        self.holders = 0

    def begin(self, model: Any) -> None:
        """Set our attention, made known to transformers if it was not."""
        register()
        model.set_attn_implementation(NAME)
        if model.config.get_text_config()._attn_implementation != NAME:
            raise GraftError(
                f"{type(model).__name__}: expected a model whose attention can be exchanged "
                "(transformers' AttentionInterface); this class does not support it"
            )
        if self.eager_experts:
            model.set_experts_implementation("eager")

    def end(self, model: Any) -> None:
        """Give the model its own attention back."""
        model.set_attn_implementation(self.before)
        if self.eager_experts:
            model.set_experts_implementation(self.experts)


@contextmanager
def borrowed(model: Any) -> Iterator[None]:
    """Run the model with our attention; the last context on it to close gives its own back, however it closes.

    Contexts may overlap: two streams on one model are open at once and end in any order.
    """
    loan: _Loan = model.__dict__.get(_LOAN) or _Loan(model)
    model.__dict__[_LOAN] = loan
    loan.holders += 1
    try:
        if loan.holders == 1:
            loan.begin(model)
        yield
    finally:
        loan.holders -= 1
        if loan.holders == 0:
            del model.__dict__[_LOAN]
            loan.end(model)


@contextmanager
def returned(model: Any) -> Iterator[None]:
    """Run the model with its own attention for a moment, borrowed or not."""
    loan: _Loan | None = model.__dict__.get(_LOAN)
    own = loan or _Loan(model)
    if loan is not None:
        loan.end(model)
    try:
        if own.eager_experts:
            model.set_experts_implementation("eager")
        yield
    finally:
        if own.eager_experts:
            model.set_experts_implementation(own.experts)
        if loan is not None:
            loan.begin(model)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    longgraft_batch: FlatBatch | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend all rows of a flat batch; the signature transformers calls.

    `query [1, Hq, R, D]`, `key [1, Hk, R, D]`, `value [1, Hk, R, Dv]` hold the new rows only. Returns
    `[1, R, Hq, Dv]`. Any option that is not None and not understood is refused by name.
    """
    batch = _understood(module, attention_mask, longgraft_batch, options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks, softcap = options.get("s_aux"), options.get("softcap")
    spec = AttentionSpec(scale, options.get("sliding_window"), softcap, sinks)
    rows = tuple(x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if len(batch.parts) == 1 and batch.parts[0].end - batch.parts[0].begin == query.shape[2]:
        return batch.parts[0].attend(module.layer_idx, rows, spec, batch.backend).unsqueeze(0), None
    # A padding row would see only itself: its output is its own value. It is dropped later anyway.
    out = rows[2].repeat_interleave(rows[0].shape[1] // rows[1].shape[1], dim=1)
    for part in batch.parts:
        own = tuple(x[part.begin : part.end] for x in rows)
        out[part.begin : part.end] = part.attend(module.layer_idx, own, spec, batch.backend)
    return out.unsqueeze(0), None


def _behind_earlier(part: Part, layer: int, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of the earlier rows of a round and the new ones together.

    Attention is square, rows x rows, so the earlier rows ask again; what they get is dropped. Only drafters' passes
    have any, and there attention is a small part of the work.
    """
    rows = part.earlier + len(query)
    keys, values = _last_rows(part.cache.runs(layer, rows), rows)
    return torch.cat([query[:1].expand(part.earlier, -1, -1), query]), keys, values


def _last_rows(runs: list[tuple[Tensor, Tensor]], rows: int) -> tuple[Tensor, Tensor]:
    """Return the last `rows` rows of keys and values, which may lie in several runs."""
    taken: list[tuple[Tensor, Tensor]] = []
    while rows > 0:
        keys, values = runs.pop()
        taken.insert(0, (keys[-rows:], values[-rows:]))
        rows -= len(keys)
    return torch.cat([keys for keys, _ in taken]), torch.cat([values for _, values in taken])


def _understood(
    module: Any, attention_mask: Tensor | None, batch: FlatBatch | None, options: dict[str, Any]
) -> FlatBatch:
    name = type(module).__name__
    if batch is None:
        raise GraftError(f"{name}: the flat batch did not reach the attention function; this model is not supported")
    if attention_mask is not None:
        raise GraftError(f"{name}: the model built an attention mask of its own; this model is not supported")
    unknown = [key for key, option in options.items() if option is not None and key not in _KNOWN]
    if unknown:
        raise GraftError(f"{name}: attention option {', '.join(sorted(unknown))} is not supported")
    if options.get("dropout"):
        raise GraftError(f"{name}: attention dropout is on; call model.eval() first")
    return batch


def register() -> None:
    """Make our attention known to transformers under `NAME`; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
