"""Brings passages of corpora into a context index when what was written last occurs in them.

Knows corpora and the index, no model. The one idea: a corpus is far too large to rank within, but a few hundred
tokens round each place where the context occurs are not. They are made one more text to copy from, and everything
the ranking knows (pointer, substitutions, look-ups at every node) then works on them unchanged.
"""

from __future__ import annotations

import warnings
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

    def add_text(
        self,
        name: str,
        token_ids: npt.ArrayLike,
        source: Source,
        *,
        offset: int = 0,
        line: int = 1,
        document: int | None = None,
    ) -> int:
        """Make a piece of a document something to copy from; returns the document's number."""

    def clear_fed(self) -> None:
        """Forget the passages."""


class CorpusFeed:
    """Looks the end of a context up in corpora and brings what it finds to an index, each passage once.

    A corpus that cannot be read any more is left out from then on, with a warning: no request fails for want of a
    proposal.
    """

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        self.corpora = tuple(corpora)
        self._lost: set[int] = set()  # corpora, by number
        self.reset()

    def bring(self, index: Texts, context: IntArray) -> None:
        """Bring passages that follow the longest suffix of `context [n]` that occurs in each corpus."""
        if index.fed_len > MAX_TOKENS:
            index.clear_fed()
            self._brought.clear()
        for number, corpus in enumerate(self.corpora):
            if number in self._lost:
                continue
            try:
                hits = corpus.lookup(context, MIN_MATCH, HITS)
                for end in hits.ends.tolist():
                    self._bring(index, number, corpus, end)
            except GraftError as error:
                self._lost.add(number)
                warnings.warn(f"{error}; this request goes on without it", RuntimeWarning, stacklevel=2)

    def _bring(self, index: Texts, number: int, corpus: Corpus, end: int) -> None:
        passage = corpus.passage(end, BEFORE, AFTER)
        # Half-overlapping windows: a place near the end of one passage begins the next.
        window = (number, passage.document, (passage.offset + BEFORE) // (AFTER // 2))
        if window in self._brought or len(passage.token_ids) < 2:
            return
        path, line = corpus.origin(passage.document, passage.offset)
        text = (number, passage.document)
        self._documents[text] = index.add_text(
            path,
            passage.token_ids,
            Source.CORPUS,
            offset=passage.offset,
            line=line,
            document=self._documents.get(text),
        )
        self._brought.add(window)

    def reset(self) -> None:
        """Forget which passages were brought, and the numbers of their documents."""
        self._brought: set[tuple[int, int, int]] = set()
        self._documents: dict[tuple[int, int], int] = {}  # (corpus, document in it): document of the index


def check_corpora(corpora: Sequence[Corpus], tokenizer_hash: str | None, vocab_size: int) -> None:
    """Raise `GraftError` if a corpus is closed, was built with another tokenizer or holds tokens unknown to the model.

    `tokenizer_hash`: of the tokenizer whose ids will be looked up (None: not known).
    """
    for corpus in corpora:
        _ = corpus.segments  # raises if it was closed
        if tokenizer_hash is not None and corpus.manifest.tokenizer_hash != tokenizer_hash:
            raise GraftError(
                f"corpus {corpus.folder.name} was built with another tokenizer: build it again with this model's"
            )
        if corpus.manifest.vocab_size > vocab_size:
            raise GraftError(
                f"corpus {corpus.folder.name} has a vocabulary of {corpus.manifest.vocab_size} tokens, the model one "
                f"of {vocab_size}: build it again with this model's tokenizer"
            )
