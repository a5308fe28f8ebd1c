"""One stage of the GPU check: where it runs, and what it found.

The one idea: a check that fails is a line, not the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

# What says that a package or a kind of tensor is not there, rather than that something is wrong.
MISSING = ("cannot be imported", "longgraft[", "needs a CUDA device", "has no softcap", "is not one of", "needs a C++")


@dataclass
class Stage:
    """Where a stage runs and what it found.

    `checks`: name, ok (None: could not run here) and detail. `figures`: a name, numbers by name, and `text` for people.
    """

    device: torch.device
    is_dry: bool
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def size(self, real: int, dry: int) -> int:
        """Return a size: the real one, or the one for a dry run."""
        return dry if self.is_dry else real

    def check(self, name: str, is_ok: bool | None, detail: str = "") -> None:
        """Write down whether something holds."""
        self.checks.append({"name": name, "ok": is_ok, "detail": detail})

    def figure(self, name: str, text: str = "", **numbers: Any) -> None:
        """Write down numbers; those with a text stand in the table."""
        self.figures.append({"name": name, "text": text, **numbers})

    @contextmanager
    def contained(self, name: str) -> Iterator[None]:
        """Make whatever the enclosed block raises a failed check of this name, or one that could not run here."""
        try:
            yield
        except Exception as error:  # whatever compilers, drivers and models raise
            is_missing = isinstance(error, ModuleNotFoundError) or any(words in str(error) for words in MISSING)
            self.check(name, None if is_missing else False, f"{type(error).__name__}: {error}")

    def wait(self) -> None:
        """Wait until the device has done all that was queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
