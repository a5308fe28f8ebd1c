"""Prune: stop drafting where the drafter is unsure. Pruning is simply no longer asking it.

Knows trees and drafts; no drafter's inside, no retrieval and no cost.
"""

from collections.abc import Callable

from longgraft.draft.base import Draft
from longgraft.tree import Level, Source, TreeBuilder

Gate = Callable[[int, TreeBuilder], bool]


def always(depth: int, builder: TreeBuilder) -> bool:
    """Let every level through."""
    return True


def grow(draft: Draft, builder: TreeBuilder, depth: int, width: int, gate: Gate = always) -> None:
    """Grow a beam as EAGLE-2 does: the root's `width` children, then `depth` times those of the `width` best new nodes.

    After each level `gate(level number, tree so far)` is asked; when it says no, drafting ends.
    """
    frontier = [0]
    for number in range(depth + 1):
        new = add_level(builder, draft.expand(builder, frontier, width))
        if not new or not gate(number, builder):
            return
        frontier = sorted(sorted(new, key=lambda node: -builder.scores[node])[:width])


def add_level(builder: TreeBuilder, level: Level) -> list[int]:
    """Add what a pass proposed; return the new nodes."""
    before = len(builder)
    for parent, token, score in zip(level.parents.tolist(), level.token_ids.tolist(), level.scores.tolist()):
        builder.add(parent, token, builder.scores[parent] + score, Source.DRAFT)
    return list(range(before, len(builder)))
