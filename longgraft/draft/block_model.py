"""The network of a DFlash drafter: a few Qwen3-style layers that look at the target's hidden states.

Knows tensors and transformers' Qwen3 parts; no tokens, no vocabulary, no rounds. The one idea: keys and values of a
layer come from two kinds of rows, context rows (the target's features of committed tokens, the same for all layers)
and the rows of the block; only the block has queries, and within it everyone sees everyone. Context rows are kept
from pass to pass, block rows lie behind them and are overwritten by the next pass.

Architecture after z-lab/dflash, `dflash/model.py`, and speculators, `models/dflash/`; weights carry the names given
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from longgraft.config import GraftError
from longgraft.draft.block_config import BlockConfig

SUPPORTED_ROPE = {"default", "linear", "llama3", "yarn"}
FIRST_ROOM = 256


class Context:
    """K/V of the context rows, layer by layer: `keys`, `values [kv_heads, room, head_dim]`, `length` rows valid."""

    def __init__(self, layers: int) -> None:
        self.length = 0
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows `[kv_heads, n, head_dim]` behind the context; return all rows, context first."""
        end = self.length + keys.shape[1]
        self.keys[layer] = _with_room(self.keys[layer], keys, self.length, end)
        self.values[layer] = _with_room(self.values[layer], values, self.length, end)
        all_keys, all_values = self.keys[layer], self.values[layer]
        assert all_keys is not None and all_values is not None
        all_keys[:, self.length : end] = keys
        all_values[:, self.length : end] = values
        return all_keys[:, :end], all_values[:, :end]


def _with_room(rows: Tensor | None, like: Tensor, used: int, end: int) -> Tensor:
    """Return storage for `end` rows that holds the `used` first of `rows`; room doubles, so copying stays linear."""
    if rows is not None and rows.shape[1] >= end:
        return rows
    room = max(FIRST_ROOM, end if rows is None else max(end, 2 * rows.shape[1]))
    grown = like.new_empty(like.shape[0], room, like.shape[2])
    if rows is not None:
        grown[:, :used] = rows[:, :used]
    return grown


class BlockAttention(nn.Module):
    """Attention of block rows over context rows and block rows."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

        self.layer = layer
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        bias, hidden = bool(getattr(config, "attention_bias", False)), config.hidden_size
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self, block: Tensor, rows: Tensor, turn: tuple[Tensor, Tensor], context: Context, mask: Tensor | None
    ) -> Tensor:
        """Attend from `block [B, H]`; `rows [n + B, H]` are the new context rows and the block, `turn` their RoPE."""
        size = len(block)
        cos, sin = turn
        q = self._heads(self.q_norm(self.q_proj(block).view(size, -1, self.head_dim)), cos[-size:], sin[-size:])
        k = self._heads(self.k_norm(self.k_proj(rows).view(len(rows), -1, self.head_dim)), cos, sin)
        v = self.v_proj(rows).view(len(rows), -1, self.head_dim).transpose(0, 1)
        keys, values = context.write(self.layer, k, v)
        # The query heads that share a key head become rows of one product.
        shared = q.reshape(self.kv_heads, -1, self.head_dim)
        if mask is not None:
            mask = mask.repeat(shared.shape[1] // size, 1)
        out = scaled_dot_product_attention(shared[None], keys[None], values[None], attn_mask=mask)[0]
        out = out.reshape(-1, size, self.head_dim).transpose(0, 1).reshape(size, -1)
        projected: Tensor = self.o_proj(out)
        return projected

    @staticmethod
    def _heads(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn `rows [n, heads, D]` by their positions; return [heads, n, D]."""
        first, second = rows.chunk(2, dim=-1)
        turned = rows * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
        return turned.transpose(0, 1)


class BlockLayer(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and added to its input."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

        self.self_attn = BlockAttention(config, layer)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, block: Tensor, fresh: Tensor, turn: tuple[Tensor, Tensor], context: Context, mask: Tensor | None
    ) -> Tensor:
        """Return the block's next hidden states; `fresh [n, H]` are the new context rows, not normed by this layer."""
        normed = self.input_layernorm(block)
        block = block + self.self_attn(normed, torch.cat([fresh, normed]), turn, context, mask)
        out: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out


class BlockModel(nn.Module):
    """`fc`, `hidden_norm`, `layers.*`, `norm`: block embeddings and target features in, hidden states out.

    Sliding layers: a row at position q sees context positions above q - window, as flash-attention's window does
    for z-lab's; `anchored` layers (speculators) see those from root - window on. With `causal` a sliding layer's
    block rows see only block rows up to themselves.
    """

    def __init__(self, config: BlockConfig, layers: Any, feature_size: int) -> None:
        """`layers`: a transformers config with Qwen3's fields; `feature_size`: columns of the features."""
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

        self.config = config
        self.windows = _windows(layers)
        self.max_positions = int(layers.max_position_embeddings)
        self.fc = nn.Linear(feature_size, layers.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(layers.hidden_size, eps=layers.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(layers, i) for i in range(layers.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(layers.hidden_size, eps=layers.rms_norm_eps)
        with torch.device("cpu"):  # its tables are computed, not loaded: never on the meta device
            self.rotary_emb = _rotary(layers)

    def open(self) -> Context:
        """Return an empty context."""
        return Context(len(self.layers))

    def run(self, context: Context, block: Tensor, features: Tensor) -> Tensor:
        """Take `features [n, F]` of the next n committed tokens into the context; return the block's states. [B, H]

        `block [B, H]`: embeddings of the root and the mask tokens. Positions are counted from the context's first row.
        The block leaves nothing behind.
        """
        fresh = self.hidden_norm(self.fc(features))
        first, size = context.length, len(block)
        positions = torch.arange(first, first + len(fresh) + size, device=block.device)
        cos, sin = self.rotary_emb(block, positions[None])
        masks = {window: self._mask(first + len(fresh), size, window, block.device) for window in set(self.windows)}
        for layer, window in zip(self.layers, self.windows):
            block = layer(block, fresh, (cos[0], sin[0]), context, masks[window])
        context.length = first + len(fresh)
        out: Tensor = self.norm(block)
        return out

    def _mask(self, root: int, size: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return who sees whom, `[size, root + size]`, True = visible; None where all see all."""
        if window is None:
            return None
        rows = torch.arange(root, root + size, device=device)[:, None]
        keys = torch.arange(root + size, device=device)[None]
        seen = (keys >= root - window) if self.config.anchored else (keys > rows - window)
        return seen & (keys <= rows.clamp(min=root)) if self.config.causal else seen.expand(size, -1)


def _windows(layers: Any) -> list[int | None]:
    """Return each layer's sliding window, None for full attention."""
    kinds = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers.num_hidden_layers:
        raise GraftError(
            f"layer_types of the block drafter are {kinds}: expected full or sliding attention, one a layer"
        )
    window = getattr(layers, "sliding_window", None)
    if "sliding_attention" in kinds and not window:
        raise GraftError("the block drafter has sliding layers and no sliding_window (is use_sliding_window false?)")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _rotary(layers: Any) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    parameters = getattr(layers, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE or any(isinstance(value, dict) for value in parameters.values()):
        raise GraftError(
            f"RoPE of the block drafter is {parameters}: expected one set of parameters for all layers, of type "
            f"{', '.join(sorted(SUPPORTED_ROPE))}"
        )
    return Qwen3RotaryEmbedding(layers)
