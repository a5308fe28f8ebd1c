"""The paper's method for a drafter that fills a whole block in one pass: one round's tree.

Knows drafts, the sequence's index and a budget of rows; no cost. The one idea: where a beam is pruned level by level,
a block is cut where the drafter's own confidence ends, and the rows this frees go to retrieval (`block_graft`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from longgraft.block_graft import keep_confident, retrieve_around, retrieve_behind
from longgraft.draft.base import Draft
from longgraft.graft import graft
from longgraft.sequence import Sequence
from longgraft.tree import TreeBuilder


class Budget(Protocol):
    """Rows verified a round, the root included, and the gate's thresholds."""

    @property
    def rows(self) -> int:
        """Rows, root included."""

    @property
    def thresholds(self) -> Seq[float]:
        """Least probabilities; the first is taken for the block's tokens (the paper's own is not public)."""


@dataclass(frozen=True, slots=True)
class BlockGraft:
    """Makes the tree of a round from a block. `around`: retrieval beside the kept chain too, beyond the paper."""

    vocab_size: int
    around: bool = False

    def __call__(self, draft: Draft, seq: Sequence, budget: Budget) -> TreeBuilder:
        """Return the kept chain and what was retrieved; at most `budget.rows` nodes, none past the text's end."""
        builder = TreeBuilder(seq.root_token)
        depth = max(seq.stop.remaining - 1, 0)
        least = min(budget.thresholds[0], 1.0) if len(budget.thresholds) else 0.0
        kept = keep_confident(draft, builder, least, min(budget.rows - 1, depth))
        retrieve = retrieve_around if self.around else retrieve_behind
        graft(builder, retrieve(builder, kept, seq.index, budget.rows - len(kept)), self.vocab_size, max_depth=depth)
        return builder
