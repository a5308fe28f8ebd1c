"""The paper's method and its baselines: dense (EAGLE's fixed tree), pruned (the gate alone), paper (prune, then graft).

Knows drafters, gates and successor rows; no cost and no probabilities of retrieved tokens. The one idea: **a fixed
budget of rows**. What the gate saves on the drafted tree is given to a fixed shape of successors hung from the root.
All nodes of such a tree are verified; whether they are worth their time is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longgraft.block_round import BlockGraft
from longgraft.config import EngineConfig
from longgraft.draft.base import Draft, Drafter
from longgraft.draft.recorded import begin
from longgraft.graft import graft
from longgraft.index.templates import IntArray, template
from longgraft.prune import ConfidenceGate, Gate, Gates, always, best, grow
from longgraft.sequence import Sequence
from longgraft.tree import Acceptance, TreeBuilder

# (draft, seq, gates) -> tree: how the paper's method treats a drafter that fills a whole block in one pass.
GraftBlock = Callable[[Draft, Sequence, Gates], TreeBuilder]


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """What the three have in common. `max_nodes` caps the rows at max_nodes + 1, as everywhere."""

    drafter: Drafter
    gates: Gates
    max_nodes: int
    vocab_size: int
    adapts = False
    observed = 0
    retrieves = False
    drafts = True

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return the tree to verify."""
        raise NotImplementedError

    def learn(self, seq: Sequence, accepted: Acceptance) -> None:
        """Do nothing: the rules are fixed."""

    def grown(self, draft: Draft, seq: Sequence, gate: Gate) -> TreeBuilder:
        """Return the beam, no deeper than tokens may still be committed."""
        builder = TreeBuilder(seq.root_token)
        depth = min(self.gates.depth, seq.stop.remaining - 2)
        grow(draft, builder, depth, self.gates.width, gate, vocab_size=self.vocab_size)
        return builder

    def pruned(self, draft: Draft | None, seq: Sequence) -> tuple[TreeBuilder, int]:
        """Draft behind the gate; return what is kept of it and the stage that the gate ended at."""
        gate = ConfidenceGate(self.gates)
        if draft is None:
            builder = TreeBuilder(seq.root_token)
            gate(0, builder, [])  # nothing to say: pruned at the root
        else:
            builder = self.grown(draft, seq, gate)
        return self.capped(builder, self.gates.shares[gate.stage]), gate.stage

    def capped(self, builder: TreeBuilder, rows: int) -> TreeBuilder:
        """Return the best `rows` rows, or as many as the engine verifies at most."""
        return best(builder, min(rows, self.max_nodes + 1))


@dataclass(frozen=True, slots=True)
class DensePolicy(FixedPolicy):
    """EAGLE's tree: the beam to its full depth, then the best rows of it (60, depth 7, 10 wide)."""

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return the tree to verify; without a draft the root alone."""
        draft = begin(self.drafter, seq)
        builder = TreeBuilder(seq.root_token) if draft is None else self.grown(draft, seq, always)
        return self.capped(builder, self.gates.rows)


@dataclass(frozen=True, slots=True)
class PrunedPolicy(FixedPolicy):
    """The gate without the graft: what the paper keeps of the drafted nodes, and nothing in place of the rest."""

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return the tree to verify."""
        return self.pruned(begin(self.drafter, seq), seq)[0]


@dataclass(frozen=True, slots=True)
class PaperPolicy(FixedPolicy):
    """Graft as published: prune at the checkpoints, then fill the rows this frees with successors of the root.

    8 + 52, 24 + 36, 40 + 20 or 60 + 0 rows, the root counted among the drafted. A successor that was drafted too stands
    once, and one that the table does not know leaves its place empty, so these are upper bounds. Every verified row
    refreshes the table. A sequence whose index keeps no successor table gets no graft. `graft_block`: what is done
    instead with a draft that says `is_block`.
    """

    graft_block: GraftBlock | None = None
    observed = 1024  # every verified row: EngineConfig allows max_nodes + 1 of them at most
    retrieves = True

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return the tree to verify."""
        draft = begin(self.drafter, seq)
        if draft is not None and self.graft_block is not None and getattr(draft, "is_block", False):
            return self.capped(self.graft_block(draft, seq, self.gates), self.gates.rows)
        builder, stage = self.pruned(draft, seq)
        graft_successors(builder, seq, self.gates.rows - self.gates.shares[stage], self.vocab_size)
        return self.capped(builder, self.gates.rows)


NAMES: dict[str, type[FixedPolicy]] = {"dense": DensePolicy, "pruned": PrunedPolicy, "paper": PaperPolicy}


def fixed_policy(name: str, drafter: Drafter, config: EngineConfig, vocab_size: int) -> FixedPolicy:
    """Make the policy of this name, one of `NAMES`; reads the gates file that the config names."""
    gates = Gates.load(config.gates) if config.gates is not None else Gates()
    if name == "paper":
        return PaperPolicy(drafter, gates, config.max_nodes, vocab_size, BlockGraft(vocab_size))
    return NAMES[name](drafter, gates, config.max_nodes, vocab_size)


def successor_rows(seq: Sequence) -> IntArray | None:
    """Return the successor rows [V, k] of a sequence's index; None if it keeps none, or none were observed yet."""
    rows: IntArray | None = getattr(getattr(seq.index, "successors", None), "rows", None)
    return rows


def graft_successors(builder: TreeBuilder, seq: Sequence, num_nodes: int, vocab_size: int) -> None:
    """Hang the shape of `num_nodes` successors from the root, as far as the table and the end of the text allow."""
    rows = successor_rows(seq)
    if rows is None or num_nodes < 1:
        return
    found = template(num_nodes).fill(rows, seq.root_token)
    graft(builder, [found] if found else [], vocab_size, max_depth=seq.stop.remaining - 1)
