"""Small EAGLE-3 heads for the tiny models, saved in each published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from longgraft.draft.head import Eagle3Head, HeadShape
from longgraft.draft.weights import LoadedHead
from tests.engines import model_of
from tests.models import VOCAB

DRAFT_VOCAB = 120


def shape_for(model: Any, **changes: Any) -> HeadShape:
    """The shape of a head for a tiny model; two layers give outputs 0, 1 and 1 again."""
    hidden = model.config.hidden_size
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "target_hidden": hidden,
        "intermediate": 48,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab": VOCAB,
        "draft_vocab": DRAFT_VOCAB,
        "layers": (0, 1, 1),
        "max_positions": 512,
    }
    return HeadShape(**{**sizes, **changes})


def head_for(model: Any, seed: int = 0, **changes: Any) -> Eagle3Head:
    """A head with random weights large enough to say something, norms included."""
    head = Eagle3Head(shape_for(model, **changes)).to(model.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(1 + 0.3 * noise if weight.ndim == 1 else noise * (2.0 / weight.shape[-1] ** 0.5))
    return head.eval().requires_grad_(False)


def kept_ids(count: int = DRAFT_VOCAB, vocab: int = VOCAB) -> Tensor:
    """The target ids that can be drafted: some, ascending, with gaps."""
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:count].sort().values


def loaded(model: Any = None, seed: int = 0, **changes: Any) -> LoadedHead:
    model = model if model is not None else model_of()
    head = head_for(model, seed, **changes)
    return LoadedHead(head, kept_ids(head.shape.draft_vocab), model.get_input_embeddings().weight.detach())


def config_for(shape: HeadShape) -> dict[str, Any]:
    """config.json in the plain layout."""
    options = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_theta": 1e4,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        **{key: True for key in options if getattr(shape, key)},
    }


def tensors_for(loaded: LoadedHead) -> dict[str, Tensor]:
    """All tensors of a checkpoint, in SafeAILab's names."""
    tensors = {key: weight.clone().contiguous() for key, weight in loaded.head.state_dict().items()}
    tensors["d2t"] = loaded.target_ids - torch.arange(len(loaded.target_ids))
    tensors["t2d"] = torch.zeros(loaded.head.shape.vocab, dtype=torch.bool).index_fill(0, loaded.target_ids, True)
    return tensors


def save(folder: Path, layout: str, loaded: LoadedHead) -> Path:
    """Write a checkpoint as `safeailab` (a pickle), `specforge` or `speculators` would; return its folder."""
    config, tensors = config_for(loaded.head.shape), tensors_for(loaded)
    layers = list(loaded.head.shape.layers)
    if layout == "specforge":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    elif layout == "speculators":
        tensors = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
        outer = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        config = {
            "speculators_model_type": "eagle3",
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            **{key: config.pop(key) for key in outer if key in config},
            "transformer_layer_config": config,
        }
    write(folder, config, tensors, pickled=layout == "safeailab")
    return folder


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], pickled: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
