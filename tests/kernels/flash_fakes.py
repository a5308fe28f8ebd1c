"""Stand-ins for three flash-attention libraries: dense on the CPU, strict about what the real ones demand.

Each refuses shapes, layouts and dtypes that its original refuses, answers in its original's shapes, and says what
its original says of rows without keys. Rows of a page that no table names are poison: NaN if anybody reads them.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

calls: list[str] = []


def dense(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """[R, H, D] over [n, Hk, D] -> out [R, H, D], lse [H, R]."""
    group = query.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    logits = torch.einsum("rhd,nhd->hrn", query.float(), k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    out = torch.einsum("hrn,nhd->rhd", torch.softmax(logits, dim=-1), v).to(query.dtype)
    return out, torch.logsumexp(logits, dim=-1)


def _check(query: Tensor, keys: Tensor, values: Tensor) -> None:
    assert query.dtype == keys.dtype == values.dtype and query.dtype in (torch.bfloat16, torch.float16)
    assert all(x.stride(-1) == 1 for x in (query, keys, values)), "last dimension must be contiguous"
    assert keys.dim() == values.dim() == 4 and keys.shape == values.shape and keys.shape[-1] % 8 == 0
    assert query.shape[-1] == keys.shape[-1] <= 256 and query.shape[-2] % keys.shape[2] == 0


def _paged(pool: Tensor, table: Tensor, used: Tensor) -> Tensor:
    """The keys that one row of a table names."""
    assert table.dtype == used.dtype == torch.int32 and table.dim() == 1 and table.stride(-1) == 1
    size = pool.shape[1]
    assert 0 < int(used) <= len(table) * size, "the table is too short"
    assert int(table.min()) >= 0 and int(table.max()) < len(pool), "a page out of the pool"
    return pool[table[: -(-int(used) // size)].long()].flatten(0, 1)[: int(used)]


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """flash-attn 2: q [B, S, H, D], pages of a multiple of 256, lse [B, H, S], natural, +inf for no keys."""
    calls.append("flash-attn 2")
    _check(q, k_cache, v_cache)
    assert q.dim() == 4 and not causal and window_size == (-1, -1)
    assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert block_table.shape[0] == len(cache_seqlens) == len(q)
    results = []
    for row, table, used in zip(q, block_table, cache_seqlens):
        if int(used) == 0:
            results.append((torch.zeros_like(row), torch.full(row.shape[1::-1], float("inf"))))
            continue
        keys, values = (_paged(pool, table, used) for pool in (k_cache, v_cache))
        results.append(dense(row, keys, values, softmax_scale, softcap))
    out, lse = (torch.stack(x) for x in zip(*results))
    return (out, lse) if return_softmax_lse else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
    softcap=0.0, num_splits=1, return_lse=False,
):  # fmt: skip
    """flash-attn 4 on Hopper: no splits, no cu_seqlens_k beside pages; a last page is read whole: 0 * NaN is NaN."""
    calls.append("flash-attn 4")
    _check(q, k, v)
    assert q.dim() == 3 and q.is_contiguous() and num_splits == 1, "SplitKV not supported on SM 9.0"
    assert cu_seqlens_k is None and not causal and return_lse
    assert cu_seqlens_q.dtype == torch.int32 and page_table.shape[0] == len(seqused_k) == len(cu_seqlens_q) - 1
    outs, lses = [], []
    for i, (table, used) in enumerate(zip(page_table, seqused_k)):
        assert int(used) % k.shape[1] == 0, "rows past seqused_k in a last page are multiplied by 0"
        rows = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        out, lse = dense(rows, _paged(k, table, used), _paged(v, table, used), softmax_scale, softcap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


class AuxRequest(NamedTuple):
    lse: bool = False


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """torch's: pages need seqused_k, heads of query and keys are equal unless enable_gqa, lse [H, R]."""
    calls.append("torch's varlen_attn")
    _check(query, key, value)
    assert query.dim() == 3 and (enable_gqa or query.shape[1] == key.shape[2])
    assert cu_seq_q.tolist() == [0, len(query)] and max_q == len(query) and seqused_k is not None
    assert max_k == int(seqused_k[0]) and window_size == (-1, -1) and len(block_table) == 1
    keys, values = (_paged(pool, block_table[0], seqused_k[0]) for pool in (key, value))
    out, lse = dense(query, keys, values, scale, 0.0)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def module(name: str, **members: object) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made
