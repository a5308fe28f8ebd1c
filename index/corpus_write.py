"""Writing to disk so that a process killed at any moment, or a full disk, leaves the old version whole.

Knows bytes and names. The one idea: what is referred to is never changed. A file is written aside, forced to the disk
and renamed into place, and its folder is forced to the disk; the manifest, which refers to all others, comes last.
`write`, `sync`, `rename` and `unlink` are the only calls that change anything, so tests can end the process at each of
them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from longgraft.config import GraftError

ASIDE = ".part"


def write(file: BinaryIO, data: Any) -> None:
    """Write bytes, or an array's bytes."""
    file.write(data)


def sync(descriptor: int) -> None:
    """Return when what was written is on the disk."""
    os.fsync(descriptor)


def rename(source: Path, target: Path) -> None:
    """Put a file in the place of another, at once."""
    source.replace(target)


def unlink(path: Path) -> None:
    """Remove a file; one that is gone, or open on a system that forbids it, is left to the next writer."""
    with contextlib.suppress(OSError):
        path.unlink()


def write_aside(path: Path, chunks: Iterable[Any]) -> None:
    """Write a file of these chunks: afterwards it is whole and on the disk, or, with a `GraftError`, as it was."""
    aside = path.with_name(path.name + ASIDE)
    try:
        with aside.open("wb") as file:
            for chunk in chunks:
                write(file, chunk)
            file.flush()
            sync(file.fileno())
        rename(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        unlink(aside)
        raise GraftError(
            f"{path} could not be written ({error.strerror or error}): free some space or choose another folder; "
            "the corpus is as it was"
        ) from error
    except MemoryError as error:
        unlink(aside)
        raise GraftError(f"{path} could not be written: out of memory; the corpus is as it was") from error


def sync_folder(folder: Path) -> None:
    """Force a folder's names to the disk, where the file system can; the file itself is there in any case."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
