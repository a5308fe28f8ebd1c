"""Tiny causal LMs, built from config, whose text is worth speculating on.

Knows transformers only; nothing of the engine. Plain random weights make a model that soon repeats one token
for ever, or that never repeats anything; either way a losslessness test would see only full or only empty
acceptance. Here the likeliest next token depends mostly on the last token, and noticeably on all others:

    logit of v after u  =  E[v] . R E[u]  -  E[v] . (recency-weighted mean of the last ~20 E[w])  +  noise

`E` are the embeddings. `R` turns planes by 60 or 135 degrees, so that a token is unlikely to follow itself or
to come back after 2, 3 or 4 steps. The second term discourages recent tokens, which breaks longer cycles,
while what stands further back is often repeated. The noise comes from random attention heads over the whole
context and random MLPs.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 320
WINDOW = 16  # sliding window of the models that have one
LONGROPE_FROM = 512  # a text longer than this is in longrope's second regime
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": LONGROPE_FROM}
_LLAMA3 = {**_ROPE, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0}
_LONG = {
    **_ROPE,
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24}
_GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Which config, and how strongly each part of the weights speaks."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    logits: float = 6.0  # standard deviation of a token's logits
    recency: float = 1.75  # how much recent tokens are discouraged
    noise: float = 0.3  # random attention heads and MLPs


ARCHS: dict[str, Shape] = {
    "llama": Shape("llama"),
    "llama_mha": Shape("llama", {"num_key_value_heads": 4}),
    "llama_mqa": Shape("llama", {"num_key_value_heads": 1}),
    "llama_llama3": Shape("llama", {"rope_parameters": _LLAMA3}),
    "llama_yarn": Shape("llama", {"rope_parameters": _YARN}),
    "qwen2": Shape("qwen2"),
    "qwen3": Shape("qwen3", {"num_attention_heads": 6}, recency=3.5),
    "qwen3_moe": Shape("qwen3_moe", _EXPERTS, recency=3.5),
    "mistral": Shape("mistral", {"sliding_window": WINDOW}),
    "gemma2": Shape("gemma2", _GEMMA),
    "gemma3": Shape("gemma3_text", {**_GEMMA, "num_hidden_layers": 3, "layer_types": _GEMMA3_LAYERS}),
    "gpt_oss": Shape("gpt_oss", _GPT_OSS),
    "phi3_longrope": Shape("phi3", {**_ROPE, "rope_parameters": _LONG}),
}


def tiny_model(arch: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Return a model of one of `ARCHS` in eval mode; one arch and seed, one set of weights.

    torch's global generator stays as it was.
    """
    shape = ARCHS[arch]
    config = AutoConfig.for_model(shape.model_type, **{**_SHARED, **shape.config})
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.set_experts_implementation("eager")  # the default, grouped_mm, refuses float64
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, shape, seed)
        _shape_text(model, shape)
    return model


def _fill(name: str, weight: nn.Parameter, shape: Shape, seed: int) -> None:
    """Fill one parameter from a generator keyed by its name: noise of size 1/sqrt(fan-in), less where it adds up."""
    if "norm" in name:
        if "post_" in name and shape.model_type.startswith("gemma"):
            weight.fill_(shape.noise - 1.0)  # Gemma norms a block's output to size 1 + weight
        return
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    scale = 1.0 if "embed" in name or weight.ndim == 1 else weight.shape[-1] ** -0.5
    if name.endswith("bias"):
        scale = 0.1
    if "o_proj" in name or "down_proj" in name:
        scale *= shape.noise
    weight.copy_(values * scale)


def _shape_text(model: PreTrainedModel, shape: Shape) -> None:
    """Write the two terms of the module's formula into embeddings, last attention layer and output layer."""
    embed, head = model.model.embed_tokens, model.lm_head.weight
    embed.weight[:, 0] = 2.0  # a constant direction, for attention by distance alone
    embed.weight[:, 1] = 0.0
    turn = _turn(embed.weight.shape[1])
    head.copy_(embed.weight.double() @ turn * (shape.logits * head.shape[1] ** -0.5))
    embed.weight.div_(float(getattr(embed, "scalar_embed_scale", 1.0)))  # Gemma multiplies by sqrt(hidden)

    last = model.model.layers[-1]
    if shape.model_type.startswith("gemma"):
        last.post_attention_layernorm.weight.fill_(shape.recency / 6 - 1.0)
    query, key, value, out = _attention_weights(last.self_attn, model.config)
    half = query.shape[1] // 2
    slow = [half // 4, 3 * half // 8, half // 2]  # RoPE pairs turning once in about 60, 200 and 600 tokens
    query[:, :, 0] = key[:, :, 0] = 0.0
    key[:, slow, 0] = 1.5
    for number in range(0, len(query), 2):  # every other head looks at what is near and argues against it
        query[number, slow, 0] = 1.5
        seen = value[number * len(value) // len(query)].double()
        out[:, number] = -shape.recency * 2 / len(query) * (turn.T @ seen.T)


def _turn(size: int) -> Tensor:
    """Return R: zero on the first two dimensions, then planes turned by 60 or 135 degrees. [size, size]"""
    turn = torch.zeros(size, size, dtype=torch.float64)
    planes = (size - 2) // 2
    for plane in range(planes):
        angle = math.radians(60.0 if plane < 0.586 * planes else 135.0)  # the cosines add up to zero
        i = 2 + 2 * plane
        turn[i, i] = turn[i + 1, i + 1] = math.cos(angle)
        turn[i + 1, i], turn[i, i + 1] = math.sin(angle), -math.sin(angle)
    return turn


def _attention_weights(attention: Any, config: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of q, k, v `[heads, head_dim, hidden]` and o `[hidden, heads, head_dim]`."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if hasattr(attention, "qkv_proj"):
        parts = attention.qkv_proj.weight.split([heads * size, kv_heads * size, kv_heads * size])
    else:
        parts = [getattr(attention, f"{name}_proj").weight for name in "qkv"]
    query, key, value = (part.view(-1, size, part.shape[1]) for part in parts)
    return query, key, value, attention.o_proj.weight.view(-1, heads, size)


@torch.no_grad()
def sample_pieces(model: PreTrainedModel, seed: int, length: int = 40) -> list[list[int]]:
    """Return texts of `length` tokens the model itself would write: two greedy, then ever hotter ones."""
    generator = torch.Generator().manual_seed(seed)
    heat = torch.tensor([0.0, 0.0, 0.5, 0.7, 1.0], dtype=torch.float64)[:, None]
    ids = torch.randint(0, VOCAB, (len(heat), 3), generator=generator)
    while ids.shape[1] < length:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].double()
        uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
        ids = torch.cat([ids, (logits - heat * (-uniform.log()).log()).argmax(-1, keepdim=True)], 1)
    return ids.tolist()


def prompt_for(model: PreTrainedModel, length: int, seed: int = 0) -> list[int]:
    """Return a prompt of `length` tokens from which copying pays, often but not always.

    Slices of the model's own texts, repeated, some with one token changed, with random tokens between; its end
    is the beginning of a greedy text that may stand complete further up.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    pieces = sample_pieces(model, seed)

    def below(bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=generator))

    prompt: list[int] = []
    while len(prompt) < length:
        piece = list(pieces[below(len(pieces))])
        start = below(len(piece) // 3)
        if below(3) == 0:
            piece[below(len(piece))] = below(VOCAB)
        prompt += piece[start:] + [below(VOCAB) for _ in range(below(5))]
    tail = pieces[0][: min(8, length)]
    return prompt[: length - len(tail)] + tail
