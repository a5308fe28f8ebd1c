"""Loads a model from weights that are read one at a time, when it is their turn.

Knows which checkpoints can be read so, not what is in them. The one idea: transformers does all that loading is
(names, conversions, ties, buffers), but takes the weights from us as objects that read themselves when they are asked
for their values; with quantised weights each is packed before the next is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from longgraft.config import BITS
from longgraft.load_gguf import UnknownWay, stored

# Have transformers say which weights lack or do not fit, so that the refusal names them.
TELLING = {"output_loading_info": True, "ignore_mismatched_sizes": True}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file, read anew at each access by any index, which returns all of it."""

    file: str
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        # Opened each time: an open file stays mapped, and what was read of it counts as memory until it is closed.
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_tensor(self.name).clone()  # what is not copied keeps the file mapped, too


def gguf_weights(source: str, file: str, empty: Any, dtype: torch.dtype) -> Mapping[str, Any] | None:
    """Return what a GGUF file has of the weights of `empty`, unread; None where it has to be read at once.

    That is: architectures of which one tensor of the file is not one weight (grouped experts), those that
    transformers reads lazily itself, and releases of transformers without tables of names.
    """
    from transformers.utils import cached_file

    path = cached_file(source, file)
    try:
        return None if path is None else stored(Path(path), empty, dtype)
    except UnknownWay:
        return None


def unread_weights(source: str, config: Any, quantize: str | None) -> Mapping[str, Any] | None:
    """Return the weights of a safetensors checkpoint, unread; None where it has to be read at once.

    That is: other formats, checkpoints that are quantised already or bring their own code, adapters, and all that is
    not to be quantised, which transformers itself reads lazily.
    """
    from transformers.utils import cached_file

    def found(name: str) -> str | None:
        path: str | None = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        return path

    special = ("quantization_config", "auto_map", "transformers_weights")
    if (
        not quantize
        or any(getattr(config, name, None) for name in special)
        or getattr(type(config), "extra_files", None)
    ):
        return None
    if found("adapter_config.json"):
        return None
    if (file := found(WEIGHTS)) is not None:
        with safe_open(file, framework="pt") as opened:
            return {name: Stored(file, name) for name in opened.keys()}  # noqa: SIM118
    if (index := found(INDEX)) is None:
        return None
    places: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
    files = {name: cached_file(source, name) for name in sorted(set(places.values()))}
    return {name: Stored(files[place], name) for name, place in places.items()}


def read(
    weights: Mapping[str, Any], kind: type[Any], config: Any, dtype: torch.dtype, quantize: str | None
) -> tuple[Any, dict[str, Any]]:
    """Return a model of class `kind` and what transformers says that it found.

    Linear layers are packed if `quantize` says so, but for output layers that share the embeddings' weight.
    """
    if not isinstance(config, kind.config_class):
        config = config.get_text_config()  # of a model that sees and hears, the part that writes
    options: dict[str, Any] = {"config": config, "dtype": dtype, "state_dict": weights, **TELLING}
    if not quantize:
        model, found = kind.from_pretrained(None, **options)
        return model, found
    from longgraft.load_packed import while_reading

    packing = while_reading(BITS[quantize])
    try:
        model, found = kind.from_pretrained(None, quantization_config=packing, **options)
    except RuntimeError:
        if packing.refusal is not None:
            raise packing.refusal from None
        raise
    return model, found


def generation_config(source: str) -> Any:
    """Return the generation config of a checkpoint, as loading it by name would."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return GenerationConfig.from_pretrained(source, config_file_name="config.json", _from_model_config=True)
