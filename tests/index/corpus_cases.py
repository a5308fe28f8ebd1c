"""What the tests of corpora share: a tokenizer of characters, segments in memory, and an oracle that scans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings

from longgraft.index import corpus_segment, corpus_twin
from longgraft.index.corpus_pages import page_sums
from longgraft.index.corpus_segment import Arrays, Document, pack

try:
    from longgraft.index import _corpus as NATIVE
except ImportError:  # the twin alone is tested where there is no compiler
    NATIVE = None  # type: ignore[assignment]

KINDS = [corpus_twin] if NATIVE is None else [corpus_twin, NATIVE]
NAMES = ["twin", "native"][: len(KINDS)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=NAMES)
QUICK = settings(deadline=None, max_examples=40, derandomize=True)


class Encoding(NamedTuple):
    ids: list[int]
    offsets: list[tuple[int, int]]


class Characters:
    """A tokenizer whose tokens are characters. `name` tells one from another; `num_encoded` counts texts."""

    truncation = None
    padding = None

    def __init__(self, name: str = "characters") -> None:
        self.name = name
        self.num_encoded = 0

    def to_str(self) -> str:
        return self.name

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)}

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[Encoding]:
        assert not add_special_tokens
        self.num_encoded += len(texts)
        places = [(i, i + 1) for i in range(max(map(len, texts)))]
        return [Encoding([min(ord(c), 255) for c in text], places[: len(text)]) for text in texts]

    encode_batch_fast = encode_batch


def ids(text: str) -> list[int]:
    return [min(ord(c), 255) for c in text]


def text_of(token_ids: Any) -> str:
    return "".join(map(chr, token_ids))


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def arrays_of(documents: Sequence[Sequence[int]]) -> Arrays:
    none = np.zeros(0, np.int32)
    return pack([Document(i.to_bytes(16, "big"), np.array(one, np.int32), none) for i, one in enumerate(documents)])


def searcher(kind: Any, segments: Sequence[Sequence[Sequence[int]]]) -> Any:
    """Return segments of documents, searched by the native code or its twin, without files."""
    made = kind.Segments()
    for documents in segments:
        arrays = arrays_of(documents)
        ends = np.empty_like(arrays.tokens)
        kind.sort_ends(arrays.tokens, ends)
        parts = [corpus_segment._padded(part) for part in (arrays.tokens, ends)]
        data = np.concatenate(parts)
        checked = np.zeros(len(data) // 4096, np.uint8)
        made.add(data, page_sums(data), checked, tokens_at=0, ends_at=len(parts[0]), n=len(ends), starts=arrays.starts)
    return made


def lookup(made: Any, context: Sequence[int], min_match: int = 1, limit: int = 1000) -> tuple[int, int, list[int]]:
    ends = np.empty(limit, np.int64)
    match_len, count, n = made.lookup(np.array(context, np.int32), min_match, ends)
    return match_len, count, ends[: max(n, 0)].tolist()


def scan(segments: Sequence[Sequence[Sequence[int]]], context: Sequence[int]) -> tuple[int, list[int]]:
    """Return (longest match of at most 32 tokens, all its ends), by looking everywhere."""
    best, ends, base = 0, [], 0
    for documents in segments:
        for document in documents:
            for end in range(1, len(document) + 1):
                length = 0
                while (
                    length < min(32, end, len(context))
                    and document[end - 1 - length] == context[len(context) - 1 - length]
                ):
                    length += 1
                if length > best:
                    best, ends = length, []
                if length == best and best:
                    ends.append(base + end)
            base += len(document) + 1
    return best, ends
