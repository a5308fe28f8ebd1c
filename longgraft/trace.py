"""What every round of one request did, kept only when asked for (`SamplingParams(trace=True)`).

Knows trees; no model, no tokenizer and no looks. The one idea: a tree never changes once it is verified, so a trace
holds the trees themselves and costs a list entry a round. A request without one pays a comparison with None.

About 25 bytes are kept for every verified node and 2 kB for every round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from longgraft.tree import TokenTree

# The stages of a round in their order; `draft` is the part of planning that was spent in the drafter.
STAGES = ("plan", "draft", "verify", "accept", "extend")


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One round of one request.

    `tree`: what was verified. `path`: its accepted nodes that were committed, the root not among them. `new_tokens`:
    committed tokens, the bonus included. `seconds`: by stage of `STAGES`, in their order, each second counted once;
    planning and verifying are shared with the other requests of the round.
    """

    tree: TokenTree
    path: tuple[int, ...]
    new_tokens: int
    seconds: tuple[float, ...]

    @property
    def rows(self) -> int:
        """Rows this request had in the target pass: the proposed nodes and the root."""
        return len(self.tree)


@dataclass
class Trace:
    """The rounds of one request, in their order."""

    rounds: list[TracedRound] = field(default_factory=list)
    _before: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rounds)

    def __iter__(self) -> Iterator[TracedRound]:
        return iter(self.rounds)

    def take(self, tree: TokenTree, path: list[int], new_tokens: int, seconds: Mapping[str, float]) -> None:
        """Write down a round that has just been committed; `seconds`: what all rounds so far took, by stage.

        Of a stage that `seconds` does not name nothing was spent.
        """
        sums = {stage: seconds.get(stage, 0.0) for stage in STAGES}
        spent = {stage: sums[stage] - self._before.get(stage, 0.0) for stage in STAGES}
        spent["plan"] = max(0.0, spent["plan"] - spent["draft"])
        self._before = sums
        self.rounds.append(TracedRound(tree, tuple(path), new_tokens, tuple(spent.values())))
