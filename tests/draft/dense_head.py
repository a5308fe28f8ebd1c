"""The EAGLE-3 layer written out densely in float64, with nothing shared but the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from longgraft.draft.head import Eagle3Head
from longgraft.draft.weights import LoadedHead


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    """Turn plane i, which is coordinates i and i + D / 2, of row p by p * theta^(-2 i / D). [n, heads, D]"""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    planes = torch.complex(x[..., :half], x[..., half:])
    angles = (torch.arange(len(x), dtype=torch.float64)[:, None] * speeds)[:, None]
    turned = planes * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def combined(head: Eagle3Head, features: Tensor) -> Tensor:
    shape, w = head.shape, head.state_dict()
    features = features.double()
    if shape.norm_before_fc:
        features = rms(features, w["input_norm.weight"], shape.eps)
    if shape.fc_norm:
        parts = features.chunk(len(shape.layers), -1)
        features = torch.cat([rms(p, w[f"fc_norm.{i}.weight"], shape.eps) for i, p in enumerate(parts)], -1)
    return features @ w["fc.weight"].double().T


def outputs(head: Eagle3Head, embeds: Tensor, fed: Tensor) -> Tensor:
    """The layer's output at every row of a causal chain at positions 0, 1, ... [n, H]"""
    shape = head.shape
    w = {key.removeprefix("midlayer."): value.double() for key, value in head.state_dict().items()}
    normed = rms(fed, w["hidden_norm.weight"], shape.eps)
    joined = torch.cat([rms(embeds.double(), w["input_layernorm.weight"], shape.eps), normed], -1)
    theta = float(shape.rope["rope_theta"])

    def heads(name: str, count: int) -> Tensor:
        x = joined @ w[f"self_attn.{name}_proj.weight"].T
        if shape.attention_bias:
            x = x + w[f"self_attn.{name}_proj.bias"]
        x = x.view(len(x), count, shape.head_dim)
        if shape.qk_norm and name != "v":
            x = rms(x, w[f"self_attn.{name}_norm.weight"], shape.eps)
        return x if name == "v" else rotated(x, theta)

    q, k, v = heads("q", shape.heads), heads("k", shape.kv_heads), heads("v", shape.kv_heads)
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    parts = []
    for h in range(shape.heads):
        g = h * shape.kv_heads // shape.heads
        weights = (q[:, h] @ k[:, g].T / math.sqrt(shape.head_dim)).masked_fill(future, -math.inf).softmax(-1)
        parts.append(weights @ v[:, g])
    attended = torch.cat(parts, -1) @ w["self_attn.o_proj.weight"].T
    if shape.attention_bias:
        attended = attended + w["self_attn.o_proj.bias"]
    hidden = attended + (normed if shape.norm_before_residual else fed)
    x = rms(hidden, w["post_attention_layernorm.weight"], shape.eps)
    gate = torch.nn.functional.silu(x @ w["mlp.gate_proj.weight"].T)
    return hidden + (gate * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def says(loaded: LoadedHead, token_ids: list[int], features: Tensor, path: list[int], start: int = 0) -> Tensor:
    """Log-probabilities over the draft vocabulary after a text and drafted tokens `path`; rows begin at `start`.

    `features [n - 1, F]`: the target's states of all tokens but the last.
    """
    head, embed = loaded.head, loaded.embed.double()
    tokens = token_ids[start + 1 :]
    fed = combined(head, features[start:])
    norm = head.state_dict()["norm.weight"].double()
    for token in [*path, None]:
        last: Any = outputs(head, embed[tokens], fed)[-1:]
        if token is None:
            break
        tokens = [*tokens, token]
        fed = torch.cat([fed, rms(last, norm, head.shape.eps) if head.shape.norm_output else last])
    logits = rms(last, norm, head.shape.eps) @ head.state_dict()["lm_head.weight"].double().T
    return torch.log_softmax(logits[0], -1)
