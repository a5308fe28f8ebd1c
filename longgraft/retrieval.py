"""Makes the index of each request and says afterwards what was copied from where.

Knows indexes, references, tokenizer and history; no model and no round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from longgraft.config import EngineConfig, GraftError
from longgraft.history import History
from longgraft.index.context_index import ContextIndex
from longgraft.references import References, Text
from longgraft.sequence import Index, Sequence
from longgraft.wording import Wording, wording_of


class Retrieval:
    """What the requests of one engine copy from. Nothing is shared between them but a tenant's history."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        config: EngineConfig,
        index: Callable[[int], Index] | None = None,
    ) -> None:
        """`index(vocab_size)` makes the index of one request (default: a `ContextIndex`)."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.config = config
        self.new_index = index or self._context_index
        self.history = History(config.history_tokens)
        if config.policy != "plain":
            _ = self.wording  # now rather than in the first request

    def open(self, references: References | None, encode: Callable[[Text], list[int]], is_read: bool = True) -> Index:
        """Return a new index that holds everything a request may copy from besides itself; empty if none reads it."""
        if references is not None and not isinstance(references, References):
            raise GraftError(f"references is a {type(references).__name__}: expected References")
        index = self.new_index(self.vocab_size)
        if references is None or not is_read:
            return index
        if references.tenant is not None and not (self.config.history_tokens or self.config.prefix_cache):
            raise GraftError("a tenant shares nothing: set history_tokens of EngineConfig, or leave prefix_cache on")
        references.put_into(index, encode, self.history)
        if references.corpora:
            references.feed(index, self._tokenizer_hash, self.vocab_size)
        return index

    def close(self, seq: Sequence) -> None:
        """Keep a finished answer for its tenant's later requests."""
        if seq.tenant:
            self.history.add(seq.tenant, seq.new_token_ids)

    def origins(self, seq: Sequence) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names of the documents a sequence copied from, and the line of each token's origin."""
        if not isinstance(seq.index, ContextIndex):
            return ("",), ()
        lines = seq.index.lines_of(seq.origins, self.wording.newlines) if seq.policy.retrieves and self.wording else ()
        return tuple(seq.index.documents), tuple(lines)

    @cached_property
    def wording(self) -> Wording | None:
        """What the texts of tokens look like; reading a large vocabulary takes most of a second."""
        return wording_of(self.tokenizer, self.vocab_size)

    @cached_property
    def _tokenizer_hash(self) -> str | None:
        """What corpora are checked against; hashing a large vocabulary takes most of a second."""
        from longgraft.index.corpus_tokens import tokenizer_hash

        return tokenizer_hash(self.tokenizer) if self.tokenizer is not None else None

    def _context_index(self, vocab_size: int) -> ContextIndex:
        return ContextIndex(vocab_size, token_kinds=self.wording.kinds if self.wording else None)
