"""Partial results of attention, by whoever computed them: how they merge, and plain matrix products to make one.

Knows tensors only, on any device. The one idea: out = sum_i w_i out_i / sum_i w_i with w_i = exp(lse_i - max_j
lse_j) over disjoint sets of keys, in fp32 (float64 for float64). A part that saw nothing for a row says -inf, and
the natural logarithm is meant everywhere.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longgraft.kernels.spec import AttentionSpec, Run

Part = tuple[Tensor, Tensor]
"""One partial result: out [Hq, T, Dv], normalised over its own keys, and lse [Hq, T], -inf if it saw none."""


def merge(parts: Sequence[Part], sinks: Tensor | None = None) -> Part:
    """Merge partial results over disjoint keys, in the dtype of their lse; `sinks [Hq]` join the sum once."""
    if len(parts) == 1 and sinks is None:
        return parts[0]
    each = torch.stack([lse for _, lse in parts])
    top = each.amax(dim=0).clamp_min(torch.finfo(each.dtype).min)
    weights = torch.exp(each - top)
    mass = weights.sum(dim=0)
    if sinks is not None:
        mass += torch.exp(sinks.to(mass.dtype)[:, None] - top)
    # A row that saw any key has mass >= 1 (its largest weight is 1): the clamp touches empty rows only.
    weights = (weights / mass.clamp_min(1.0)).unsqueeze(-1)
    merged = parts[0][0] * weights[0]
    for (out, _), weight in zip(parts[1:], weights[1:]):
        merged.addcmul_(out.to(merged.dtype), weight)
    return merged, top + mass.log()


def grouped(query: Tensor, kv_heads: int) -> Tensor:
    """[T, Hq, D] as contiguous [Hk, G, T, D]: no copy where the heads already come first in memory."""
    rows, heads, size = query.shape
    return query.transpose(0, 1).reshape(kv_heads, heads // kv_heads, rows, size).contiguous()


def rows_between(prefix: Sequence[Run], first: int, last: int) -> Iterator[tuple[int, Run]]:
    """Cut positions first .. last-1 out of the runs; yield (position, run), never an empty one."""
    start = 0
    for keys, values in prefix:
        rows = keys.shape[0]
        low, high = max(first - start, 0), min(last - start, rows)
        if low < high:
            yield start + low, (keys[low:high], values[low:high])
        start += rows


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is True, -inf elsewhere: what torch's kernel takes, and quicker to apply than a bool."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def matmul(query: Tensor, run: Run, spec: AttentionSpec, mask: Tensor | None) -> Iterator[Part]:
    """Yield one part per block of keys by plain matrix products in fp32 (float64 for float64).

    `query` grouped, [Hk, G, T, D]; `mask [T, n]`, True = visible, or None = every row sees every key.
    """
    kv_heads, group, rows, _ = query.shape
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    folded = query.flatten(1, 2).to(exact) * spec.scale
    block = max(256, min(4096, 2**21 // (kv_heads * group * rows)))
    for start in range(0, run[0].shape[0], block):
        keys, values = (x[start : start + block].to(exact).transpose(0, 1) for x in run)
        logits = torch.bmm(folded, keys.transpose(1, 2))
        if spec.softcap is not None:
            logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if mask is not None:
            logits.unflatten(1, (group, rows)).add_(additive(mask[:, start : start + block], exact))
        # The largest weight is exp(top - lse): so torch's softmax, quicker than its steps one by one, will do.
        top, weights = logits.amax(dim=-1), torch.softmax(logits, dim=-1)
        out, lse = torch.bmm(weights, values), top - weights.amax(dim=-1).log()
        if mask is not None:
            empty = top == float("-inf")
            out.masked_fill_(empty.unsqueeze(-1), 0.0)
            lse.masked_fill_(empty, float("-inf"))
        yield out.reshape(kv_heads * group, rows, -1), lse.reshape(kv_heads * group, rows)
