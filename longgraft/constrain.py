"""Constrain: drop the nodes that a grammar forbids, and draft the tokens that it forces.

Knows trees and a walker through the grammar; no model, no index. The one idea: **what the grammar says is certain**.
Where it leaves one choice, that token is proposed with probability 1 and its siblings go; where it forbids some of a
node's children, their share goes to the others, as it does in the target's masked distribution. Nothing here decides
what is drawn: the sampler masks every node it visits, whatever is proposed.
"""

from __future__ import annotations

import math
from typing import Protocol

from longgraft.tree import Source, TreeBuilder

# Below nodes less likely than this nothing forced is added.
LEAST_PATH = math.log(0.02)
# What is left to the allowed children of a node at least, where the share of the others is all but 1.
LEAST_REST = 1e-3


class Walker(Protocol):
    """Stands somewhere in a text and its grammar; `longgraft.matcher.Matcher` is the real one."""

    def allows(self, token_id: int) -> bool:
        """Say whether a token may follow that does not end the answer."""

    def step(self, token_id: int) -> bool:
        """Walk on to a token that may follow and return True; else False, and nothing more can be asked."""

    def back(self) -> None:
        """Undo the last step."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next, because nothing else is allowed."""


def constrain(builder: TreeBuilder, walker: Walker, most: int, max_depth: int) -> TreeBuilder:
    """Return the tree without forbidden nodes, and with at most `most` forced ones more, of depth <= `max_depth`.

    `walker` stands at the root and does so again afterwards. Nodes that hold an EOS token go too: an answer ends at the
    draw of one, without a visit.
    """
    made = _Made(builder, most, max_depth)
    walk, to_do = [0], [0]  # new nodes: from the root to where the walker stands, and those still to be looked at
    while to_do:
        node = to_do.pop()
        if not made.has_more(node):
            continue
        while node and walk[-1] != made.tree.parents[node]:
            walk.pop()
            walker.back()
        if node:
            if not walker.step(made.tree.token_ids[node]):
                break  # a limit of the grammar's engine: what was found so far will do
            walk.append(node)
        to_do += reversed(made.children(node, walker))
    for _ in walk[1:]:
        walker.back()
    return made.tree


class _Made:
    """The new tree. `twins`: of each new node, the one of the old tree with the same path, if there is one."""

    def __init__(self, old: TreeBuilder, most: int, max_depth: int) -> None:
        self.old, self.left, self.max_depth = old, most, max_depth
        self.tree = TreeBuilder(old.token_ids[0])
        self.twins: list[int | None] = [0]
        self.depths = [0]

    def has_more(self, node: int) -> bool:
        """Say whether anything may hang from a node."""
        twin = self.twins[node]
        return self._is_open(node) or (twin is not None and len(self.old.children[twin]) > 0)

    def _is_open(self, node: int) -> bool:
        return self.left > 0 and self.depths[node] < self.max_depth and self.tree.scores[node] >= LEAST_PATH

    def children(self, node: int, walker: Walker) -> list[int]:
        """Add the children of a node, where the walker stands, and return them."""
        if self._is_open(node) and (forced := walker.forced()):
            return [self._add_forced(node, forced[0])]
        allowed, lost, old, twin = list[int](), 0.0, self.old, self.twins[node]
        for child in old.children[twin] if twin is not None else ():
            if walker.allows(old.token_ids[child]):
                allowed.append(child)
            else:
                lost += math.exp(old.scores[child] - old.scores[old.parents[child]])
        gained = -math.log(max(LEAST_REST, 1.0 - lost))
        return [self._add_allowed(node, child, gained) for child in allowed]

    def _add_forced(self, node: int, token: int) -> int:
        twin = self.twins[node]
        known = None if twin is None else self.old.find(twin, token)
        self.left -= known is None
        source, origin = int(Source.GRAMMAR), (-1, -1)
        if known is not None and self.old.origins[known][0] >= 0:  # who knew it too, and from where, keeps it
            source, origin = self.old.sources[known], self.old.origins[known]
        return self._add(node, token, self.tree.scores[node], known, source, origin)

    def _add_allowed(self, node: int, child: int, gained: float) -> int:
        old = self.old
        share = min(0.0, old.scores[child] - old.scores[old.parents[child]] + gained)
        score = self.tree.scores[node] + share
        return self._add(node, old.token_ids[child], score, child, old.sources[child], old.origins[child])

    def _add(
        self, parent: int, token: int, score: float, twin: int | None, source: int, origin: tuple[int, int]
    ) -> int:
        self.twins.append(twin)
        self.depths.append(self.depths[parent] + 1)
        return self.tree.add(parent, token, score, source, origin)
