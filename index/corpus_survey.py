"""Looks at every file of a corpus and reads those that are new. Knows files and an encoder; no segments.

A document is a text, known by its hash, whatever files hold it: a renamed file costs nothing, a copy is stored once. A
file whose size and times are as they were is not even opened.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longgraft.index.corpus_files import IGNORED, PDF_FACTOR, UNREADABLE, Found, walk
from longgraft.index.corpus_manifest import UNKNOWN, FileRow, Manifest
from longgraft.index.corpus_segment import Document
from longgraft.index.corpus_text import NEEDS, PDF, Skipped, read_text
from longgraft.index.corpus_tokens import Encoder, text_hash

TOO_LARGE = "too large"
BATCH_CHARS = 1 << 22  # text given to the tokenizer at a time
# A file written so shortly before it was read may change again without its times showing it (2 s: FAT).
RACE_NS = 2_000_000_000
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Tally:
    """What a run did. `index_s`: sorting and writing."""

    files_read: int = 0
    bytes_read: int = 0
    documents: int = 0
    tokens: int = 0
    tokenise_s: float = 0.0
    index_s: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    def numbers(self) -> dict[str, float]:
        """Return it as plain numbers; speeds in tokens a second."""
        seconds = time.perf_counter() - self.start
        return {
            "files_read": self.files_read,
            "bytes_read": self.bytes_read,
            "tokens": self.tokens,
            "seconds": round(seconds, 3),
            "tokenise_s": round(self.tokenise_s, 3),
            "index_s": round(self.index_s, 3),
            "tokens_per_s": round(self.tokens / seconds, 1),
            "index_tokens_per_s": round(self.tokens / self.index_s, 1) if self.index_s and self.tokens else 0.0,
        }


class Survey:
    """One look at all files. `rows`: one a file, ignored ones excepted; `skipped`: how many for each reason."""

    def __init__(
        self,
        manifest: Manifest,
        encoder: Encoder,
        take: Callable[[list[Document]], None],
        *,
        old_rows: Sequence[FileRow] = (),
        stored: Collection[str] = (),
        progress: Progress | None = None,
    ) -> None:
        """`take` gets new documents, some at a time. `stored`: hashes of the texts that segments hold."""
        self.rows: list[FileRow] = []
        self.skipped: Counter[str] = Counter()
        self.tally = Tally()
        self._manifest, self._encoder, self._take = manifest, encoder, take
        self._known = {row.path: row for row in old_rows}
        self._stored = stored
        self._met = set(stored)
        self._progress = progress or (lambda files, tokens: None)
        self._texts: list[str] = []
        self._num_chars = 0
        self._began_ns = time.time_ns()

    def run(self, own_folder: Path) -> None:
        """Look at every file under the roots but those in the corpus's own folder."""
        for number, found in enumerate(walk(self._manifest.roots, own_folder)):
            if found.reason == IGNORED:
                self.skipped[IGNORED] += 1
                continue
            row = self._known.get(str(found.path))
            if row is None or row.stamp != found.stamp or not (row.reason or row.hash in self._stored):
                row = self._row(found)
            self.rows.append(row)
            if row.reason:
                self.skipped[row.reason] += 1
            if number % 64 == 0:
                self._progress(number, self.tally.tokens)
        self._tokenise()

    def _row(self, found: Found) -> FileRow:
        path, stamp = str(found.path), found.stamp
        if self._began_ns - max(stamp[1:]) < RACE_NS:
            stamp = UNKNOWN
        if found.reason:
            return FileRow(path, stamp, "", found.reason)
        limit = self._manifest.max_file_bytes * (PDF_FACTOR if found.path.suffix.lower() in PDF else 1)
        if found.stamp[0] > limit:
            return FileRow(path, stamp, "", TOO_LARGE)
        try:
            return FileRow(path, stamp, self._meet(self._read(found.path, limit)), "")
        except OSError:
            return FileRow(path, UNKNOWN, "", UNREADABLE)
        except Skipped as reason:
            # What can be read once a package is installed must be looked at again.
            return FileRow(path, UNKNOWN if NEEDS in str(reason) else stamp, "", str(reason))

    def _read(self, path: Path, limit: int) -> str:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise Skipped(TOO_LARGE)
        self.tally.files_read += 1
        self.tally.bytes_read += len(data)
        return read_text(path, data)

    def _meet(self, text: str) -> str:
        """Return a text's hash, and keep the text for tokenising if it is the first time."""
        text_id = text_hash(text).hex()
        if text_id not in self._met:
            self._met.add(text_id)
            self._texts.append(text)
            self._num_chars += len(text)
            if self._num_chars >= BATCH_CHARS:
                self._tokenise()
        return text_id

    def _tokenise(self) -> None:
        if not self._texts:
            return
        start = time.perf_counter()
        documents = self._encoder.encode(self._texts)
        self._texts, self._num_chars = [], 0
        self.tally.tokenise_s += time.perf_counter() - start
        self.tally.documents += len(documents)
        self.tally.tokens += sum(len(one.token_ids) for one in documents)
        self._take(documents)
