"""Pruning is no longer asking: which nodes a drafter is asked about, and what becomes of what it says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from longgraft.prune import always, grow
from longgraft.tree import Level, Source, TreeBuilder


class Counting:
    """Says of every node that tokens 1 and 2 follow, with probability .6 and .3; counts what it is asked."""

    in_one_pass = True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def expand(self, tree: TreeBuilder, nodes: Sequence[int], width: int) -> Level:
        self.asked.append(list(nodes))
        tokens = [1, 2][:width] * len(nodes)
        parents = [node for node in nodes for _ in range(min(width, 2))]
        scores = np.log([0.6, 0.3][:width] * len(nodes))
        return Level(np.array(tokens, np.int32), np.array(parents, np.int32), scores.astype(np.float32))

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        return 1.0


def test_a_beam_follows_the_best_new_nodes() -> None:
    draft, builder = Counting(), TreeBuilder(7)
    grow(draft, builder, depth=2, width=2)
    assert draft.asked == [[0], [1, 2], [3, 4]]
    assert builder.token_ids == [7, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]
    assert np.exp(builder.scores[3:7]) == pytest.approx([0.36, 0.18, 0.18, 0.09])
    assert set(builder.sources[1:]) == {Source.DRAFT}


@pytest.mark.parametrize("stop_at", [0, 1, 2])
def test_after_a_refusal_no_other_level_is_asked_for(stop_at: int) -> None:
    draft, builder, seen = Counting(), TreeBuilder(7), list[tuple[int, int]]()

    def gate(depth: int, tree: TreeBuilder) -> bool:
        seen.append((depth, len(tree)))
        return depth < stop_at

    grow(draft, builder, depth=9, width=1, gate=gate)
    assert len(draft.asked) == stop_at + 1
    assert seen == [(depth, depth + 2) for depth in range(stop_at + 1)]


def test_always() -> None:
    assert always(0, TreeBuilder(1)) and always(99, TreeBuilder(1))
