"""The index of one sequence: its own prompt and history, texts from elsewhere, and what the target last thought.

Knows no model and no other request. Everything it proposes comes out of one list per node, in which matches, the
source pointer's place, substitutions, successor rows and recent tokens compete by calibrated probability (see
`weights.py`). Every node knows the document and the offset that it was copied from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.corpus_feed import CorpusFeed
from longgraft.index.learnt_index import ELSEWHERE, LearntIndex
from longgraft.index.successor_table import SuccessorTable
from longgraft.index.suffix_automaton import MIN_PROBABILITY, NO_PATH, as_token_ids
from longgraft.index.weights import Weights
from longgraft.tree import Continuation, Source

CONTEXT_DOCUMENT = 0  # the sequence itself, in origins
SOURCES = np.array([Source.PROMPT, Source.HISTORY, Source.SUCCESSOR], np.int8)
TAIL = 32  # tokens of context that a corpus is asked about


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A text from elsewhere: where its tokens stand in the side text, in their document, and on which line."""

    token_ids: npt.NDArray[np.int32]
    source: Source
    document: int
    offset: int
    line: int


class ContextIndex:
    """Learnt index and successor table of one sequence, as one `Retriever`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        num_successors: int = 8,
        threshold: float = MIN_PROBABILITY,
        weights: Weights | None = None,
        token_kinds: npt.NDArray[np.uint8] | None = None,
        feed: CorpusFeed | None = None,
    ) -> None:
        if vocab_size < 1:
            raise GraftError(f"vocab_size is {vocab_size}: expected 1 or more")
        self.threshold = threshold
        self.feed = feed
        self.text = LearntIndex(vocab_size, weights=weights, token_kinds=token_kinds)
        self.successors = SuccessorTable(vocab_size, num_successors)
        self._prompt_len: int | None = None
        self._tail: npt.NDArray[np.int32] = NO_PATH
        self.reset()

    def __len__(self) -> int:
        return len(self.text)

    @property
    def prompt_len(self) -> int:
        """Tokens that count as prompt: what `begin` said, else all before the first that was learnt from."""
        return len(self) if self._prompt_len is None else self._prompt_len

    @property
    def is_alone(self) -> bool:
        """Whether the sequence itself is all there is to copy from."""
        return not self._pieces and self.feed is None

    def begin(self, prompt_len: int | None = None) -> None:
        """Mark where the prompt ends (default: here); later tokens are history."""
        self._prompt_len = len(self) if prompt_len is None else prompt_len
        self.text.begin(self._prompt_len)

    def extend(self, token_ids: npt.ArrayLike, learn: bool = False) -> None:
        """Take in committed tokens [n]; -1 separates documents. O(n) amortised; all or, on an error, none."""
        if learn and self._prompt_len is None:
            self.begin()
        self.text.extend(token_ids, learn, self.successors.rows)
        if self.feed is not None:
            self._tail = np.concatenate([self._tail, as_token_ids(token_ids)])[-TAIL:]

    def observe(self, token_ids: npt.ArrayLike, top_ids: npt.ArrayLike) -> None:
        """Take in the target's likeliest successors `top_ids [n, k]` of tokens [n], from raw logits."""
        self.successors.extend(token_ids, top_ids)

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
        """Make a text from elsewhere [n] something to copy from; or a piece that starts at `offset`, on `line`.

        Returns the number of its document, by which origins name it. Each call makes a new one, so that texts of one
        name are told apart; `document`: the number of the one that this is a further piece of.
        """
        ids = as_token_ids(token_ids)
        if document is not None and not 0 < document < len(self.documents):
            raise GraftError(f"document is {document}: expected a number that add_text returned")
        number = len(self.documents) if document is None else document
        self._add(Piece(ids, source, number, offset, line))
        if document is None:
            self.documents.append(name)
        return number

    def _add(self, piece: Piece) -> None:
        self._starts.append(self.text.extend_side(piece.token_ids))
        self._pieces.append(piece)
        self.fed_len += len(piece.token_ids) if piece.source == Source.CORPUS else 0

    def clear_fed(self) -> None:
        """Forget what corpora brought; other texts and all document numbers stay."""
        kept = [piece for piece in self._pieces if piece.source != Source.CORPUS]
        self.text.clear_side()
        self._starts.clear()
        self._pieces.clear()
        self.fed_len = 0
        for piece in kept:
            self._add(piece)

    def draft(self, budget: int, path: npt.ArrayLike = (), at: int = 0) -> Continuation | None:
        """Propose at most `budget` nodes after the committed tokens and `path`, hanging from node `at`."""
        if self.feed is not None and at == 0:
            self.feed.bring(self, self._tail)
        nodes = self.text.draft(budget, path, self.threshold, self.successors.rows)
        if not len(nodes.token_ids):
            return None
        sources, origins = self._provenance(nodes.places)
        return Continuation(nodes.token_ids, nodes.parents, nodes.scores, sources, origins, nodes.match_lens, at)

    def _provenance(self, places: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
        """Return source [n] and origin [n, 2] of what was copied from these places."""
        sources = SOURCES[(places >= self.prompt_len) + 2 * (places < 0)]
        origins = np.empty((len(places), 2), np.int32)
        np.minimum(places, CONTEXT_DOCUMENT, out=origins[:, 0])  # -1 where there is none
        origins[:, 1] = places
        if self._pieces:
            for i in np.flatnonzero(places >= ELSEWHERE).tolist():
                number = bisect_right(self._starts, int(places[i])) - 1
                piece = self._pieces[number]
                sources[i] = piece.source
                origins[i] = piece.document, piece.offset + int(places[i]) - self._starts[number]
        return sources, origins

    def lines_of(self, origins: list[tuple[int, int]], newlines: npt.NDArray[np.uint8]) -> list[int]:
        """Return the line, from 1 on, of each origin (document, offset); 0 where it is not known any more.

        `newlines [vocab_size]`: line breaks in each token's text.
        """
        wanted = {document for document, _ in origins}
        # By document: (first offset, line of each token) of its pieces. Each text is counted through once.
        found = {CONTEXT_DOCUMENT: [(0, _lines(self.text.tokens(), newlines))]}
        for piece in self._pieces:
            if piece.document in wanted:
                lines = piece.line - 1 + _lines(piece.token_ids, newlines)
                found.setdefault(piece.document, []).append((piece.offset, lines))
        return [_line_at(found.get(document, ()), offset) for document, offset in origins]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; other texts, successor rows and what was learnt stay. O(length)"""
        self.text.truncate(length)
        self._tail = self.text.tokens()[-TAIL:]
        if self._prompt_len is not None:
            self.begin(min(self._prompt_len, length))

    def reset(self) -> None:
        """Forget the sequence: tokens, texts, successor rows, prompt length, what was learnt."""
        self.text.reset()
        self.successors.reset()
        self.documents = [""]  # by number; 0: the sequence itself
        self.fed_len = 0  # tokens of corpora brought so far
        self._starts: list[int] = []
        self._pieces: list[Piece] = []
        self._tail = NO_PATH
        if self.feed is not None:
            self.feed.reset()
        self._prompt_len = None

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first broken invariant. O(len)"""
        if self._prompt_len is not None and not 0 <= self._prompt_len <= len(self):
            return f"prompt length {self._prompt_len} lies outside the {len(self)} tokens"
        return self.text.check_integrity()

    @property
    def memory_bytes(self) -> int:
        """Bytes held by texts, links and successor rows."""
        pieces = sum(piece.token_ids.nbytes for piece in self._pieces)
        return self.text.memory_bytes + self.successors.memory_bytes + pieces


def _lines(token_ids: npt.NDArray[np.int32], newlines: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the line, from 1 on, that each token [n] begins on; separators break none."""
    breaks = np.where(token_ids >= 0, newlines[token_ids], 0).astype(np.int64)
    lines: npt.NDArray[np.int64] = 1 + np.cumsum(breaks) - breaks
    return lines


def _line_at(pieces: Sequence[tuple[int, npt.NDArray[np.int64]]], offset: int) -> int:
    """Return the line of an offset in pieces (first offset, line of each token) of one document; 0 if in none."""
    return next((int(lines[offset - first]) for first, lines in pieces if 0 <= offset - first < len(lines)), 0)
