"""Tiny block drafters on disk, a dense account of what their network computes, and one whose guesses are known.

Knows the layouts' names of tensors and options; written from the architecture's description, not from our module.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.models import VOCAB

HIDDEN, HEADS, KV, DIM, FFN = 64, 4, 2, 16, 48
EPS, THETA = 1e-6, 1e4
LAYERS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 512,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
}
ZLAB: dict[str, Any] = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0]},
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash"},
    "transformer_layer_config": {**LAYERS, "model_type": "qwen3"},
    "draft_vocab_size": VOCAB,
    "block_size": 5,
    "aux_hidden_state_layer_ids": [1],
    "mask_token_id": 7,
}


def values(name: str, *shape: int, scale: float | None = None) -> Tensor:
    """Noise keyed by its name, of size 1 / sqrt(fan-in)."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if scale is None else scale)


def tensors(features: int = HIDDEN, layers: int = 2, bias: bool = False) -> dict[str, Tensor]:
    """All tensors of a drafter's body."""
    found = {"fc.weight": values("fc", HIDDEN, features)}
    shapes = {"q_proj": (HEADS * DIM, HIDDEN), "k_proj": (KV * DIM, HIDDEN), "v_proj": (KV * DIM, HIDDEN)}
    shapes["o_proj"] = (HIDDEN, HEADS * DIM)
    for i in range(layers):
        for name, shape in shapes.items():
            found[f"layers.{i}.self_attn.{name}.weight"] = values(f"{i}{name}", *shape)
            if bias:
                found[f"layers.{i}.self_attn.{name}.bias"] = values(f"{i}{name}bias", shape[0], scale=0.3)
        for name in ("q_norm", "k_norm"):
            found[f"layers.{i}.self_attn.{name}.weight"] = 1 + values(f"{i}{name}", DIM, scale=0.2)
        for name, shape in {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}.items():
            found[f"layers.{i}.mlp.{name}.weight"] = values(f"{i}{name}", *shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.{i}.{name}.weight"] = 1 + values(f"{i}{name}", HIDDEN, scale=0.2)
    for name in ("hidden_norm", "norm"):
        found[f"{name}.weight"] = 1 + values(name, HIDDEN, scale=0.2)
    return found


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Write a checkpoint; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


@dataclass
class Text:
    """What a drafter reads of a sequence."""

    token_ids: list[int]
    draft_state: Any = None

    @property
    def root_token(self) -> int:
        return self.token_ids[-1]


@torch.no_grad()
def features_of(model: Any, token_ids: list[int], layers: Sequence[int]) -> Tensor:
    """Outputs of a target's layers side by side, before any final norm. [n, F]"""
    taken: dict[int, Tensor] = {}
    stack = model.get_decoder().layers
    hooks = [stack[i].register_forward_hook(lambda _m, _i, out, i=i: taken.update({i: out[0]})) for i in layers]
    model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([taken[i] if taken[i].ndim == 2 else taken[i][0] for i in layers], -1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def _rope(x: Tensor, positions: Tensor, factor: float) -> Tensor:
    angles = positions[:, None].double() / factor / THETA ** (torch.arange(0, DIM, 2).double() / DIM)
    pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def reference(
    weights: dict[str, Tensor], block: Tensor, features: Tensor, visible: Any = None, factor: float = 1.0
) -> Tensor:
    """The states of `block [B, H]` behind `features [n, F]`, all in float64, nothing cached, head by head.

    `visible(row, key) -> bool` by position (default: all); `factor` divides positions (linear RoPE scaling).
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    context = _norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, n, size = block.double(), len(features), len(block)
    positions = torch.arange(n + size)
    mask = torch.tensor([[visible is None or visible(n + i, j) for j in range(n + size)] for i in range(size)])
    for i in range(sum(name.endswith("input_layernorm.weight") for name in w)):
        at = f"layers.{i}."

        def linear(name: str, rows: Tensor, at: str = at) -> Tensor:
            return rows @ w[f"{at}{name}.weight"].T + w.get(f"{at}{name}.bias", torch.zeros(1).double())

        normed = _norm(x, w[at + "input_layernorm.weight"])
        rows = torch.cat([context, normed])
        q = _norm(linear("self_attn.q_proj", normed).view(size, HEADS, DIM), w[at + "self_attn.q_norm.weight"])
        k = _norm(linear("self_attn.k_proj", rows).view(n + size, KV, DIM), w[at + "self_attn.k_norm.weight"])
        v = linear("self_attn.v_proj", rows).view(n + size, KV, DIM)
        q, k = _rope(q, positions[n:], factor), _rope(k, positions, factor)
        heads = []
        for head in range(HEADS):
            key, value = k[:, head // (HEADS // KV)], v[:, head // (HEADS // KV)]
            scores = (q[:, head] @ key.T / DIM**0.5).masked_fill(~mask, float("-inf"))
            heads.append(scores.softmax(-1) @ value)
        x = x + linear("self_attn.o_proj", torch.cat(heads, -1))
        normed = _norm(x, w[at + "post_attention_layernorm.weight"])
        x = x + linear(
            "mlp.down_proj", nn.functional.silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed)
        )
    return _norm(x, w["norm.weight"])
