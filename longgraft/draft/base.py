"""The seam every drafter fits: a model that says what may follow some nodes of a tree.

Which nodes it is asked about, and when it is no longer asked, is the policy's business: pruning is simply not asking
any more. What a drafter says may be wrong in any way without changing the output; it only costs time.
"""

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from longgraft.cost import CostTable
from longgraft.sequence import Sequence
from longgraft.tree import Acceptance, Level, TreeBuilder, Verification


class Draft(Protocol):
    """One round's drafting for one sequence; dropped when the round is over.

    What it leaves in caches is rolled back by the drafter's next call. `in_one_pass`: True where a node and its
    descendants may be asked about in the same pass (a language model), False where a node's parent must have been
    asked about in an earlier one (EAGLE).
    """

    in_one_pass: bool

    def expand(self, tree: TreeBuilder, nodes: Seq[int], width: int) -> Level:
        """Make one draft pass over `nodes` (numbers in `tree`; the root first of all, parents before children).

        Returns for each node its `width` likeliest children, and besides these every child it already has in `tree`
        and that the drafter knows. A node is asked about once a round.
        """

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        """Return what the next pass over `rows` nodes is expected to take: measured, never guessed.

        Reading what was committed meanwhile is included; not with `caught_up`: as if it had been read.
        """


class Drafter(Protocol):
    """Proposes continuations of a sequence; state per sequence lives in `Sequence.draft_state`.

    `feature_layers`: target layers, counted from 0, whose output states it reads (none: ()). `feature_window`: of so
    many last prompt rows.
    """

    feature_layers: tuple[int, ...]
    feature_window: int

    @property
    def cost_table(self) -> CostTable | None:
        """What its passes cost, measured if need be; None if nothing does."""

    def session(self) -> AbstractContextManager[None]:
        """Held while rounds run."""

    def prefill(self, sequence: Sequence, first: int, features: Tensor) -> None:
        """Take the states [n, F] of prompt rows from position `first` on, ascending; cheap, drafting may never come."""

    def begin(self, sequence: Sequence) -> Draft | None:
        """Begin a round; None: it steps aside in this one."""

    def extend(self, sequence: Sequence, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        """Take in tokens that `sequence` has just committed.

        `result.features[accepted.path[i]]` is the state from which token_ids[i] was drawn; there may be fewer
        tokens than path nodes (a stop rule clips).
        """

    def reset(self, sequence: Sequence) -> None:
        """Forget everything about this sequence."""


class NullDrafter:
    """No drafter: every proposal is retrieved."""

    feature_layers: tuple[int, ...] = ()
    feature_window = 0
    cost_table: CostTable | None = None

    def session(self) -> AbstractContextManager[None]:
        """Hold nothing."""
        return nullcontext()

    def prefill(self, sequence: Sequence, first: int, features: Tensor) -> None:
        """Do nothing: there is no state."""

    def begin(self, sequence: Sequence) -> Draft | None:
        """Step aside."""
        return None

    def extend(self, sequence: Sequence, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        """Do nothing: there is no state."""

    def reset(self, sequence: Sequence) -> None:
        """Do nothing: there is no state."""


def freeze_costs(drafter: Drafter, cost: CostTable | None) -> bool:
    """Freeze a drafter's costs beside a target's frozen ones: what is asked of it then depends on no clock."""
    is_frozen = cost is not None and cost.frozen
    if is_frozen and (table := drafter.cost_table) is not None:
        table.frozen = True
    return is_frozen
