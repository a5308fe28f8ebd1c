"""The flash-attention libraries behind one signature: rows over full pages of cached keys in, partial results out.

Knows tensors and the three libraries' conventions: flash-attn 2's `flash_attn_with_kvcache`, torch's own
`varlen_attn` where its signature has block tables, flash-attn 4's `flash_attn_varlen_func`. The one idea: only full
pages are given to them. So no library ever sees a row that was not written (one of them multiplies such rows by 0,
and 0 * NaN is NaN), an empty set of keys (whose log-sum-exp is +inf here, -inf or 0 there) or a page out of memory.

Traps met here. lse is [1, heads, rows], or [heads, rows], or, by one documentation, [rows, heads]; natural
everywhere. flash-attn 4 has no split-KV on Hopper: lanes of pages are rows of a batch, merged by whoever calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from longgraft.kernels.parts import Part
from longgraft.kernels.spec import AttentionSpec

PAGE = 256
"""Rows of a page: flash-attn 2 takes multiples of 256 alone."""
# Lanes that fill a Hopper GPU (132 multiprocessors) with 8 key heads twice over; of fewer pages, fewer.
_MOST_LANES = 32


@dataclass(frozen=True, slots=True)
class Pages:
    """Full pages of a cache: keys [N, 256, Hk, D], values alike; `table [1, pages]` int32: which, in what order."""

    keys: Tensor
    values: Tensor
    table: Tensor


@dataclass(frozen=True, slots=True)
class Provider:
    """One library's call: query [rows, Hk, D] over the pages, every row all keys -> parts [Hk, rows, ..]."""

    name: str
    call: Callable[[Tensor, Pages, AttentionSpec], list[Part]]
    softcap: bool


@cache
def provider(capability: tuple[int, int]) -> Provider | str:
    """Return the first library that serves this compute capability, or why each of them does not."""
    reasons = []
    for find in (_flash_attn_2, _flash_attn_4, _torch_varlen):
        found = find(capability)
        if isinstance(found, Provider):
            return found
        reasons.append(found)
    return "; ".join(reasons)


def _flash_attn_2(capability: tuple[int, int]) -> Provider | str:
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        return f"flash-attn 2 cannot be imported ({error})"

    def call(query: Tensor, pages: Pages, spec: AttentionSpec) -> list[Part]:
        out, lse = flash_attn_with_kvcache(
            query[None],
            pages.keys,
            pages.values,
            cache_seqlens=_lengths(pages.table),
            block_table=pages.table,
            softmax_scale=spec.scale,
            causal=False,
            softcap=spec.softcap or 0.0,
            return_softmax_lse=True,
        )
        return [(out[0].transpose(0, 1), _natural(lse[0], query))]

    missing = {"block_table", "softcap", "return_softmax_lse"} - set(
        inspect.signature(flash_attn_with_kvcache).parameters
    )
    if missing:
        return f"this flash-attn's flash_attn_with_kvcache lacks {', '.join(sorted(missing))}: expected 2.6 or later"
    return Provider("flash-attn 2", call, softcap=True)


def _flash_attn_4(capability: tuple[int, int]) -> Provider | str:
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        return "flash-attn 4 is not installed"
    if not found.startswith("4."):
        return f"flash-attn-4 is {found}: expected 4"
    if capability[0] not in (9, 10):
        return f"flash-attn 4 has paged keys on compute capabilities 9 and 10, this is {capability[0]}.{capability[1]}"
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        return f"flash-attn 4 cannot be imported ({error})"

    def call(query: Tensor, pages: Pages, spec: AttentionSpec) -> list[Part]:
        rows, heads, _ = query.shape
        table = _lanes(pages.table)
        lanes = len(table)
        out, lse = flash_attn_varlen_func(
            query.repeat(lanes, 1, 1),
            pages.keys,
            pages.values,
            cu_seqlens_q=torch.arange(0, lanes * rows + 1, rows, dtype=torch.int32, device=query.device),
            seqused_k=_lengths(table),
            page_table=table.clamp_min(0),
            softmax_scale=spec.scale,
            causal=False,
            softcap=spec.softcap or 0.0,
            return_lse=True,
        )
        outs, lses = out.unflatten(0, (lanes, rows)), lse.view(heads, lanes, rows)
        return [(outs[i].transpose(0, 1), _natural(lses[:, i], query)) for i in range(lanes)]

    return Provider("flash-attn 4", call, softcap=True)


def _torch_varlen(capability: tuple[int, int]) -> Provider | str:
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return "this torch has no torch.nn.attention.varlen"
    missing = {"block_table", "seqused_k", "return_aux", "scale"} - set(inspect.signature(varlen_attn).parameters)
    if missing:
        return f"this torch's varlen_attn lacks {', '.join(sorted(missing))}"

    def call(query: Tensor, pages: Pages, spec: AttentionSpec) -> list[Part]:
        rows, keys = len(query), pages.table.shape[1] * PAGE
        out, lse = varlen_attn(
            query,
            pages.keys,
            pages.values,
            torch.tensor([0, rows], dtype=torch.int32, device=query.device),
            None,
            rows,
            keys,
            return_aux=AuxRequest(lse=True),
            scale=spec.scale,
            seqused_k=_lengths(pages.table),
            block_table=pages.table,
        )
        return [(out.transpose(0, 1), _natural(lse, query))]

    return Provider("torch's varlen_attn", call, softcap=False)


def _lengths(table: Tensor) -> Tensor:
    """Keys of each row of a table of full pages, int32; entries of -1 are no pages."""
    return (table >= 0).sum(dim=1, dtype=torch.int32) * PAGE


def _lanes(table: Tensor) -> Tensor:
    """Return the pages [1, n] as lanes [S, m] of equal length but for the last, filled with -1; none is empty."""
    pages = table.shape[1]
    each = -(-pages // min(_MOST_LANES, pages))
    lanes = -(-pages // each)
    return torch.nn.functional.pad(table[0], (0, lanes * each - pages), value=-1).view(lanes, each)


def _natural(lse: Tensor, query: Tensor) -> Tensor:
    """Return lse as [heads, rows] in fp32, -inf where a library says +inf: that no key was seen.

    Where rows and heads are equal in number, [heads, rows] is what the libraries' sources return.
    """
    rows, heads, _ = query.shape
    if lse.shape != (heads, rows):
        lse = lse.transpose(0, 1)
    return lse.float().masked_fill(lse == float("inf"), float("-inf"))
