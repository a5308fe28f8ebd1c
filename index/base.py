"""What every source of continuations looks like to the engine.

Knows no implementation. The one idea: a retriever follows the committed tokens, and may be asked what comes
after them and a path of tokens that are only proposed.
"""

from __future__ import annotations

from typing import Protocol

import numpy.typing as npt

from longgraft.tree import Continuation


class Retriever(Protocol):
    """A stateful source of continuations for one sequence."""

    def extend(self, token_ids: npt.ArrayLike, learn: bool) -> None:
        """Take in committed tokens [n]; `learn`: they were generated, so score what was proposed for them."""

    def draft(self, budget: int, path: npt.ArrayLike = (), at: int = 0) -> Continuation | None:
        """Propose at most `budget` nodes after the committed tokens and `path`, hanging from node `at`.

        Changes nothing. None if there is nothing to propose.
        """

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens."""

    def reset(self) -> None:
        """Forget everything about the sequence."""

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first broken invariant."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
