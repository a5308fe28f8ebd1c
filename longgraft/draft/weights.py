"""EAGLE-3 checkpoints: SafeAILab's, SpecForge's and speculators' become one `Eagle3Head`, or one clear sentence.

Knows files, tensor names and configs; nothing of drafting. The one idea: a wrong head never crashes, it only drafts
badly, and nobody finds out why. So every tensor must be there, have its shape and be known, no weight is left random,
and the two vocabulary maps must say the same.

What differs between the layouts: speculators nests the layer's config in `transformer_layer_config`, calls the layer
`layers.0` and counts the layers read by their *input* (2 is what layer 1 puts out), as SafeAILab's code does; in
SpecForge's `eagle_config` the same layers are counted by their output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longgraft.config import GraftError
from longgraft.draft.head import Eagle3Head, HeadShape
from longgraft.linear import output_rows
from longgraft.load import fetched_folder

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Buffers that some exporters leave in a checkpoint and that carry nothing.
CARRIES_NOTHING = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FORMATS = "config.json and model.safetensors or pytorch_model.bin (or their sharded forms)"


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head, the target ids `[draft_vocab]` of its draft vocabulary and the embedding `[vocab, hidden]` it reads."""

    head: Eagle3Head
    target_ids: Tensor
    embed: Tensor


def load_head(name: str, target: Any) -> LoadedHead:
    """Load a head from a folder or hub id for a loaded target model, in the target's dtype and on its device.

    Raises `GraftError` naming the file or tensor that is missing, unknown or does not fit the target.
    """
    folder = fetched_folder(name, "head", ("*.json", "*.safetensors", "*.bin"))
    config = _config(folder)
    tensors = {_plain_name(key): tensor for key, tensor in _tensors(folder).items() if not _is_empty(key)}
    shape = shape_of(config, target, f"head {name!r}")
    maps = {key: tensors.pop(key, None) for key in ("d2t", "t2d")}
    embed = _embedding(tensors.pop("embed_tokens.weight", None), shape, target, name)
    head = _empty_head(shape, name)
    _refuse_misfits(head, tensors, name)
    cast = {key: tensor.to(target.device, target.dtype) for key, tensor in tensors.items()}
    head.load_state_dict(cast, assign=True)
    target_ids = target_ids_of(maps["d2t"], maps["t2d"], shape, f"head {name!r}")
    return LoadedHead(head.to(target.device).eval().requires_grad_(False), target_ids, embed)


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is that of an EAGLE-3 head."""
    named = [*(config.get("architectures") or []), config.get("speculators_model_type") or ""]
    return any("eagle3" in str(name).lower() for name in named) or (
        "draft_vocab_size" in config and config.get("num_hidden_layers") == 1
    )


def shape_of(config: Mapping[str, Any], target: Any, name: str) -> HeadShape:
    """Read a head's sizes and options from any of the three layouts' configs; refuse those of another target."""
    layer = config.get("transformer_layer_config", config)
    text = target.config.get_text_config()
    vocab = output_rows(target.get_output_embeddings())
    if "quantization_config" in config:
        raise GraftError(f"{name}: its weights are quantized; expected plain ones")
    if layer.get("num_hidden_layers", 1) != 1:
        raise GraftError(f"{name}: {layer['num_hidden_layers']} layers in its config; expected an EAGLE-3 head of 1")
    sizes, its_vocab = _sizes(config, layer, name)
    target_hidden = sizes["target_hidden"]
    if target_hidden != text.hidden_size:
        raise GraftError(
            f"{name}: made for a target of hidden size {target_hidden}; this target's is {text.hidden_size}"
        )
    if its_vocab not in (vocab, text.vocab_size):
        raise GraftError(f"{name}: made for a vocabulary of {its_vocab} tokens; this target's has {vocab}")
    return HeadShape(
        **sizes,
        vocab=vocab,
        layers=layers_of(config, int(text.num_hidden_layers), name),
        eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope=_rope(layer),
        activation=layer.get("hidden_act", "silu"),
        attention_bias=bool(layer.get("attention_bias", False)),
        mlp_bias=bool(layer.get("mlp_bias", False)),
        qk_norm=layer.get("model_type") == "qwen3" and layer is not config,
        **{key: bool(config.get(key, False)) for key in OPTIONS},
    )


def _sizes(config: Mapping[str, Any], layer: Mapping[str, Any], name: str) -> tuple[dict[str, Any], int]:
    """Return a shape's sizes but for the target's vocabulary, and the vocabulary the config names."""
    try:
        hidden, heads, vocab = (int(layer[key]) for key in ("hidden_size", "num_attention_heads", "vocab_size"))
        sizes = {
            "hidden": hidden,
            "target_hidden": int(config.get("target_hidden_size") or layer.get("target_hidden_size") or hidden),
            "intermediate": int(layer["intermediate_size"]),
            "heads": heads,
            "kv_heads": int(layer.get("num_key_value_heads") or heads),
            "head_dim": int(layer.get("head_dim") or 0) or hidden // heads,
            "draft_vocab": int(config.get("draft_vocab_size") or vocab),
            "max_positions": int(layer.get("max_position_embeddings", 2048)),
        }
        if min(sizes.values()) < 1:
            raise ValueError(f"{min(sizes, key=lambda key: sizes[key])} below 1")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise GraftError(f"{name}: config.json: {error!r}; expected the sizes of an EAGLE-3 head") from error
    return sizes, vocab


def layers_of(config: Mapping[str, Any], num_layers: int, name: str) -> tuple[int, ...]:
    """Return which target layers' outputs a head reads, counted from 0."""
    default = [1, num_layers // 2 - 1, num_layers - 4]
    by_output = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    by_input = config.get("eagle_aux_hidden_state_layer_ids")
    layers = by_output or [number - 1 for number in by_input or []] or default
    if not all(0 <= layer < num_layers for layer in layers):
        raise GraftError(f"{name}: reads layers {list(layers)} of its target; this target's are 0 to {num_layers - 1}")
    return tuple(layers)


def target_ids_of(d2t: Tensor | None, t2d: Tensor | None, shape: HeadShape, name: str) -> Tensor:
    """Return the target id of every draft id, after checking that both maps say the same. [draft_vocab]

    `d2t[i]` is an offset: draft id i is target id i + d2t[i]. `t2d` marks the target ids that can be drafted.
    """
    if d2t is None and t2d is None and shape.draft_vocab == shape.vocab:
        return torch.arange(shape.vocab)
    for key, tensor, length in (("d2t", d2t, shape.draft_vocab), ("t2d", t2d, shape.vocab)):
        if tensor is None:
            raise GraftError(
                f"{name}: tensor {key} is missing; expected one, for {shape.draft_vocab} of the target's {shape.vocab} "
                "tokens can be drafted"
            )
        if tensor.ndim != 1 or (len(tensor) != length and key == "d2t"):
            raise GraftError(f"{name}: tensor {key} has shape {list(tensor.shape)}; expected [{length}]")
    assert d2t is not None and t2d is not None
    ids = d2t.long() + torch.arange(len(d2t))
    marked = t2d.bool().nonzero()[:, 0]
    if len(marked) != len(ids) or not torch.equal(ids, marked):
        reason = "its entries are target ids" if torch.equal(d2t.long(), marked) else "t2d marks other tokens"
        raise GraftError(
            f"{name}: tensor d2t: expected offsets (target id minus draft id) that agree with t2d; {reason}"
        )
    if len(ids) and int(ids[-1]) >= shape.vocab:
        raise GraftError(f"{name}: tensor t2d marks token {int(ids[-1])}; the target's vocabulary has {shape.vocab}")
    return ids


def _empty_head(shape: HeadShape, name: str) -> Eagle3Head:
    """Return a head without weights: nothing in it can be left as it was made."""
    if shape.heads % shape.kv_heads:
        raise GraftError(f"head {name!r}: {shape.heads} query heads cannot share {shape.kv_heads} key and value heads")
    try:
        with torch.device("meta"):
            return Eagle3Head(shape)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise GraftError(
            f"head {name!r}: hidden_act {shape.activation!r} or rope settings {dict(shape.rope)} are not known "
            f"({' '.join(str(error).split())[:100]})"
        ) from error


def _refuse_misfits(head: Eagle3Head, tensors: Mapping[str, Tensor], name: str) -> None:
    """Raise for a missing, an unknown or a misshapen tensor; the first of each kind is named."""
    wanted = {key: tuple(weight.shape) for key, weight in head.state_dict().items()}
    for key in sorted(wanted.keys() - tensors.keys()):
        raise GraftError(f"head {name!r}: tensor {key} {list(wanted[key])} is missing; expected a complete checkpoint")
    for key in sorted(tensors.keys() - wanted.keys()):
        raise GraftError(f"head {name!r}: tensor {key} is not known in an EAGLE-3 head with this config")
    for key, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[key]:
            raise GraftError(
                f"head {name!r}: tensor {key} has shape {list(tensor.shape)}; its config says {list(wanted[key])}"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise GraftError(f"head {name!r}: tensor {key} ({tensor.dtype}) is not finite; expected a sound checkpoint")


def _embedding(own: Tensor | None, shape: HeadShape, target: Any, name: str) -> Tensor:
    """Return the checkpoint's own embedding, or the target's where it brings none."""
    if own is None:
        weight: Tensor = target.get_input_embeddings().weight.detach()
        own, whose = weight, "the target's embedding, which it needs as it has no embed_tokens.weight,"
    else:
        whose = "tensor embed_tokens.weight"
    if own.ndim != 2 or own.shape[1] != shape.hidden or len(own) < target.config.get_text_config().vocab_size:
        raise GraftError(
            f"head {name!r}: {whose} has shape {list(own.shape)}; expected [{shape.vocab}, {shape.hidden}]"
        )
    return own.to(target.device, target.dtype)


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` from a new config or from `rope_theta` and `rope_scaling` of an older one."""
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    rope.setdefault("rope_theta", layer.get("rope_theta", 1e4))
    return rope


def _plain_name(key: str) -> str:
    """Return a tensor's name in SafeAILab's layout."""
    key = key.removeprefix("model.")
    return "midlayer." + key.removeprefix("layers.0.") if key.startswith("layers.0.") else key


def _is_empty(key: str) -> bool:
    return key.endswith(CARRIES_NOTHING)


def _config(folder: Path) -> dict[str, Any]:
    found = _json(folder / "config.json")
    if not isinstance(found.get("transformer_layer_config", {}), dict):
        raise GraftError(f"{folder / 'config.json'}: transformer_layer_config: expected an object")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise GraftError(f"{path}: could not be read ({error}); expected a head with {FORMATS}") from error
    if not isinstance(found, dict):
        raise GraftError(f"{path}: expected a JSON object")
    return found


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder: one file, or the shards its index names; safetensors where there are both."""
    for file in WEIGHTS:
        index = folder / f"{file}.index.json"
        if (folder / file).is_file():
            return _read(folder / file)
        if index.is_file():
            files = sorted(set(_json(index).get("weight_map", {}).values()))
            if not files:
                raise GraftError(f"{index}: names no files; expected a weight_map")
            return {key: tensor for part in files for key, tensor in _read(folder / str(part)).items()}
    raise GraftError(f"{folder}: no weights there; expected {FORMATS}")


def _read(path: Path) -> dict[str, Tensor]:
    """Read one file of tensors; a pickle only as far as it holds nothing but tensors."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors and pickle raise whatever they like
        raise GraftError(f"{path}: could not be read as tensors: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise GraftError(f"{path}: expected a table of tensors by name")
    return found
