"""A draft whose passes are written down: how many nodes each was asked about, and the time it took.

Knows `Stats`; everything else is the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from longgraft.draft.base import Draft, Drafter
from longgraft.sequence import Sequence
from longgraft.stats import Stats
from longgraft.tree import Level, TreeBuilder


class RecordedDraft:
    """The same draft, watched; attributes that only some drafts have are the draft's own."""

    def __init__(self, draft: Draft, stats: Stats) -> None:
        self._draft, self._stats = draft, stats
        self.in_one_pass = draft.in_one_pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def expand(self, tree: TreeBuilder, nodes: Seq[int], width: int) -> Level:
        """Make the pass and write it down."""
        price = self._draft.seconds(len(nodes)) if self._stats.is_priced else 0.0
        with self._stats.drafting(len(nodes), price):
            return self._draft.expand(tree, nodes, width)

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        """Return what the draft says."""
        return self._draft.seconds(rows, caught_up)


def begin(drafter: Drafter, sequence: Sequence) -> RecordedDraft | None:
    """Begin a round with a drafter; None if it steps aside."""
    draft = drafter.begin(sequence)
    return None if draft is None else RecordedDraft(draft, sequence.stats)
