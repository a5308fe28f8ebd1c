"""Adaptive: placeholder until the planner lands."""

from __future__ import annotations

from dataclasses import dataclass

from longgraft.cost import CostTable
from longgraft.draft.base import Drafter
from longgraft.graft import graft
from longgraft.prune import add_level
from longgraft.sequence import Sequence
from longgraft.tree import Acceptance, TreeBuilder, Verification


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """All proposals in one currency."""

    drafter: Drafter
    cost: CostTable | None
    max_nodes: int
    vocab_size: int
    adapts = True
    observed = 8
    retrieves = True
    drafts = True

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return retrieved and drafted nodes together."""
        builder = TreeBuilder(seq.root_token)
        draft = self.drafter.begin(seq)
        if draft is not None:
            add_level(builder, draft.expand(builder, [0], 4))
        found = seq.index.draft(self.max_nodes)
        graft(builder, [found] if found else [], self.vocab_size, max_depth=seq.stop.remaining - 1)
        return builder

    def learn(self, seq: Sequence, result: Verification, accepted: Acceptance) -> None:
        """Do nothing yet."""
