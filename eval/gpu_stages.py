"""One stage of `scripts/gpu_check.py` by itself: `python -m longgraft.eval.gpu_stages NAME [--dry-run] [--out FILE]`.

Knows the stages by name and writes down what they find; each stage runs on the GPU, or with `--dry-run` on the CPU
with small sizes. The one idea: a check that fails is a line, not the end; only what a stage itself raises ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longgraft.config import GraftError

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


def stages() -> dict[str, Callable[[Stage], None]]:
    """Return what runs under each name."""
    from longgraft.eval import gpu_checks, gpu_times

    return {
        "ceilings": gpu_times.ceilings,
        "noise": gpu_checks.noise,
        "index": gpu_checks.index,
        "attention": gpu_checks.attention,
        "lossless": gpu_checks.lossless,
        "forwards": gpu_times.forwards,
        "rounds": gpu_times.rounds,
    }


def main(argv: list[str] | None = None) -> int:
    """Run one stage and write what it found, also where it ends in an error; 0 if it ran to its end."""
    known = stages()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", choices=known)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        raise GraftError("this torch sees no CUDA device: run with --dry-run, or on a machine with a GPU")
    stage = Stage(torch.device("cpu" if options.dry_run else "cuda"), options.dry_run)
    try:
        with torch.no_grad():
            known[options.name](stage)
    finally:
        found = json.dumps({"checks": stage.checks, "figures": stage.figures}, indent=1)
        if options.out is not None:
            options.out.write_text(found)
        else:
            sys.stdout.write(found + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
