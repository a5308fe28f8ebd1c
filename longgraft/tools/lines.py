"""Lines as editors and version control see them: ended by a line feed and by nothing else."""

from __future__ import annotations

import difflib
import re

_BEHIND_BREAK = re.compile(r"(?<=\n)")


def lines_of(text: str) -> list[str]:
    """Return a text's lines with their ends; form feeds and the like, where `str.splitlines` breaks, end none."""
    return [line for line in _BEHIND_BREAK.split(text) if line]


def unified_diff(name: str, old: str, new: str) -> str:
    """Return the difference as `patch` and `git apply` take it; "" if there is none."""
    shown = name.lstrip("/")
    lines = difflib.unified_diff(lines_of(old), lines_of(new), f"a/{shown}", f"b/{shown}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
