"""Where the proposals of a round come from: the policies a request can choose, by name.

Knows drafter, index and cost by their seams only. A policy proposes a tree; how many of its nodes are verified is
the cost table's choice if the policy adapts, else all are.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from longgraft.adaptive import AdaptivePolicy
from longgraft.config import EngineConfig, GraftError, check_policy
from longgraft.cost import CostTable
from longgraft.draft.base import Drafter, NullDrafter
from longgraft.graft import graft
from longgraft.policies import fixed_policy
from longgraft.sequence import OBSERVED, Policy, Sequence
from longgraft.tree import Acceptance, TreeBuilder


@dataclass(frozen=True, slots=True)
class PlainPolicy:
    """Proposes nothing: one token a target pass."""

    adapts = False
    observed = 0
    retrieves = False
    drafts = False

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return the root alone."""
        return TreeBuilder(seq.root_token)

    def learn(self, seq: Sequence, accepted: Acceptance) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class RetrievalPolicy:
    """Proposes what the index retrieves, and as much of it as is worth its cost."""

    max_nodes: int
    vocab_size: int
    adapts = True
    observed = OBSERVED
    retrieves = True
    drafts = False

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return the retrieved tree."""
        builder = TreeBuilder(seq.root_token)
        found = seq.index.draft(self.max_nodes)
        graft(builder, [found] if found else [], self.vocab_size, max_depth=seq.stop.remaining - 1)
        return builder

    def learn(self, seq: Sequence, accepted: Acceptance) -> None:
        """Do nothing: the index learns from what is committed."""


class Policies:
    """Makes the policies of one engine, each once."""

    def __init__(self, drafter: Drafter, cost: CostTable | None, config: EngineConfig, vocab_size: int) -> None:
        self.drafter, self.cost, self.config, self.vocab_size = drafter, cost, config, vocab_size
        self._made: dict[str, Policy] = {}

    def get(self, name: str | None = None) -> Policy:
        """Return a policy by name (None: the engine's own); `GraftError` if it is unknown or needs a drafter."""
        name = self.config.policy if name is None else name
        check_policy(name)
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Policy:
        has_drafter = not isinstance(self.drafter, NullDrafter)
        if name == "plain":
            return PlainPolicy()
        if name == "retrieval" or (name == "adaptive" and not has_drafter):
            return RetrievalPolicy(self.config.max_nodes, self.vocab_size)
        if not has_drafter:
            raise GraftError(f"policy {name!r} needs a drafter: pass drafter= (--draft), or choose another policy")
        if name == "adaptive":
            return AdaptivePolicy(self.drafter, self.cost, self.config.max_nodes, self.vocab_size)
        return fixed_policy(name, self.drafter, self.config, self.vocab_size)


def rows_for(
    cost: CostTable | None,
    batch: Seq[Sequence],
    builders: Seq[TreeBuilder],
    most: int,
    *,
    beside: int = 0,
    in_all: int | None = None,
) -> list[int]:
    """Return how many nodes, root included, of each tree are verified; at most `most` where the policy adapts.

    All trees share one flat forward, with `beside` other rows: the nodes of those that adapt compete for its rows
    behind those that are fixed, and with `in_all` none is chosen that would make the trees together longer.
    """
    counts = [len(builder) for builder in builders]
    free = [i for i, seq in enumerate(batch) if seq.policy.adapts]
    if free and cost is not None:
        scores, trust = [builders[i].scores for i in free], [batch[i].trust for i in free]
        fixed = sum(counts) - sum(counts[i] for i in free)
        lengths = [len(batch[i].token_ids) for i in free]
        room = None if in_all is None else max(0, in_all - fixed - len(free))
        for i, count in zip(free, cost.choose(scores, lengths, trust, fixed + beside, room)):
            counts[i] = count
    return [min(count, most) if seq.policy.adapts else count for seq, count in zip(batch, counts)]
