"""Whose keys and values are these? What must agree before rows computed once may stand for rows computed again.

Knows modules and tensors; no cache and no file. The one idea: within a process it is enough to notice that a weight
was replaced or written to, which costs a millisecond a request; a file outlives the process, so it names the weights
by what they are, which means reading all of them once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longgraft.config import GraftError
from longgraft.quantized_linear import QuantizedLinear

# What a config says besides how the model computes: where it came from, and who wrote it down.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}
_HASHED_BYTES = 1 << 24


def signature(model: Any) -> bytes:
    """Return 32 bytes that change when a tensor of the model is replaced or written to, or other adapters are active.

    Writing through `tensor.data` goes unnoticed, as torch itself does not see it. Of this process only.
    """
    found = list[object]()
    for layer in model.modules():
        for own, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None and own not in layer._non_persistent_buffers_set:
                version = 0 if tensor.is_inference() else tensor._version
                found += (own, tensor.data_ptr(), version, tensor.dtype, tuple(tensor.shape))
    return hashlib.sha256(f"{found} {_adapters(model)}".encode()).digest()


def identity(model: Any) -> dict[str, str]:
    """Return what a model's keys and values depend on, by names that an error can show; reads every weight."""
    weights = hashlib.sha256()
    for name, tensor in _tensors(model):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for piece in _pieces(tensor):
            weights.update(piece)
    config = {key: value for key, value in model.config.to_dict().items() if key not in _INCIDENTAL}
    text = json.dumps(config, sort_keys=True, default=str)
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": _quantisation(model),
        "adapter": _adapters(model) or "none",
        "model": f"{type(model).__name__} {hashlib.sha256(text.encode()).hexdigest()[:16]}",
        "weights": weights.hexdigest(),
    }


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and saved buffer.

    Other buffers follow from the config; some are made anew by a forward (longrope's tables, by regime).
    """
    yield from model.named_parameters()
    for name, layer in model.named_modules():
        for own, buffer in layer.named_buffers(recurse=False):
            if own not in layer._non_persistent_buffers_set:
                yield f"{name}.{own}", buffer


def _pieces(tensor: Tensor) -> Iterator[Any]:
    """Yield a tensor's bytes, a few MiB at a time."""
    if tensor.device.type == "meta":
        raise GraftError("the model's weights are not in memory (meta device): expected a loaded model")
    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    for first in range(0, len(flat), _HASHED_BYTES):
        yield flat[first : first + _HASHED_BYTES].cpu().contiguous().numpy()


def _quantisation(model: Any) -> str:
    widths = {layer.bits for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    kinds = {f"int{min(widths)}"} if widths else set()  # an output layer may have more
    config = getattr(model.config, "quantization_config", None)
    if config is not None:
        kinds.add(str(getattr(config, "quant_method", type(config).__name__)))
    return ", ".join(sorted(kinds)) or "none"


def _adapters(model: Any) -> str:
    """Say which adapters are at work in which layers, and how strongly; "" without any (peft's names)."""
    found = hashlib.sha256()
    names = set[str]()
    for name, layer in model.named_modules():
        if not hasattr(type(layer), "merged"):  # cheaper to ask than the layer, which looks among its modules too
            continue
        active = getattr(layer, "active_adapters", None)
        if not isinstance(active, list) or not hasattr(layer, "merged_adapters"):
            continue
        merged, off = list(layer.merged_adapters), bool(getattr(layer, "disable_adapters", False))
        used = merged if off else sorted({*active, *merged})
        scaling = getattr(layer, "scaling", {})
        found.update(f"{name} {used} {merged} {[(one, scaling.get(one)) for one in used]}\n".encode())
        names.update(used)
    return f"{', '.join(sorted(names))} {found.hexdigest()[:16]}" if names else ""
