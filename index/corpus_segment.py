"""A segment: some documents' tokens with their suffix array, in one file that is never changed.

Knows no tokenizer and no paths: a document is known by the hash of its text. Layout, every part on a page of its own:
tokens [n] int32, each document ended by -1 · ends [n] int32, sorted (`corpus_twin.sort_ends`) · starts [d + 1] int32 ·
line starts [d + 1] int32 · hashes [d, 16] · lines [m] uint8 · one CRC-32 for each page above. Tokens and ends are 8
bytes a token; the rest is some 0.15. Removing documents keeps the order of the rest, so a segment is rewritten without
sorting.
"""

from __future__ import annotations

import mmap
import secrets
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index import corpus_twin
from longgraft.index.corpus_pages import PAGE_BYTES, Bytes, Corrupted, Sums, check_pages, num_pages, page_sums
from longgraft.index.corpus_write import write_aside

HASH_BYTES = 16
SUFFIX = ".segment"
ESCAPE = 255
Ints = npt.NDArray[np.int32]


@cache
def native() -> Any:
    """Return the native module, or, having said so, its twin where it was not built."""
    try:
        from longgraft.index import _corpus
    except ImportError:
        warnings.warn(
            "longgraft was installed without its native corpus module (no C++ compiler): building and searching "
            "corpora works but is many times slower. Install a compiler and reinstall longgraft.",
            RuntimeWarning,
            stacklevel=3,
        )
        return corpus_twin
    return _corpus


class Document(NamedTuple):
    """A text: the hash of it, its token ids [n], and for each line break the token that holds it, ascending."""

    hash: bytes
    token_ids: Ints
    breaks: Ints


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What a manifest says of one segment; enough to know the size and the checksum of its file."""

    name: str
    num_tokens: int
    num_documents: int
    num_line_bytes: int
    checksum: int

    @staticmethod
    def of(values: dict[str, Any]) -> SegmentRecord:
        """Return the record with these values; raises TypeError, ValueError or KeyError."""
        record = SegmentRecord(**{field.name: values[field.name] for field in fields(SegmentRecord)})
        numbers = (record.num_tokens, record.num_documents, record.num_line_bytes, record.checksum)
        in_range = all(type(n) is int and 0 <= n < 2**32 for n in numbers) and record.num_tokens < 2**31
        if not in_range or not record.name.isalnum():
            raise ValueError(f"segment {record.name!r}: numbers out of range")
        return record


class Arrays(NamedTuple):
    """The parts of a segment in memory, in the order of the file. `ends` counts as unsorted while empty."""

    tokens: Ints
    ends: Ints
    starts: Ints
    line_starts: Ints
    hashes: Bytes
    lines: Bytes


def places(record: SegmentRecord) -> list[tuple[int, int]]:
    """Return (first byte, number of bytes) of each part, the checksums last."""
    d = record.num_documents
    sizes = [4 * record.num_tokens, 4 * record.num_tokens, 4 * (d + 1), 4 * (d + 1), HASH_BYTES * d]
    sizes.append(record.num_line_bytes)
    found, at = [], 0
    for size in sizes:
        found.append((at, size))
        at += num_pages(size) * PAGE_BYTES
    return [*found, (at, 4 * (at // PAGE_BYTES))]


def pack(documents: Sequence[Document]) -> Arrays:
    """Return the arrays of new documents, ends not yet sorted."""
    if sum(len(one.token_ids) + 1 for one in documents) >= 2**31:
        raise GraftError("one file has more than 2 billion tokens: split it, or leave it out by max_file_bytes")
    stop = np.full(1, corpus_twin.SENTINEL, np.int32)
    tokens = np.concatenate([part for one in documents for part in (one.token_ids, stop)], dtype=np.int32)
    lines = [_line_codes(one.breaks) for one in documents]
    return Arrays(
        tokens,
        np.zeros(0, np.int32),
        _starts([len(one.token_ids) + 1 for one in documents]),
        _starts([len(codes) for codes in lines]),
        np.frombuffer(b"".join(one.hash for one in documents), np.uint8),
        np.concatenate(lines),
    )


def join(parts: Sequence[Arrays]) -> Arrays:
    """Return several segments' documents in one, ends not yet sorted."""
    return Arrays(
        np.concatenate([part.tokens for part in parts]),
        np.zeros(0, np.int32),
        _starts(np.concatenate([np.diff(part.starts) for part in parts])),
        _starts(np.concatenate([np.diff(part.line_starts) for part in parts])),
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.lines for part in parts]),
    )


def keep(arrays: Arrays, wanted: npt.NDArray[np.bool_]) -> Arrays:
    """Return the `wanted [d]` documents alone; the order of their ends stays. O(n)"""
    mask = np.repeat(wanted, np.diff(arrays.starts))
    line_mask = np.repeat(wanted, np.diff(arrays.line_starts))
    remaining = mask[arrays.ends - 1]
    moved = np.cumsum(mask, dtype=np.int32)[arrays.ends[remaining] - 1]
    return Arrays(
        arrays.tokens[mask],
        moved,
        _starts(np.diff(arrays.starts)[wanted]),
        _starts(np.diff(arrays.line_starts)[wanted]),
        arrays.hashes.reshape(-1, HASH_BYTES)[wanted].reshape(-1),
        arrays.lines[line_mask],
    )


def save(folder: Path, arrays: Arrays) -> SegmentRecord:
    """Sort the ends if need be, write the segment into a folder under a new name, and return its record."""
    if not len(arrays.ends):
        arrays = arrays._replace(ends=np.empty_like(arrays.tokens))
        native().sort_ends(arrays.tokens, arrays.ends)
    padded = [_padded(part) for part in arrays]
    sums = np.concatenate([page_sums(part) for part in padded])
    record = SegmentRecord(
        secrets.token_hex(8), len(arrays.tokens), len(arrays.starts) - 1, len(arrays.lines), zlib.crc32(sums.data)
    )
    write_aside(folder / (record.name + SUFFIX), (part.data for part in [*padded, sums]))
    return record


def _starts(lengths: npt.ArrayLike) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


def _padded(array: npt.NDArray[Any]) -> Bytes:
    data = np.ascontiguousarray(array).view(np.uint8)
    return np.pad(data, (0, -len(data) % PAGE_BYTES))


def _line_codes(breaks: Ints) -> Bytes:
    """Return distances from break to break, in bytes: 255 says that 255 more are to be added to the next."""
    gaps = np.diff(breaks, prepend=0)
    codes = np.full(int((gaps // ESCAPE).sum()) + len(gaps), ESCAPE, np.uint8)
    codes[np.cumsum(gaps // ESCAPE + 1) - 1] = gaps % ESCAPE
    return codes


def _breaks(codes: Bytes) -> npt.NDArray[np.int64]:
    return np.cumsum(codes, dtype=np.int64)[codes != ESCAPE]


class MappedSegment:
    """A segment in its file; nothing is returned before its page's checksum was compared."""

    def __init__(self, folder: Path, record: SegmentRecord) -> None:
        self.record = record
        self.path = folder / (record.name + SUFFIX)
        self._places = places(record)
        (sums_at, sums_bytes) = self._places[-1]
        self.data = map_file(self.path)
        self.num_bytes = sums_at + sums_bytes
        if len(self.data) != self.num_bytes:
            raise GraftError(f"{self.path} holds {len(self.data)} bytes, not {self.num_bytes}: build the corpus again")
        self.sums: Sums = self.data[sums_at:].view(np.uint32).copy()
        if zlib.crc32(self.sums.data) != record.checksum:
            raise GraftError(f"{self.path} is corrupted (its list of checksums): build the corpus again")
        self.data = self.data[:sums_at]
        self.checked: Bytes = np.zeros(len(self.sums), np.uint8)
        self.starts: Ints = self._part(2).view(np.int32)
        self._line_starts: Ints = self._part(3).view(np.int32)
        for starts, last in ((self.starts, record.num_tokens), (self._line_starts, record.num_line_bytes)):
            if starts[0] != 0 or starts[-1] != last or (np.diff(starts) < 0).any():
                raise GraftError(f"{self.path} is corrupted (where its documents begin): build the corpus again")

    def add_to(self, segments: Any) -> None:
        """Let `segments`, native or twin, search here too."""
        tokens_at, ends_at = self._places[0][0], self._places[1][0]
        where = {"tokens_at": tokens_at, "ends_at": ends_at, "n": self.record.num_tokens, "starts": self.starts}
        segments.add(self.data, self.sums, self.checked, **where)

    def tokens(self, begin: int, end: int) -> Ints:
        """Return a copy of tokens [begin, end)."""
        return self._read(4 * begin, 4 * end).view(np.int32)

    def hashes(self) -> list[bytes]:
        """Return the hash of each document's text."""
        data = self._part(4).tobytes()
        return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]

    def line(self, document: int, offset: int) -> int:
        """Return the line, from 1, on which a document's token begins."""
        at = self._places[5][0]
        begin, end = self._line_starts[document : document + 2].tolist()
        return 1 + int(np.searchsorted(_breaks(self._read(at + begin, at + end)), offset, "left"))

    def arrays(self) -> Arrays:
        """Return a copy of everything, compared with its checksums."""
        tokens, ends, starts, line_starts = (self._part(i).view(np.int32) for i in range(4))
        return Arrays(tokens, ends, starts, line_starts, self._part(4), self._part(5))

    def check_integrity(self, vocab_size: int) -> str:
        """Return "" or what is not as it should be; raises `GraftError` where a checksum is wrong. O(n log n)"""
        self._read(0, len(self.data), copy=False)
        tokens, ends, starts = self.arrays()[:3]
        if len(tokens) and not -1 <= tokens.min() <= tokens.max() < vocab_size:
            return "a token id is outside the vocabulary"
        if not np.array_equal(np.flatnonzero(tokens == corpus_twin.SENTINEL), starts[1:] - 1):
            return "a document does not end at its sentinel"
        again = np.empty_like(tokens)
        native().sort_ends(tokens, again)
        return "" if np.array_equal(ends, again) else "its ends are not sorted"

    def corrupted(self, page: int) -> GraftError:
        """Return the error that says which page is not what was written."""
        where = f"bytes {page * PAGE_BYTES} to {(page + 1) * PAGE_BYTES - 1}" if page >= 0 else "its suffix array"
        return GraftError(f"{self.path} is corrupted ({where}): build the corpus again")

    def _part(self, i: int) -> Bytes:
        at, size = self._places[i]
        return self._read(at, at + size)

    def _read(self, begin: int, end: int, copy: bool = True) -> Bytes:
        try:
            check_pages(self.data, self.sums, self.checked, begin, end)
        except Corrupted as where:
            raise self.corrupted(where.page) from None
        return self.data[begin:end].copy() if copy else self.data[begin:end]


def map_file(path: Path) -> Bytes:
    """Map a file for reading; FileNotFoundError where there is none, else a `GraftError`."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise GraftError(f"{path} is empty: build the corpus again")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise GraftError(f"{path} cannot be read ({error.strerror or error})") from error
