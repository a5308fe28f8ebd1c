"""What every drafter of a replay looks like, and the draft that baselines return.

Knows no rule and no replay. A draft is a tree in the order of its nodes; a chain is a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longgraft.tree import Continuation

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed tree: `token_ids [n]`, `parents [n]` (-1: hangs from the context, else an earlier node).

    Plain lists: what the baselines have, so that their drafting times hold no conversion.
    """

    token_ids: list[int]
    parents: list[int]


class Drafter(Protocol):
    """A stateful source of drafts for one text."""

    def reset(self) -> None:
        """Forget the text."""

    def extend(self, token_ids: IntArray) -> None:
        """Take in committed tokens [n]."""

    def draft(self, budget: int) -> Draft | Continuation | None:
        """Propose at most `budget` nodes after the text."""


EMPTY = Draft([], [])
CHAIN = list(range(-1, 4095))  # the parents of a chain are its beginning


def chain(token_ids: list[int]) -> Draft:
    """Return a draft in which each token follows the one before."""
    n = len(token_ids)
    return Draft(token_ids, CHAIN[:n] if n <= len(CHAIN) else list(range(-1, n - 1)))


def lists_of(found: Draft | Continuation | None) -> tuple[list[int], list[int]]:
    """Return tokens and parents of whatever a drafter returned, as lists."""
    if found is None:
        return [], []
    if isinstance(found, Draft):
        return found.token_ids, found.parents
    return found.token_ids.tolist(), found.parents.tolist()
