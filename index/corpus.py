"""A corpus, opened for reading: documents that are not in the prompt, and where in them a context occurs.

Knows numpy and the files that `corpus_build` wrote; no tokenizer and no model. Opening maps files and reads little; a
lookup is one binary search a segment in an array of ends sorted by what stands before them. Whoever has a corpus open
keeps reading the version that was opened while others update or remove it. Files are mapped: they must not be cut short
by other programs while they are open, which ends the reading process on most systems; nothing here ever does it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index import corpus_segment
from longgraft.index.corpus_home import folder_of
from longgraft.index.corpus_manifest import FileRow, FileTable, Manifest, read_manifest
from longgraft.index.corpus_segment import MappedSegment
from longgraft.index.corpus_twin import DEPTH

Ints = npt.NDArray[np.int32]
MIN_MATCH = 2  # REST's shortest suffix (arXiv 2311.08252, its code); single tokens say nothing
MAX_LIMIT = 1024
UNKNOWN_FILE = "(unknown file)"
MAX_LENGTH = 4096
NO_ENDS = np.zeros(0, np.int64)
ATTEMPTS = 20  # to open, while writers replace one version after the other


@dataclass(frozen=True, slots=True)
class Hits:
    """The longest suffix of a context that occurs: its length, how often, and some of the places it ends at. [k]

    An end is the number of tokens of the whole corpus, sentinels included, up to and with the match.
    """

    match_len: int
    count: int
    ends: npt.NDArray[np.int64]


class Passage(NamedTuple):
    """Tokens [n] of one document and where they begin in it."""

    token_ids: Ints
    document: int
    offset: int


class Document(NamedTuple):
    """One text: its file (the first of several that hold the same), other files that do, and its length."""

    path: str
    copies: tuple[str, ...]
    num_tokens: int


NOTHING = Hits(0, 0, NO_ENDS)


class Corpus:
    """One version of a corpus. Methods raise `GraftError` where a file is found to be corrupted."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Open the files that a manifest names; FileNotFoundError if one is gone."""
        self.folder = folder
        self.manifest = manifest
        self.num_tokens = manifest.num_tokens
        self._table = FileTable(folder, manifest)
        segments = [MappedSegment(folder, one) for one in manifest.segments]
        self._open: list[MappedSegment] | None = segments
        self._native: Any = corpus_segment.native().Segments()
        for segment in segments:
            segment.add_to(self._native)
        self._bases = np.cumsum([0, *(one.record.num_tokens for one in segments)])
        self._first = np.cumsum([0, *(one.record.num_documents for one in segments)])

    def __enter__(self) -> Corpus:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def lookup(self, context: npt.ArrayLike, min_match: int = MIN_MATCH, limit: int = 8) -> Hits:
        """Return the longest suffix of `context [n]` that occurs, of at most 32 tokens, and where.

        `count` is exact. At most `limit` of the places are given, spread evenly over all, one a document before a
        second of any, newest segment first; the same every time. No hit if fewer than `min_match` tokens match. O(log
        tokens) a segment.
        """
        if not 0 <= limit <= MAX_LIMIT:
            raise GraftError(f"limit is {limit}: expected 0 to {MAX_LIMIT}")
        ends = np.empty(limit, np.int64)
        match_len, count, n = self._searcher().lookup(_tail(context), min_match, ends)
        if match_len < 0:
            raise self.segments[count].corrupted(n)
        return Hits(match_len, count, ends[:n]) if match_len else NOTHING

    def following(self, ends: npt.ArrayLike, length: int) -> Ints:
        """Return the `length` tokens behind each of `ends [k]`, -1 from the end of a document on. [k, length]"""
        array = np.ascontiguousarray(ends, np.int64).reshape(-1)
        if not 0 <= length <= MAX_LENGTH:
            raise GraftError(f"length is {length}: expected 0 to {MAX_LENGTH}")
        if len(array) and not 0 < array.min() <= array.max() <= self._bases[-1]:
            raise GraftError(f"ends are {array.min()} to {array.max()}: expected 1 to {self._bases[-1]}")
        out = np.empty((len(array), length), np.int32)
        status, number, page = self._searcher().follow(array, self.manifest.vocab_size, out)
        if status:
            raise self.segments[number].corrupted(page)
        return out

    def passage(self, end: int, before: int, after: int) -> Passage:
        """Return the tokens around an end of `Hits`, at most so many before and after it, clipped to the document."""
        if before < 0 or after < 0:
            raise GraftError(f"before is {before} and after is {after}: expected 0 or more")
        if not 0 < end <= self._bases[-1]:
            raise GraftError(f"end is {end}: expected 1 to {self._bases[-1]}, as `lookup` returned it")
        number = int(np.searchsorted(self._bases, end, "left")) - 1
        segment, local = self.segments[number], int(end - self._bases[number])
        document = int(np.searchsorted(segment.starts, local - 1, "right")) - 1
        first, stop = int(segment.starts[document]), int(segment.starts[document + 1]) - 1
        local = min(local, stop)
        begin = max(first, local - before)
        token_ids = segment.tokens(begin, min(stop, local + after))
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self.manifest.vocab_size:
            raise segment.corrupted(-1)
        return Passage(token_ids, int(self._first[number]) + document, begin - first)

    def origin(self, document: int, offset: int) -> tuple[str, int]:
        """Return (file, line from 1) of a document's token; of HTML and PDF, the line of the text that was read."""
        found = self.documents[document] if 0 <= document < len(self.documents) else None
        if found is None or not 0 <= offset <= found.num_tokens:
            raise GraftError(f"document {document}, offset {offset}: there is no such place in {self.folder}")
        number = int(np.searchsorted(self._first, document, "right")) - 1
        return found.path, self.segments[number].line(document - int(self._first[number]), offset)

    @cached_property
    def documents(self) -> tuple[Document, ...]:
        """Every document, in the order of their numbers. Read when first asked for."""
        paths: dict[str, list[str]] = defaultdict(list)
        for row in self.rows():
            paths[row.hash].append(row.path)
        found = []
        for segment in self.segments:
            lengths = (np.diff(segment.starts) - 1).tolist()
            for text_hash, length in zip(segment.hashes(), lengths):
                names = paths.get(text_hash.hex()) or [UNKNOWN_FILE]
                found.append(Document(names[0], tuple(names[1:]), length))
        return tuple(found)

    def rows(self) -> list[FileRow]:
        """Return a row for each file that was looked at, skipped ones included."""
        return self._table.rows()

    def is_current(self) -> bool:
        """Tell whether what was opened is still the newest version. Reads the manifest."""
        try:
            return read_manifest(self.folder, str(self.folder)) == self.manifest
        except GraftError:
            return False

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first thing that is not as it should be. O(n log n): sorts again."""
        try:
            for segment in self.segments:
                wrong = segment.check_integrity(self.manifest.vocab_size)
                if wrong:
                    return f"{segment.path}: {wrong}"
            hashes = [one for segment in self.segments for one in segment.hashes()]
            if len(set(hashes)) < len(hashes):
                return f"{self.folder} holds a text twice"
            if any(one.path == UNKNOWN_FILE for one in self.documents):
                return f"{self.folder} holds a text that no file has"
        except GraftError as error:
            return str(error)
        return ""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk: segments and table of files."""
        return sum(segment.num_bytes for segment in self.segments) + len(self._table)

    def close(self) -> None:
        """Let go of the files; whatever was returned stays valid."""
        self._open = None
        self._native = None

    @property
    def segments(self) -> list[MappedSegment]:
        """The files that a lookup searches, oldest first."""
        if self._open is None:
            raise GraftError(f"the corpus in {self.folder} was closed: open it again")
        return self._open

    def _searcher(self) -> Any:
        if self._native is None:
            raise GraftError(f"the corpus in {self.folder} was closed: open it again")
        return self._native


def open_corpus(name_or_path: str | os.PathLike[str], tokenizer_hash: str | None = None) -> Corpus:
    """Open a corpus by name or folder; numpy alone is needed.

    `tokenizer_hash`: `corpus_tokens.tokenizer_hash` of the tokenizer whose ids will be looked up; another one than the
    corpus was built with is refused. A `GraftError` says what is missing, corrupted or too new.
    """
    folder, shown = folder_of(name_or_path), os.fspath(name_or_path)
    for _ in range(ATTEMPTS):
        manifest = read_manifest(folder, shown)
        if tokenizer_hash is not None and tokenizer_hash != manifest.tokenizer_hash:
            raise GraftError(
                f"corpus {shown!r} was built with another tokenizer ({manifest.tokenizer_name or 'unnamed'}): "
                "its token ids mean something else here; build it again with this model's tokenizer"
            )
        try:
            return Corpus(folder, manifest)
        except FileNotFoundError as error:
            missing = error.filename
            if manifest == read_manifest(folder, shown):
                break
    raise GraftError(f"corpus {shown!r} lacks its file {missing}: build it again")


def _tail(context: npt.ArrayLike) -> Ints:
    """Return what can match of a context, as int32; tokens that no tokenizer makes match nothing."""
    is_row = isinstance(context, list | tuple) or (isinstance(context, np.ndarray) and context.ndim == 1)
    try:
        array = np.asarray(context[-DEPTH:] if is_row else context)  # type: ignore[index]
    except ValueError:
        raise GraftError("context is a list of unequal lists: expected one row of integers") from None
    if array.dtype == np.int32 and array.ndim == 1:
        return np.ascontiguousarray(array[-DEPTH:])
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GraftError(f"context has shape {array.shape} and type {array.dtype}: expected one row of integers")
    array = array[-DEPTH:]
    return np.where((array < 0) | (array >= 2**31), -1, array).astype(np.int32)
