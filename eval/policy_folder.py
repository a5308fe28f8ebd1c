"""The folder of a benchmark: `settings.json`, one line of `cells.jsonl` for each finished cell, and reports.

A line is written at once and never changed, so a run may be killed anywhere: what stands there counts, half a line at
the end does not and is cut off. Knows cells as plain values; nothing of what they mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longgraft.config import GraftError

Cell = dict[str, Any]
KEY = ("context", "task", "seed", "repeat")


class Folder:
    """Where finished cells lie. A folder holds cells of one identity; anything else is refused."""

    def __init__(self, path: str, identity: dict[str, Any]) -> None:
        self.path = Path(path)
        self.file = self.path / "cells.jsonl"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / "cells").is_dir():
                raise GraftError(f"--out {path} holds cells of an older version: give another folder")
            self._cut_half_line()
            found = self.path / "settings.json"
            before = json.loads(found.read_text()) if found.exists() else None
            if self.file.exists() and self.file.stat().st_size:
                self._refuse_other(before, identity)
            elif before != identity:
                # Nothing was measured yet, so nothing is lost; but the tables belong to what was asked for before.
                for stale in self.path.glob("*cost_table.json"):
                    stale.unlink()
                write_whole(found, identity)
        except (OSError, ValueError) as error:
            if isinstance(error, GraftError):
                raise
            raise GraftError(f"--out {path}: cannot be used ({error}); give another folder") from None

    def _cut_half_line(self) -> None:
        """Drop what a killed run left behind its last whole line."""
        data = self.file.read_bytes() if self.file.exists() else b""
        if data and not data.endswith(b"\n"):
            os.truncate(self.file, data.rfind(b"\n") + 1)

    def _refuse_other(self, before: Any, identity: dict[str, Any]) -> None:
        before = before if isinstance(before, dict) else {}
        differing = [name for name, value in identity.items() if before.get(name) != value]
        if differing or before.keys() - identity.keys():
            raise GraftError(
                f"--out {self.path} holds cells of other settings ({', '.join(differing) or 'of another version'}): "
                "give another folder, or the settings it was begun with"
            )

    def add(self, cell: Cell) -> None:
        """Write one finished cell, so that it is there even if the machine stops."""
        with self.file.open("ab", buffering=0) as file:
            file.write(json.dumps(cell).encode() + b"\n")
            os.fsync(file.fileno())

    def cells(self) -> list[Cell]:
        """Return every finished cell, by context, task, seed and repeat, whatever the order they were measured in."""
        return read_cells(self.path)


def read_cells(folder: Path) -> list[Cell]:
    """Return the cells of a folder; raises `GraftError` for a line that is none."""
    file = folder / "cells.jsonl"
    found: dict[Any, Cell] = {}
    try:
        lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    except (OSError, ValueError) as error:
        raise GraftError(f"{file}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if line:
            try:
                cell = json.loads(line)
                found.setdefault(tuple(cell[name] for name in KEY), cell)
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    break  # half a line: another run is writing it, or was killed
                raise GraftError(
                    f"{file}, line {number}: not a cell of a benchmark ({error!r}); delete the line, and it is redone"
                ) from None
    return [found[key] for key in sorted(found)]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a name to write to, which becomes `path` in the end: that file is either whole or not there."""
    beside = path.with_suffix(f".{os.getpid()}.part")
    yield beside
    beside.replace(path)


def write_whole(path: Path, values: Any) -> None:
    """Write JSON so that the file is either whole or not there."""
    with whole(path) as beside:
        beside.write_text(json.dumps(values, indent=1) + "\n")
