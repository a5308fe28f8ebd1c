"""One stage of `scripts/gpu_check.py` by itself: `python -m longgraft.eval.gpu_stages NAME [--dry-run] [--out FILE]`.

Knows the stages by name and writes down what they find; each stage runs on the GPU, or with `--dry-run` on the CPU
with small sizes. The one idea: a check that fails is a line, not the end; only what a stage itself raises ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from longgraft.config import GraftError
from longgraft.eval import gpu_checks, gpu_times
from longgraft.eval.gpu_stage import Stage


def stages() -> dict[str, Callable[[Stage], None]]:
    """Return what runs under each name."""
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
