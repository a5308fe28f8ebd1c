"""The EAGLE-3 head: one transformer layer that guesses, from the target's own hidden states, what it will say next.

Knows tensors only: no tree, no sequence, no checkpoint file. The one idea (EAGLE-3, arXiv 2503.01840): row i joins the
embedding of token i + 1 with what the target thought at token i, and predicts token i + 2; further on, where the
target has not been yet, the layer's own output stands in for the target's thoughts.

Rows are flat, `[n, ...]`, and a row's keys and values are handed in and out, so that training, drafting and a
dense reference all go through the same few steps: `combine`, `project`, `attend`, `finish`, `feedback`, `logits`.
Parameter names are those of the published checkpoints (SafeAILab/EAGLE).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes and options of a head, whatever its checkpoint calls them.

    `layers`: target layers, counted from 0, whose outputs are read. `max_positions`: positions it was trained for.
    `rope`: transformers' `rope_parameters`. `draft_vocab` entries of the target's `vocab` can be drafted.
    `norm_before_residual`: the residual is the normalised feature. `norm_before_fc`: one norm over all features;
    `fc_norm`: one for each layer's. `norm_output`: the next step is fed the normalised output.
    """

    hidden: int
    target_hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    layers: tuple[int, ...]
    max_positions: int
    eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e4})
    activation: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows on their way through the layer: `query [n, Hq, D]`, `key` and `value [n, Hk, D]`, `residual [n, H]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


class _Attention(nn.Module):
    """The projections; attention itself is `attend`."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width, kv_width, bias = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.attention_bias
        self.q_proj = nn.Linear(2 * shape.hidden, width, bias=bias)
        self.k_proj = nn.Linear(2 * shape.hidden, kv_width, bias=bias)
        self.v_proj = nn.Linear(2 * shape.hidden, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, shape.hidden, bias=bias)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else nn.Identity()


class _Mlp(nn.Module):
    """SwiGLU, or whatever activation the config names."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)
        self.activation = ACT2FN[shape.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class _Layer(nn.Module):
    """The decoder layer's parameters under their published names."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)


class Eagle3Head(nn.Module):
    """The layer, what comes before it (`fc`) and after it (`norm`, `lm_head`)."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        read = len(shape.layers) * shape.target_hidden
        self.fc = nn.Linear(read, shape.hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(read, shape.eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(shape.target_hidden, shape.eps) for _ in shape.layers)
        with torch.device("cpu"):  # its buffers are computed, not loaded, so they are real even where weights are not
            self.rotary = _rotary(shape)

    def combine(self, features: Tensor) -> Tensor:
        """Turn the target's hidden states `[n, layers * target_hidden]` into the layer's feature input. [n, H]"""
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.fc_norm:
            parts = features.split(self.shape.target_hidden, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        combined: Tensor = self.fc(features)
        return combined

    def project(self, embeds: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Norm, join and project rows: `embeds` and `features [n, H]`, `positions [n]`."""
        layer, shape = self.midlayer, self.shape
        normed = layer.hidden_norm(features)
        joined = torch.cat([layer.input_layernorm(embeds), normed], dim=-1)
        own = layer.self_attn
        query = own.q_norm(own.q_proj(joined).unflatten(-1, (shape.heads, shape.head_dim)))
        key = own.k_norm(own.k_proj(joined).unflatten(-1, (shape.kv_heads, shape.head_dim)))
        value = own.v_proj(joined).unflatten(-1, (shape.kv_heads, shape.head_dim))
        cos, sin = self.rotary(value, positions[None])
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        residual = normed if shape.norm_before_residual else features
        return Rows(_turned(query, cos, sin), _turned(key, cos, sin), value, residual)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the layer's output `[n, H]` from `attended [n, Hq, D]`."""
        hidden = residual + self.midlayer.self_attn.o_proj(attended.flatten(1))
        out: Tensor = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
        return out

    def feedback(self, hidden: Tensor) -> Tensor:
        """Return what a child's row is fed in place of the target's features. [n, H]"""
        fed: Tensor = self.norm(hidden) if self.shape.norm_output else hidden
        return fed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the draft vocabulary. [n, draft_vocab]"""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend `query [n, Hq, D]` to `key` and `value [m, Hk, D]` where `mask [n, m]` is True. [n, Hq, D]

    The query heads of one K/V head are folded into rows, so that K/V are neither copied nor read twice.
    """
    n, heads, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    folded = query.view(n, kv_heads, groups, size).permute(1, 2, 0, 3).reshape(kv_heads, groups * n, size)
    out = nn.functional.scaled_dot_product_attention(
        folded[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], attn_mask=mask.repeat(groups, 1)
    )[0]
    return out.view(kv_heads, groups, n, size).permute(2, 0, 1, 3).reshape(n, heads, size)


def _rotary(shape: HeadShape) -> nn.Module:
    """Return transformers' own rotary embedding, so that every kind of `rope_parameters` means what it means there."""
    config = LlamaConfig(
        hidden_size=shape.heads * shape.head_dim,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters=dict(shape.rope),
    )
    return LlamaRotaryEmbedding(config)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [n, heads, D]` by position; the two halves of D are the two coordinates of each plane."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
