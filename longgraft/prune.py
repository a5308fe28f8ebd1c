"""Prune: stop drafting where the drafter is unsure. Pruning is simply no longer asking for levels."""

from collections.abc import Callable, Iterable

from longgraft.tree import Level, Source, TreeBuilder

Gate = Callable[[int, Level], bool]


def always(depth: int, level: Level) -> bool:
    """Let every level through."""
    return True


def prune(levels: Iterable[Level], root_token: int, gate: Gate = always) -> TreeBuilder:
    """Collect drafted levels under the root until `gate(depth, level)` says no (that level is still kept).

    `Level.parents` counts drafted nodes in the order they were yielded, the root being 0; equal tokens under
    one parent are merged, so the numbers are translated here.
    """
    builder = TreeBuilder(root_token)
    nodes = [0]
    for depth, level in enumerate(levels):
        parents = [nodes[parent] for parent in level.parents.tolist()]
        rows = zip(parents, level.token_ids.tolist(), level.scores.tolist())
        nodes += [builder.add(parent, token, score, Source.DRAFT) for parent, token, score in rows]
        if not gate(depth, level):
            break
    return builder
