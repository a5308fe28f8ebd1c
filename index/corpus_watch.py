"""Keeps a corpus up to date while its files change. Knows when something changed; what did is `corpus_build`'s affair.

The watcher is set up before the first look at the files, so that no change falls between the two.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.index.corpus_build import Change, refresh_corpus
from longgraft.index.corpus_files import NEVER, roots_of
from longgraft.index.corpus_home import folder_of
from longgraft.index.corpus_manifest import read_manifest

DEBOUNCE_MS = 1600  # a checkout writes many files; one update serves them all
LOOK_MS = 500


def watch_corpus(
    name_or_path: str | os.PathLike[str],
    tokenizer: Any,
    report: Callable[[Change | GraftError], None],
    *,
    debounce_ms: int = DEBOUNCE_MS,
    stop: threading.Event | None = None,
) -> None:
    """Bring a corpus up to date now and after every change, until `stop` is set or Ctrl-C.

    `report` gets each outcome; an error (a full disk, another writer) ends nothing, the next change tries again.
    """
    try:
        from watchfiles import watch
    except ImportError:
        raise GraftError("watching needs the package watchfiles: pip install 'longgraft[corpora]'") from None
    folder = folder_of(name_or_path)
    roots = roots_of(read_manifest(folder, os.fspath(name_or_path)).roots)
    own = os.path.realpath(folder)

    def matters(change: object, path: str) -> bool:
        is_own = (os.path.realpath(path) + os.sep).startswith(own + os.sep)
        return not is_own and NEVER.isdisjoint(Path(path).parts)

    options: dict[str, Any] = {"debounce": debounce_ms, "rust_timeout": LOOK_MS, "yield_on_timeout": True}
    is_first = True
    for changes in watch(*roots, watch_filter=matters, stop_event=stop, **options):
        if changes or is_first:
            is_first = False
            report(_refresh(name_or_path, tokenizer))


def _refresh(name_or_path: str | os.PathLike[str], tokenizer: Any) -> Change | GraftError:
    try:
        return refresh_corpus(name_or_path, tokenizer)
    except GraftError as error:
        return error
