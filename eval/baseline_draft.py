"""What every drafter of a replay looks like, and the draft that baselines return.

Knows no rule and no replay. A draft is a tree in the order of its nodes; a chain is a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longgraft.eval.tally import Proposal

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed tree: `token_ids [n]`, `parents [n]` (-1: hangs from the context, else an earlier node)."""

    token_ids: IntArray
    parents: IntArray


class Drafter(Protocol):
    """A stateful source of drafts for one text."""

    def reset(self) -> None:
        """Forget the text."""

    def extend(self, token_ids: IntArray) -> None:
        """Take in committed tokens [n]."""

    def draft(self, budget: int) -> Proposal | None:
        """Propose at most `budget` nodes after the text."""


EMPTY = Draft(np.zeros(0, np.int32), np.zeros(0, np.int32))
CHAIN = np.arange(-1, 8191, dtype=np.int32)  # the parents of any chain are its beginning


def chain(token_ids: Sequence[int]) -> Draft:
    """Return a draft in which each token follows the one before."""
    return Draft(np.array(token_ids, np.int32), CHAIN[: len(token_ids)])
