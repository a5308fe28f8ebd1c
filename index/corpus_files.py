"""Finds the files of a corpus: walks folders, heeds ignore files, says why one is left out. Knows no text, no tokens.

Rules are git's: a pattern holds in its own folder and below, a deeper file's patterns and later lines win, and nothing
comes back inside a folder that is left out. `.longgraftignore` has the same form and wins over `.gitignore`. Symbolic
links are not followed, so a loop is no loop. Everything is sorted: the same files give the same corpus.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longgraft.config import GraftError
from longgraft.index.corpus_manifest import Stamp

IGNORE_FILES = (".longgraftignore", ".gitignore")  # the first wins
NEVER = frozenset({".git", ".hg", ".svn"})
IGNORED = "ignored"
LINK = "symbolic link"
SPECIAL = "not a regular file"
UNREADABLE = "unreadable"
MAX_FILE_BYTES = 4 << 20  # larger text is data or generated; a book has 1-2 MB
PDF_FACTOR = 16  # pictures and fonts take most of a PDF


class Found(NamedTuple):
    """A file to read (`reason` empty), or something that is left out and why."""

    path: Path
    stamp: Stamp
    reason: str


class Rules(NamedTuple):
    """One ignore file: the folder it stands in, and its patterns."""

    folder: str
    spec: Any


def roots_of(paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return paths as absolute ones, sorted, each once; a `GraftError` names one that is not there."""
    if not paths:
        raise GraftError("no path was given: name the files and folders that the corpus is made of")
    found = set()
    for path in paths:
        full = Path(os.path.normpath(Path(path).expanduser().absolute()))
        if not full.exists():
            raise GraftError(f"{full} is not there: name files and folders that exist, or build the corpus of others")
        found.add(str(full))
    return tuple(sorted(found))


def walk(roots: Sequence[str], leave_out: Path) -> Iterator[Found]:
    """Yield every file under some absolute paths once, `leave_out` (the corpus's own folder) excepted."""
    seen: set[str] = set()
    for root in roots:
        if Path(root).is_dir():
            found = _walk_folder(root, os.path.realpath(leave_out))
        else:
            found = iter([_found(root, is_named=True)])
        for one in found:
            if str(one.path) not in seen:
                seen.add(str(one.path))
                yield one


def _walk_folder(root: str, leave_out: str) -> Iterator[Found]:
    stack: list[tuple[str, tuple[Rules, ...]]] = [(root, _rules_above(root))]
    while stack:
        folder, rules = stack.pop()
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            yield Found(Path(folder), (-1, -1, -1), UNREADABLE)
            continue
        rules = (*_rules_in(folder), *rules)
        folders = []
        for entry in listed:
            if entry.name in NEVER:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if _is_ignored(entry.path, is_folder, rules):
                yield Found(Path(entry.path), (-1, -1, -1), IGNORED)
            elif not is_folder:
                yield _found(entry.path)
            elif os.path.realpath(entry.path) != leave_out:
                folders.append((entry.path, rules))
        stack += reversed(folders)


def _found(path: str, is_named: bool = False) -> Found:
    try:
        about = Path(path).stat(follow_symlinks=is_named)
    except OSError:
        return Found(Path(path), (-1, -1, -1), UNREADABLE)
    stamp = (about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    if stat.S_ISLNK(about.st_mode):
        return Found(Path(path), stamp, LINK)
    return Found(Path(path), stamp, "" if stat.S_ISREG(about.st_mode) else SPECIAL)


def _is_ignored(path: str, is_folder: bool, rules: tuple[Rules, ...]) -> bool:
    """Ask the ignore files, nearest first; the first that says anything decides."""
    for one in rules:
        relative = path[len(one.folder.rstrip(os.sep)) + 1 :].replace(os.sep, "/")
        verdict = one.spec.check_file(relative + "/" * is_folder).include
        if verdict is not None:
            return bool(verdict)
    return False


def _rules_in(folder: str) -> list[Rules]:
    found = []
    for name in IGNORE_FILES:
        path = Path(folder) / name
        try:
            lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
        except OSError:
            continue
        if not lines:
            continue
        found.append(Rules(folder, _spec(lines)))
    return found


def _spec(lines: list[str]) -> Any:
    try:
        from pathspec import GitIgnoreSpec
    except ImportError:
        raise GraftError("ignore files need the package pathspec: pip install 'longgraft[corpora]'") from None
    kept = []
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:  # git passes over lines it cannot read, too
            continue
        kept.append(line)
    return GitIgnoreSpec.from_lines(kept)


def _rules_above(root: str) -> tuple[Rules, ...]:
    """Return what the ignore files between a folder and the top of its repository say, nearest first."""
    found: list[Rules] = []
    folder = Path(root)
    if (folder / ".git").exists():
        return ()
    for parent in folder.parents:
        found += _rules_in(str(parent))
        if (parent / ".git").exists():
            return tuple(found)
    return ()
