"""How much memory there is and how much something needs, so that a refusal comes before a killed process."""

from pathlib import Path
from typing import Any

import torch

from longgraft.config import BITS, GraftError
from longgraft.quantize import replaceable, width_of
from longgraft.quantized_linear import packed_bytes

GIB = 1024**3
# Automaton, successor rows and token lists, in bytes a token of context (measured: eval/LOG.md).
INDEX_BYTES_PER_TOKEN = 140


def available_bytes(device: torch.device) -> int | None:
    """Return bytes that can still be allocated on `device`, or None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = (_cgroup(name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(limit - used, 0))


def _cgroup(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def require(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Raise a `GraftError` that says how much is needed and how much is free, if it does not fit."""
    free = available_bytes(device)
    if free is not None and needed > free:
        raise GraftError(f"{what} needs {needed / GIB:.1f} GiB, {free / GIB:.1f} free on {device}; {advice}")


def skeleton(config: Any) -> Any:
    """Return the causal LM that a config describes, without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def weight_bytes(model: Any, dtype: torch.dtype, quantize: str | None = None) -> int:
    """Return the bytes of a model's weights in `dtype`, those of its linear layers packed for "int8" or "int4"."""
    total: int = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    if quantize is None:
        return total
    embeddings = model.get_input_embeddings().weight
    for layer in {id(layer): layer for layer in map(model.get_submodule, replaceable(model))}.values():
        total += packed_bytes(layer.out_features, layer.in_features, width_of(model, layer, BITS[quantize]))
        if layer.weight is not embeddings:  # else it gets a packed copy
            total -= layer.weight.numel() * dtype.itemsize
    return total


def loading_bytes(model: Any, dtype: torch.dtype, quantize: str | None, gguf: bool, lazily: bool) -> int:
    """Return the bytes that loading takes at its peak; `lazily`: tensors are read when their turn comes.

    Beside the weights: to quantise, the one that is being packed. For a GGUF file read at once, the largest tensor
    twice in fp32 (measured: eval/LOG.md).
    """
    largest = max(p.numel() for p in model.parameters())
    kept = weight_bytes(model, dtype, quantize)
    if not lazily:
        kept = max(kept, weight_bytes(model, dtype))
    return kept + (largest * dtype.itemsize if quantize else 0) + (largest * 8 if gguf and not lazily else 0)
