"""Pruning is no longer asking: which levels are asked for, and what becomes of their nodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from longgraft.prune import always, prune
from longgraft.tree import Level, Source


def level(*rows: tuple[int, int, float]) -> Level:
    """Make a level of (token, parent, score)."""
    tokens, parents, scores = zip(*rows)
    return Level(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32))


LEVELS = [
    level((1, 0, -0.1), (2, 0, -0.5)),
    level((3, 1, -0.2), (4, 2, -0.7)),
    level((5, 3, -0.4)),
]


class Drafter:
    """Counts the levels it was asked for."""

    def __init__(self, levels: list[Level]) -> None:
        self.made = levels
        self.asked = 0

    def levels(self) -> Iterator[Level]:
        for made in self.made:
            self.asked += 1
            yield made


def test_without_a_gate_every_level_is_collected() -> None:
    drafter = Drafter(LEVELS)
    tree = prune(drafter.levels(), 7).build()
    assert drafter.asked == 3
    assert tree.token_ids.tolist() == [7, 1, 2, 3, 4, 5]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, 3]
    assert tree.scores == pytest.approx([0.0, -0.1, -0.5, -0.2, -0.7, -0.4])
    assert set(tree.sources[1:].tolist()) == {Source.DRAFT} and tree.sources[0] == Source.ROOT


@pytest.mark.parametrize("stop_at", [0, 1, 2])
def test_the_level_of_the_refusal_is_kept_and_no_other_is_asked_for(stop_at: int) -> None:
    drafter, seen = Drafter(LEVELS), []

    def gate(depth: int, made: Level) -> bool:
        seen.append((depth, made))
        return depth < stop_at

    builder = prune(drafter.levels(), 7, gate)
    assert drafter.asked == stop_at + 1
    assert seen == list(enumerate(LEVELS[: stop_at + 1]))
    assert len(builder) == 1 + sum(len(made.token_ids) for made in LEVELS[: stop_at + 1])


def test_nothing_drafted_is_a_root_alone() -> None:
    assert len(prune(iter(()), 7)) == 1


def test_parents_follow_nodes_that_were_merged() -> None:
    """Level 1 says token 1 twice; what hangs from either hangs from the one node."""
    tree = prune([level((1, 0, -0.5), (1, 0, -0.2), (2, 0, -0.3)), level((3, 1, -0.6), (4, 2, -0.4), (5, 3, -0.9))], 7)
    built = tree.build()
    assert built.token_ids.tolist() == [7, 1, 2, 3, 4, 5]
    assert built.parents.tolist() == [-1, 0, 0, 1, 1, 2]
    assert built.scores[1] == pytest.approx(-0.2)


def test_token_zero_is_a_token() -> None:
    assert prune([level((0, 0, -0.1)), level((0, 1, -0.2))], 0).build().token_ids.tolist() == [0, 0, 0]


def test_always() -> None:
    assert always(0, LEVELS[0]) and always(99, LEVELS[2])
