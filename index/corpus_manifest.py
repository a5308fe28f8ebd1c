"""What a corpus consists of: the manifest, which names its segments and its table of files. Knows no tokens.

The manifest is the only file that is ever replaced, so one rename changes a corpus from one version to the next. It
carries the checksums of all that it names, and its own.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longgraft.config import GraftError
from longgraft.index import corpus_write
from longgraft.index.corpus_home import LOCK, MANIFEST, own_files
from longgraft.index.corpus_segment import SUFFIX, SegmentRecord, map_file
from longgraft.index.corpus_write import write_aside

FORMAT = "longgraft corpus"
SCHEMA = 1
FILES = ".files"
Stamp = tuple[int, int, int]  # bytes, time of last write, time of last change (ns)
UNKNOWN: Stamp = (-1, -1, -1)


class FileRow(NamedTuple):
    """One file that was looked at: `hash` of its text (hex), or the `reason` it was skipped for.

    A file whose stamp is the same is not read again; `UNKNOWN` fits none.
    """

    path: str
    stamp: Stamp
    hash: str
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a corpus. `built`: what the last build or update did, plain numbers."""

    tokenizer_name: str
    tokenizer_hash: str
    vocab_size: int
    roots: tuple[str, ...]
    max_file_bytes: int
    segments: tuple[SegmentRecord, ...] = ()
    files_name: str = ""
    files_checksum: int = 0
    num_files: int = 0
    num_copies: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    built: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens in all segments, without the sentinels."""
        return sum(one.num_tokens - one.num_documents for one in self.segments)


def read_manifest(folder: Path, shown: str) -> Manifest:
    """Return the manifest in a folder; a `GraftError` says what is wrong with the corpus called `shown`."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise GraftError(
            f"there is no corpus {shown!r} in {folder}: build it with `longgraft index build NAME PATH --tokenizer M`"
        ) from None
    except OSError as error:
        raise GraftError(f"{path} cannot be read ({error.strerror or error})") from error
    try:
        values = json.loads(data)
        if values["format"] != FORMAT or type(values["schema"]) is not int:
            raise ValueError(f"format is {values['format']!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupted(path) from error
    if values["schema"] > SCHEMA:
        raise GraftError(
            f"corpus {shown!r} has schema {values['schema']}, this longgraft reads {SCHEMA}: upgrade longgraft, "
            "or build the corpus again"
        )
    if values.pop("checksum", None) != _checksum(values):
        raise _corrupted(path)
    return _manifest(path, values)


def _manifest(path: Path, values: dict[str, Any]) -> Manifest:
    del values["format"], values["schema"]
    try:
        values["segments"] = tuple(SegmentRecord.of(one) for one in values["segments"])
        values["roots"] = tuple(values["roots"])
        return Manifest(**values)
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupted(path) from error


def _corrupted(path: Path) -> GraftError:
    return GraftError(f"{path} is corrupted: build the corpus again")


def _checksum(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make this the corpus's version, at once, then remove the files of older ones and of killed writers."""
    values = {"format": FORMAT, "schema": SCHEMA, **asdict(manifest)}
    values = json.loads(json.dumps(values))  # tuples are lists in what is read back
    text = json.dumps({**values, "checksum": _checksum(values)}, indent=1)
    write_aside(folder / MANIFEST, [text.encode()])
    remove_unused(folder, manifest)


def remove_unused(folder: Path, manifest: Manifest) -> None:
    """Remove files of ours that a version does not name; open ones stay readable to those who have them."""
    used = {MANIFEST, LOCK, manifest.files_name + FILES, *(one.name + SUFFIX for one in manifest.segments)}
    for path in own_files(folder):
        if path.name not in used:
            corpus_write.unlink(path)


def tidy(folder: Path) -> None:
    """Remove what a writer that failed has left, whichever version is in place. Needs the lock."""
    try:
        remove_unused(folder, read_manifest(folder, str(folder)))
    except GraftError:
        if not (folder / MANIFEST).exists():
            for path in own_files(folder):
                if path.name != LOCK:
                    corpus_write.unlink(path)


def write_files(folder: Path, rows: Sequence[FileRow]) -> tuple[str, int]:
    """Write the table of files under a new name; return name and checksum."""
    name, data = secrets.token_hex(8), json.dumps(rows).encode()
    write_aside(folder / (name + FILES), [data])
    return name, zlib.crc32(data)


class FileTable:
    """The table of files of one version, held open: it is read when first asked for, also after others replaced it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Map the file; FileNotFoundError if it is gone."""
        self.path = folder / (manifest.files_name + FILES)
        self._checksum = manifest.files_checksum
        self._data = map_file(self.path)

    def __len__(self) -> int:
        return len(self._data)

    def rows(self) -> list[FileRow]:
        """Return a row for each file that was looked at, in order of paths."""
        data = self._data.tobytes()
        try:
            if zlib.crc32(data) != self._checksum:
                raise _corrupted(self.path)
            return [FileRow(name, tuple(stamp), text_hash, why) for name, stamp, text_hash, why in json.loads(data)]
        except (ValueError, TypeError) as error:
            raise _corrupted(self.path) from error
