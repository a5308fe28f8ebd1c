"""The index of one sequence: its own prompt and history, and what the target last thought follows each token.

Knows no model and no other request. Everything it proposes comes out of one list per node, in which matches,
successor rows and recent tokens compete by calibrated probability (see `rank.py`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.rank import Ranking
from longgraft.index.successor_table import SuccessorTable
from longgraft.index.suffix_automaton import MIN_PROBABILITY, SuffixAutomaton
from longgraft.tree import Continuation, Source

CONTEXT_DOCUMENT = 0  # the sequence itself, in origins
SOURCES = np.array([Source.PROMPT, Source.HISTORY, Source.SUCCESSOR], np.int8)


class ContextIndex:
    """Suffix automaton and successor table of one sequence, as one `Retriever`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        num_successors: int = 8,
        threshold: float = MIN_PROBABILITY,
        ranking: Ranking | None = None,
    ) -> None:
        if vocab_size < 1:
            raise GraftError(f"vocab_size is {vocab_size}: expected 1 or more")
        self.threshold = threshold
        self.automaton = SuffixAutomaton(vocab_size, ranking=ranking)
        self.successors = SuccessorTable(vocab_size, num_successors)
        self._prompt_len: int | None = None

    def __len__(self) -> int:
        return len(self.automaton)

    @property
    def prompt_len(self) -> int:
        """Tokens that count as prompt: what `begin` said, else all before the first that was learnt from."""
        return len(self) if self._prompt_len is None else self._prompt_len

    def begin(self, prompt_len: int | None = None) -> None:
        """Mark where the prompt ends (default: here); later tokens are history."""
        self._prompt_len = len(self) if prompt_len is None else prompt_len

    def extend(self, token_ids: npt.ArrayLike, learn: bool = False) -> None:
        """Take in committed tokens [n]; -1 separates documents. O(n) amortised; all or, on an error, none."""
        before = len(self)
        self.automaton.extend(token_ids, learn, self.successors.rows)
        if learn and self._prompt_len is None:
            self._prompt_len = before

    def observe(self, token_ids: npt.ArrayLike, top_ids: npt.ArrayLike) -> None:
        """Take in the target's likeliest successors `top_ids [n, k]` of tokens [n], from raw logits."""
        self.successors.extend(token_ids, top_ids)

    def draft(self, budget: int, path: npt.ArrayLike = (), at: int = 0) -> Continuation | None:
        """Propose at most `budget` nodes after the committed tokens and `path`, hanging from node `at`."""
        nodes = self.automaton.draft(budget, path, self.threshold, self.successors.rows)
        n = len(nodes.token_ids)
        if n == 0:
            return None
        offsets = nodes.origins
        sources = SOURCES[(offsets >= self.prompt_len) + 2 * (offsets < 0)]
        origins = np.empty((n, 2), np.int32)
        np.minimum(offsets, CONTEXT_DOCUMENT, out=origins[:, 0])  # -1 where there is none
        origins[:, 1] = offsets
        return Continuation(nodes.token_ids, nodes.parents, nodes.scores, sources, origins, nodes.match_lens, at)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; successor rows and what was learnt stay. O(length)"""
        self.automaton.truncate(length)
        if self._prompt_len is not None:
            self._prompt_len = min(self._prompt_len, length)

    def reset(self) -> None:
        """Forget the sequence: tokens, successor rows, prompt length, what was learnt."""
        self.automaton.reset()
        self.successors.reset()
        self._prompt_len = None

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first broken invariant. O(len)"""
        if self._prompt_len is not None and not 0 <= self._prompt_len <= len(self):
            return f"prompt length {self._prompt_len} lies outside the {len(self)} tokens"
        return self.automaton.check_integrity()

    @property
    def memory_bytes(self) -> int:
        """Bytes held by automaton and successor rows."""
        return self.automaton.memory_bytes + self.successors.memory_bytes
