"""What a reader needs to judge a figure: machine, versions, commit. Knows nothing of what is measured.

`environment` is what figures of one table must share; `details` adds what only needs to be told.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from longgraft import __version__
from longgraft.config import GraftError
from longgraft.eval.git import commit_of, git
from longgraft.memory import GIB

PACKAGES = ("torch", "transformers", "numpy", "tokenizers")


def environment() -> dict[str, Any]:
    """Return processor, threads, torch and Python."""
    return {
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def details() -> dict[str, Any]:
    """Return everything a reader may ask for, JSON-ready; `commit` is None outside a checkout."""
    found = environment() | {"cores": os.cpu_count(), "memory_gib": _memory(), "system": platform.platform()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    found |= {"longgraft": __version__, "commit": commit()}
    return found | {name: _version(name) for name in PACKAGES if name not in found}


def commit() -> str | None:
    """Return the commit of the checkout this code runs from, None where it was installed."""
    here = Path(__file__).resolve().parent
    try:
        top = Path(git(here, "rev-parse", "--show-toplevel").decode().strip())
        # An installed copy may lie inside a repository of somebody else.
        return commit_of(top) if here == top / "eval" else None
    except GraftError:
        return None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1)
    except (ValueError, OSError, AttributeError):  # not every system says
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
