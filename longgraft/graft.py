"""Graft: hang retrieved continuations into the pruned tree, at any node."""

from collections.abc import Iterable

from longgraft.tree import Continuation, TreeBuilder


def graft(
    builder: TreeBuilder, continuations: Iterable[Continuation], vocab_size: int, max_depth: int
) -> list[list[int]]:
    """Add every retrieved node of depth <= `max_depth` (the root is 0) whose token the target knows.

    What hangs below a node that was left out is left out too. Scores of a continuation are relative to the
    node it hangs from. Equal tokens under one parent are merged by the builder. Returns for each continuation the
    node of every entry, -1 where it was left out.
    """
    depths, grafted = depths_of(builder), list[list[int]]()
    for continuation in continuations:
        if not 0 <= continuation.at < len(depths):
            raise ValueError(f"continuation hangs from node {continuation.at}: the tree has {len(depths)} nodes")
        base = builder.scores[continuation.at]
        nodes: list[int] = []
        grafted.append(nodes)
        rows = zip(
            continuation.token_ids.tolist(),
            continuation.parents.tolist(),
            continuation.scores.tolist(),
            continuation.sources.tolist(),
            continuation.origins.tolist(),
        )
        for token, parent, score, source, origin in rows:
            at = continuation.at if parent < 0 else nodes[parent]
            if at < 0 or not 0 <= token < vocab_size or depths[at] >= max_depth:
                nodes.append(-1)
                continue
            nodes.append(builder.add(at, token, base + score, source, (origin[0], origin[1])))
            if nodes[-1] == len(depths):
                depths.append(depths[at] + 1)
    return grafted


def depths_of(builder: TreeBuilder) -> list[int]:
    """Return the depth of every node so far."""
    depths = [0]
    for parent in builder.parents[1:]:
        depths.append(depths[parent] + 1)
    return depths
