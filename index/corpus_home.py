"""Where corpora live, and who may write: names, folders and the writer's lock. Knows nothing of what a corpus holds.

A name stands for a folder under LONGGRAFT_HOME, or else the platform's folder for data; anything with a separator in
it is a folder itself. The lock belongs to an open file, so the system takes it back from a process that was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from longgraft.config import GraftError
from longgraft.index import corpus_write
from longgraft.index.corpus_write import ASIDE

MANIFEST = "manifest.json"
LOCK = "lock"
OURS = re.compile(rf"(manifest\.json|[0-9a-f]{{16}}\.(segment|files))({re.escape(ASIDE)})?|lock")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
PATIENCE = 10.0  # seconds that a second writer waits
POLL = 0.05


def home() -> Path:
    """Return the folder of everything longgraft keeps: LONGGRAFT_HOME, or the platform's folder for data."""
    chosen = os.environ.get("LONGGRAFT_HOME")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "longgraft"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "longgraft"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "longgraft"


def folder_of(name_or_path: str | os.PathLike[str]) -> Path:
    """Return a corpus's folder: a plain name lives in `home()`, a path is the folder itself."""
    text = os.fspath(name_or_path)
    if not isinstance(name_or_path, str) or any(mark in text for mark in ("/", os.sep)) or text.startswith("~"):
        return Path(os.path.normpath(Path(text).expanduser().absolute()))
    if not NAME.fullmatch(text):
        raise GraftError(f"corpus name {text!r}: expected up to 100 letters, digits, '.', '_' and '-', or a path")
    return (home() / "corpora" / text).absolute()


def names() -> list[str]:
    """Return the names of the corpora in `home()`, sorted."""
    folder = home() / "corpora"
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(path.name for path in found if (path / MANIFEST).is_file() and NAME.fullmatch(path.name))


def foreign(folder: Path) -> str:
    """Return the name of something in a folder that no corpus put there, or ""."""
    entries = folder.iterdir() if folder.is_dir() else iter(())
    return min((path.name for path in entries if not OURS.fullmatch(path.name)), default="")


def own_files(folder: Path) -> list[Path]:
    """Return the files in a folder that belong to a corpus, finished or not."""
    return [path for path in folder.iterdir() if OURS.fullmatch(path.name)]


def remove(name_or_path: str | os.PathLike[str], patience: float = PATIENCE) -> None:
    """Remove a corpus; whoever has it open keeps reading. Other files in its folder stay."""
    folder = folder_of(name_or_path)
    found = own_files(folder) if folder.is_dir() else []
    if not any(path.name != LOCK for path in found):
        raise GraftError(f"there is no corpus {os.fspath(name_or_path)!r} in {folder}")
    with locked(folder, patience):
        corpus_write.unlink(folder / MANIFEST)  # first: from here on there is no corpus
        for path in own_files(folder):
            corpus_write.unlink(path)
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextmanager
def locked(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Be the only writer of a folder, made if need be; a `GraftError` if another is still after `patience` seconds."""
    end = time.monotonic() + patience
    while (file := _take(folder)) is None:
        if time.monotonic() >= end:
            raise GraftError(f"the corpus in {folder} is being written by another process: wait until it has finished")
        time.sleep(POLL)
    with file:
        yield


def _take(folder: Path) -> IO[bytes] | None:
    """Return the open lock file, or None while another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
        if _lock(file) and _is_still(file, folder / LOCK):
            return file
    except OSError as error:
        raise GraftError(
            f"{folder} cannot be written or locked ({error.strerror or error}): choose another folder"
        ) from error
    file.close()
    return None


def _is_still(file: IO[bytes], path: Path) -> bool:
    """Tell whether a name still means the open file; `remove` may have come between."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> bool:
        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
