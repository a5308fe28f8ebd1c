"""Dense tree attention in plain torch: the oracle of every backend, and the fallback where they do not reach.

Knows nothing of caches or devices. One softmax over [prefix keys, tree keys], in fp32 (float64 for float64
inputs). It copies the prefix and holds T x (P + T) logits per head, so its memory grows with the context.
"""

import torch
from torch import Tensor

from longgraft.kernels.spec import TreeInput


def why_not(inputs: TreeInput) -> str:
    """Return why this backend cannot take the call, or an empty string."""
    return "" if inputs.query.is_floating_point() else f"dtype {inputs.query.dtype} is not floating point"


def attend(inputs: TreeInput) -> Tensor:
    """Return attention [T, Hq, Dv] in the query's dtype; rows that see no key give 0."""
    spec, query = inputs.spec, inputs.query
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    runs = [*inputs.prefix] if inputs.tree is None else [*inputs.prefix, inputs.tree]
    group = query.shape[1] // inputs.kv_heads
    keys, values = (torch.cat(x).to(exact).repeat_interleave(group, dim=1) for x in zip(*runs))
    logits = torch.einsum("thd,nhd->htn", query.to(exact), keys) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~visible(inputs), float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.to(exact)[:, None, None].expand(-1, logits.shape[1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[0]]
    # Without a sink the softmax over nothing is 0 / 0.
    weights = weights.masked_fill((logits == float("-inf")).all(dim=-1, keepdim=True), 0.0)
    return torch.einsum("htn,nhd->thd", weights, values).to(query.dtype)


def visible(inputs: TreeInput) -> Tensor:
    """Which of the P prefix keys and T tree keys each row sees: bool [T, P + T], without a tree [1, P]."""
    rows, device = inputs.query.shape[0], inputs.query.device
    visible = torch.ones(rows, inputs.prefix_len, dtype=torch.bool, device=device)
    own = torch.as_tensor(inputs.positions, device=device)
    keys_at = torch.arange(inputs.prefix_len, device=device)
    if inputs.tree is not None:
        mask = inputs.mask
        if mask is None:
            mask = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        visible, keys_at = torch.cat([visible, mask], dim=1), torch.cat([keys_at, own])
    if inputs.spec.window is not None:
        visible = visible & (keys_at > own[:, None] - inputs.spec.window)
    return visible
