"""Brings passages of corpora into a context index when what was written last occurs in them.

Knows corpora and the index, no model. The one idea: a corpus is far too large to rank within, but a few hundred
tokens round each place where the context occurs are not. They are made one more text to copy from, and everything
the ranking knows (pointer, substitutions, look-ups at every node) then works on them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.corpus import Corpus
from longgraft.tree import Source

IntArray = npt.NDArray[np.int32]
MIN_MATCH = 4  # shorter matches are nearly everywhere in a large corpus
HITS = 4  # passages brought for one context
BEFORE, AFTER = 32, 256  # tokens of a passage round the match
MAX_TOKENS = 1 << 16  # passages held; beyond, all are dropped and gathering starts anew


class Texts(Protocol):
    """What the feed asks of an index."""

    @property
    def fed_len(self) -> int:
        """Tokens of passages brought so far."""

    def add_text(self, name: str, token_ids: npt.ArrayLike, source: Source, offset: int = 0, line: int = 1) -> int:
        """Make a piece of a document something to copy from."""

    def clear_fed(self) -> None:
        """Forget the passages."""


class CorpusFeed:
    """Looks the end of a context up in corpora and brings what it finds to an index, each passage once."""

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        self.corpora = tuple(corpora)
        self._brought: set[tuple[int, int, int]] = set()

    def bring(self, index: Texts, context: IntArray) -> None:
        """Bring passages that follow the longest suffix of `context [n]` that occurs in each corpus."""
        if index.fed_len > MAX_TOKENS:
            index.clear_fed()
            self.reset()
        for number, corpus in enumerate(self.corpora):
            hits = corpus.lookup(context, MIN_MATCH, HITS)
            for end in hits.ends.tolist():
                self._bring(index, number, corpus, end)

    def _bring(self, index: Texts, number: int, corpus: Corpus, end: int) -> None:
        passage = corpus.passage(end, BEFORE, AFTER)
        # Half-overlapping windows: a place near the end of one passage begins the next.
        window = (number, passage.document, (passage.offset + BEFORE) // (AFTER // 2))
        if window in self._brought or len(passage.token_ids) < 2:
            return
        self._brought.add(window)
        path, line = corpus.origin(passage.document, passage.offset)
        index.add_text(path, passage.token_ids, Source.CORPUS, passage.offset, line)

    def reset(self) -> None:
        """Forget which passages were brought."""
        self._brought.clear()


def check_vocabulary(corpora: Sequence[Corpus], vocab_size: int) -> None:
    """Raise `GraftError` if a corpus holds tokens that the model does not know."""
    for corpus in corpora:
        if corpus.manifest.vocab_size > vocab_size:
            raise GraftError(
                f"corpus {corpus.folder.name} has a vocabulary of {corpus.manifest.vocab_size} tokens, the model one "
                f"of {vocab_size}: build it again with this model's tokenizer"
            )
