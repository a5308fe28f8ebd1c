"""Builds a corpus and brings it up to date. Knows what `corpus_survey` finds, and segments; nothing of lookups.

An update is a difference of sets: texts that no file holds any more leave their segments, which keeps the rest sorted;
texts that no segment holds go into a new one. Small segments are merged, so that there are few, each some times larger
than the one before. Old files are removed only when the new manifest is in place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longgraft.config import GraftError
from longgraft.index import corpus_segment
from longgraft.index.corpus import Corpus, open_corpus
from longgraft.index.corpus_files import MAX_FILE_BYTES, roots_of
from longgraft.index.corpus_home import PATIENCE, folder_of, foreign, locked
from longgraft.index.corpus_manifest import Manifest, remove_unused, tidy, write_files, write_manifest
from longgraft.index.corpus_segment import Arrays, Document, MappedSegment, SegmentRecord
from longgraft.index.corpus_survey import Progress, Survey
from longgraft.index.corpus_tokens import Encoder

SEGMENT_TOKENS = 1 << 24  # sorting takes some 20 bytes a token
GROWTH = 4  # a segment is merged with smaller ones that together hold a quarter of it
MAX_SEGMENTS = 8  # a lookup searches each


@dataclass(frozen=True, slots=True)
class Change:
    """What a build or an update did: the version there is now, and whether its texts differ from the one before."""

    manifest: Manifest
    is_new: bool
    num_added: int
    num_dropped: int


def build_corpus(
    name_or_path: str | os.PathLike[str],
    paths: Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    *,
    tokenizer_name: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress | None = None,
    patience: float = PATIENCE,
) -> Change:
    """Build a corpus of files and folders; one of that name is replaced when the new one is whole.

    `tokenizer`: see `corpus_tokens`. `progress` is called with (files looked at, tokens made). `patience`: seconds to
    wait for another writer. Raises `GraftError`; then, or when the process is killed, the corpus is as it was.
    """
    if max_file_bytes < 1:
        raise GraftError(f"max_file_bytes is {max_file_bytes}: expected 1 or more")
    folder, roots, encoder = folder_of(name_or_path), roots_of(paths), Encoder(tokenizer)
    stranger = foreign(folder)
    if stranger:
        raise GraftError(f"{folder} holds {stranger!r}, which is no corpus's: choose an empty folder or a name")
    blank = Manifest(tokenizer_name, encoder.hash, encoder.vocab_size, roots, max_file_bytes)
    with locked(folder, patience):
        return _Builder(folder, blank, None).run(encoder, progress)


def refresh_corpus(
    name_or_path: str | os.PathLike[str],
    tokenizer: Any,
    *,
    progress: Progress | None = None,
    patience: float = PATIENCE,
) -> Change:
    """Bring a corpus up to date with its files; only texts that are new are tokenised. Raises `GraftError`."""
    folder, encoder = folder_of(name_or_path), Encoder(tokenizer)
    open_corpus(name_or_path, encoder.hash).close()  # refuses before a lock makes a folder
    with locked(folder, patience), open_corpus(name_or_path, encoder.hash) as corpus:
        roots_of(corpus.manifest.roots)
        return _Builder(folder, corpus.manifest, corpus).run(encoder, progress)


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment to be: in its file already, or arrays that can be had."""

    num_tokens: int
    record: SegmentRecord | None
    arrays: Callable[[], Arrays]


class _Builder:
    """One run of a writer that has the lock."""

    def __init__(self, folder: Path, manifest: Manifest, old: Corpus | None) -> None:
        self._folder, self._manifest = folder, manifest
        self._old_rows = old.rows() if old else []
        self._old_segments = old.segments if old else []
        self._stored = {one.hex() for segment in self._old_segments for one in segment.hashes()}
        self._documents: list[Document] = []
        self._num_tokens = 0
        self._new: list[_Part] = []
        self._index_s = 0.0

    def run(self, encoder: Encoder, progress: Progress | None) -> Change:
        """Do it all; what was written is removed again if anything goes wrong."""
        try:
            survey = Survey(
                self._manifest, encoder, self._take, old_rows=self._old_rows, stored=self._stored, progress=progress
            )
            survey.run(self._folder)
            if not survey.tally.tokens and not self._old_rows:
                reasons = ", ".join(f"{n} {why}" for why, n in sorted(survey.skipped.items())) or "no files at all"
                raise GraftError(f"no text was found in {', '.join(self._manifest.roots)} ({reasons})")
            if self._documents:
                self._close_part()
            wanted = {row.hash for row in survey.rows if row.hash}
            kept = [part for segment in self._old_segments for part in self._remaining(segment, wanted)]
            return self._commit(self._settle([*kept, *self._new]), survey, wanted)
        except BaseException:
            tidy(self._folder)
            raise

    def _take(self, documents: list[Document]) -> None:
        """Gather new documents; a full segment goes to its file at once, so that memory stays bounded."""
        for one in documents:
            size = len(one.token_ids) + 1
            if self._documents and self._num_tokens + size > SEGMENT_TOKENS:
                self._close_part()
                self._new[-1] = self._saved(self._new[-1])
            self._documents.append(one)
            self._num_tokens += size

    def _close_part(self) -> None:
        arrays = corpus_segment.pack(self._documents)
        self._new.append(_Part(len(arrays.tokens), None, lambda: arrays))
        self._documents, self._num_tokens = [], 0

    def _remaining(self, segment: MappedSegment, wanted: set[str]) -> list[_Part]:
        """Return what is left of an old segment, or nothing."""
        is_wanted = np.array([one.hex() in wanted for one in segment.hashes()], bool)
        if is_wanted.all():
            return [_Part(segment.record.num_tokens, segment.record, segment.arrays)]
        size = int(np.diff(segment.starts)[is_wanted].sum())
        return [_Part(size, None, lambda: corpus_segment.keep(segment.arrays(), is_wanted))] if size else []

    def _settle(self, parts: Sequence[_Part]) -> list[SegmentRecord]:
        """Merge small segments, write what is not in a file yet, and return the records, oldest first."""
        records = []
        for group in merge_plan([part.num_tokens for part in parts]):
            part = parts[group[0]]
            if len(group) > 1:
                joined = corpus_segment.join([parts[i].arrays() for i in group])
                part = _Part(len(joined.tokens), None, lambda joined=joined: joined)  # type: ignore[misc]
            record = self._saved(part).record
            assert record is not None
            records.append(record)
        return records

    def _saved(self, part: _Part) -> _Part:
        if part.record is not None:
            return part
        start = time.perf_counter()
        record = corpus_segment.save(self._folder, part.arrays())
        self._index_s += time.perf_counter() - start
        return _Part(record.num_tokens, record, lambda: MappedSegment(self._folder, record).arrays())

    def _commit(self, segments: list[SegmentRecord], survey: Survey, wanted: set[str]) -> Change:
        if survey.rows == self._old_rows and tuple(segments) == self._manifest.segments:
            remove_unused(self._folder, self._manifest)
            return Change(self._manifest, False, 0, 0)
        survey.tally.index_s = self._index_s
        name, checksum = write_files(self._folder, survey.rows)
        num_texts = sum(1 for row in survey.rows if row.hash)
        manifest = replace(
            self._manifest,
            segments=tuple(segments),
            files_name=name,
            files_checksum=checksum,
            num_files=num_texts,
            num_copies=num_texts - len(wanted),
            skipped=dict(sorted(survey.skipped.items())),
            built=survey.tally.numbers() if survey.tally.tokens else self._manifest.built,
        )
        write_manifest(self._folder, manifest)
        num_dropped = len(self._stored - wanted)
        return Change(manifest, survey.tally.documents > 0 or num_dropped > 0, survey.tally.documents, num_dropped)


def merge_plan(sizes: Sequence[int]) -> list[list[int]]:
    """Return which segments, by place, become one; groups and members in order of place.

    Smallest first, as long as the next is at most `GROWTH` times what is gathered, or there would be more than
    `MAX_SEGMENTS`; none grows above `SEGMENT_TOKENS` by it.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    gathered: list[int] = []
    total = 0
    while order:
        following = sizes[order[0]]
        is_due = not gathered or following <= GROWTH * total or len(order) >= MAX_SEGMENTS
        if not is_due or (gathered and total + following > SEGMENT_TOKENS):
            break
        gathered.append(order.pop(0))
        total += following
    groups = [sorted(gathered), *([i] for i in order)] if gathered else []
    return sorted(groups, key=max)
