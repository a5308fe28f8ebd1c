"""Reads a block drafter from a folder: config.json and safetensors, in z-lab's, speculators' or transformers' layout.

Knows files and names of tensors; nothing of rounds. The one idea: a drafter with a random or foreign tensor still
drafts, only badly, so everything missing, unknown, misshapen or not finite is a `GraftError` that names it. No code
that comes with a checkpoint is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from longgraft.config import GraftError
from longgraft.draft.block_config import BlockConfig, read_config
from longgraft.draft.block_ends import Ends, RawEmbedding, target_ends, vocabulary
from longgraft.draft.block_model import BlockModel
from longgraft.linear import output_rows

# speculators: both ends of the drafter and its vocabulary; what the drafter was trained against is not used.
_OWN_ENDS = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
_UNUSED = {"verifier_lm_head.weight", "verifier_norm.weight"}


def read_folder(folder: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a local folder."""
    path = Path(folder).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GraftError(f"drafter {folder}: config.json cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise GraftError(f"drafter {folder}: config.json holds no object")
    return config


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's safetensors files: those its index names, or all there are."""
    root = Path(folder).expanduser()
    files = sorted(root.glob("*.safetensors"))
    index = root / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = sorted({root / name for name in json.loads(index.read_text())["weight_map"].values()})
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= load_file(file)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise GraftError(f"drafter {folder}: its weights cannot be read ({' '.join(str(error).split())})") from error
    if not tensors:
        raise GraftError(f"drafter {folder}: expected weights in *.safetensors, found none")
    return tensors


def load_block(folder: str | Path, target_model: Any) -> tuple[BlockConfig, Any, Ends]:
    """Return (config, network, ends) of the drafter in `folder`, on the target's device and in its dtype.

    The network has `open()` and `run(context, block, features)` as `BlockModel` has.
    """
    config = read_config(read_folder(folder))
    check_against(config, target_model)
    try:
        if config.layout == "transformers":
            from longgraft.draft.block_transformers import load_native

            return config, load_native(str(folder), target_model), target_ends(target_model)
        return config, *build(config, read_tensors(folder), target_model)
    except GraftError as error:
        raise GraftError(f"drafter {folder}: {error}") from error


def build(config: BlockConfig, tensors: Mapping[str, Tensor], target_model: Any) -> tuple[BlockModel, Ends]:
    """Return the network filled with `tensors`, and its ends."""
    layers = layer_config(config)
    hidden = target_model.get_input_embeddings().weight.shape[1]
    if layers.hidden_size != hidden:
        raise GraftError(f"hidden_size is {layers.hidden_size}, the target's {hidden}: it was made for another target")
    _divides("num_attention_heads", layers.num_attention_heads, "num_key_value_heads", layers.num_key_value_heads)
    with torch.device("meta"):
        model = BlockModel(config, layers, len(config.layer_ids) * hidden)
    if config.layout == "speculators":
        ends = _own_ends(config, tensors, target_model)
        tensors = {name: t for name, t in tensors.items() if name not in _OWN_ENDS | _UNUSED}
    else:
        ends = target_ends(target_model)
    fill(model, tensors, target_model.dtype, target_model.device)
    model.rotary_emb.to(target_model.device)
    return model.eval(), ends


def layer_config(config: BlockConfig) -> Any:
    """Return the transformers config of the drafter's decoder layers."""
    from transformers import AutoConfig, Qwen3Config

    settings = {key: value for key, value in config.layers.items() if key not in ("auto_map", "architectures")}
    kind = settings.pop("model_type", "qwen3") if config.layout == "speculators" else "qwen3"
    settings.pop("model_type", None)
    try:
        layers = Qwen3Config(**settings) if kind == "qwen3" else AutoConfig.for_model(kind, **settings)
        if layers.hidden_act not in _activations():
            raise GraftError(
                f"hidden_act of the block drafter is {layers.hidden_act!r}, which transformers does not know"
            )
    except GraftError:
        raise
    except Exception as error:  # transformers validates fields with errors of its own kinds
        raise GraftError(
            f"the layers of the block drafter cannot be configured: {' '.join(str(error).split())}"
        ) from error
    return layers


def _activations() -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN


def fill(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Put `tensors` into `model` (made on the meta device); names and shapes must agree exactly."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        raise GraftError(f"the weights lack {len(missing)} tensors, {missing[0]!r} among them")
    if unknown:
        raise GraftError(f"the weights hold {len(unknown)} tensors no block drafter has, {unknown[0]!r} among them")
    for name, shape in wanted.items():
        _expect(name, tensors[name], shape)
    model.load_state_dict({name: tensors[name].to(device, dtype) for name in wanted}, assign=True)
    model.requires_grad_(False)


def _own_ends(config: BlockConfig, tensors: Mapping[str, Tensor], target_model: Any) -> Ends:
    borrowed = target_ends(target_model)
    target_rows, hidden = output_rows(borrowed.head), borrowed.embedding.weight.shape[1]
    dtype, device = target_model.dtype, target_model.device
    rows = int(config.draft_vocab or target_rows)
    ids, back = vocabulary(tensors.get("d2t"), tensors.get("t2d"), rows, int(target_rows))
    head: Any = borrowed.head
    if "lm_head.weight" in tensors:
        head = nn.Linear(hidden, rows, bias=False, device="meta")
        fill(head, {"weight": tensors["lm_head.weight"]}, dtype, device)
    elif ids is not None:
        raise GraftError("the weights lack 'lm_head.weight', and the drafter's vocabulary is not the target's")
    embedding: Any = RawEmbedding(borrowed.embedding)
    if "embed_tokens.weight" in tensors:
        rows_in, hidden_in = borrowed.embedding.weight.shape
        embedding = nn.Embedding(rows_in, hidden_in, device="meta")
        fill(embedding, {"weight": tensors["embed_tokens.weight"]}, dtype, device)
    moved = (None, None) if ids is None or back is None else (ids.to(device), back.to(device))
    return Ends(embedding, head, *moved)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise GraftError(f"tensor {name!r} has shape {tuple(tensor.shape)}: expected {shape}")
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise GraftError(f"tensor {name!r} is not made of finite floating-point numbers")


def _divides(name: str, whole: int, part_name: str, part: int) -> None:
    if part < 1 or whole % part:
        raise GraftError(f"{name} is {whole} and {part_name} {part}: expected a multiple")


def check_against(config: BlockConfig, target_model: Any) -> None:
    """Raise unless the drafter's mask token and layers exist in the target."""
    rows = int(target_model.get_input_embeddings().weight.shape[0])
    layers = int(target_model.config.get_text_config().num_hidden_layers)
    if config.mask_token_id >= rows:
        raise GraftError(f"mask_token_id of the drafter is {config.mask_token_id}: the target has {rows} embeddings")
    if max(config.layer_ids) >= layers:
        raise GraftError(f"the drafter reads layer {max(config.layer_ids)}: the target has layers 0 to {layers - 1}")
    if config.layout == "speculators" and layers - 1 in config.layer_ids:
        raise GraftError(
            f"aux_hidden_state_layer_ids holds {layers}, the state after the target's last layer: "
            "whether before or after its norm is not settled in that layout, so it is not supported"
        )
