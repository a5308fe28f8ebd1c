"""The seam every drafter fits: levels of proposed nodes, yielded lazily.

A drafter never hears of pruning: whoever stops asking for levels has pruned. Proposals may be wrong in any
way without changing the output; they only cost time.
"""

from collections.abc import Iterator
from typing import Protocol

from longgraft.sequence import Sequence
from longgraft.tree import Acceptance, Level, Verification


class Drafter(Protocol):
    """Proposes continuations of a sequence; state per sequence lives in `Sequence.draft_state`."""

    def levels(self, sequence: Sequence) -> Iterator[Level]:
        """Yield depth after depth of nodes below the root (node 0), each from one draft pass."""

    def extend(self, sequence: Sequence, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        """Take in tokens that were committed after a round."""

    def reset(self, sequence: Sequence) -> None:
        """Forget everything about this sequence."""


class NullDrafter:
    """No drafter: every proposal is retrieved."""

    def levels(self, sequence: Sequence) -> Iterator[Level]:
        """Yield nothing."""
        return iter(())

    def extend(self, sequence: Sequence, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        """Do nothing: there is no state."""

    def reset(self, sequence: Sequence) -> None:
        """Do nothing: there is no state."""
