"""How much memory there is and how much something needs, so that a refusal comes before a killed process."""

from pathlib import Path
from typing import Any

import torch

from longgraft.config import GraftError

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


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a causal LM's weights, counted on a model without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize
