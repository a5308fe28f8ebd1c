"""Whether a report can be made at all: asked before anything long begins, so it imports nothing heavy."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from longgraft.config import GraftError


def check_report(path: str | os.PathLike[str]) -> None:
    """Raise `GraftError` if no report could be written to `path`."""
    require_jinja()
    target = Path(path)
    if not str(path) or target.is_dir():
        raise GraftError(f"{str(path)!r} is no name for a report: expected a file, like report.html")
    if not target.parent.is_dir():
        raise GraftError(f"{target}: the report cannot be written (there is no folder {target.parent})")
    if not os.access(target.parent, os.W_OK):
        raise GraftError(f"{target}: the report cannot be written (no permission to write in {target.parent})")


def require_jinja() -> None:
    """Raise `GraftError` if the template engine is missing."""
    if find_spec("jinja2") is None:
        raise GraftError("a report needs jinja2: pip install 'longgraft[report]'")
