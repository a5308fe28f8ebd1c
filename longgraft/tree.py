"""The objects that pass between drafting, retrieval, verification and acceptance.

Knows numpy only: no model, no cache, no index. Trees are small (tens of nodes), so they live on the host.

A tree has node 0 as its root: the last committed token, whose K/V are not in the cache yet. A chain is a
tree. Every node's score is the log-probability that the whole path from the root to it is accepted, so
scores never grow along a path and the best k nodes of any tree are themselves a tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from longgraft.config import TokenLogprob

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class Source(IntEnum):
    """Where a node came from; stats and colours are kept by source."""

    ROOT = 0
    PROMPT = 1
    HISTORY = 2
    SUCCESSOR = 3
    DRAFT = 4
    DENSE = 5
    CORPUS = 6
    PREDICTION = 7
    DOCUMENT = 8
    GRAMMAR = 9


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True)
class Level:
    """What a drafter says about some nodes after one pass, one entry per child.

    `token_ids [n]`, `parents [n]` (numbers in the tree that the drafter was asked about), `scores [n]` (its own
    log-probability of the token given its parent).
    """

    token_ids: IntArray
    parents: IntArray
    scores: FloatArray

    def __post_init__(self) -> None:
        _require(
            len(self.token_ids) == len(self.parents) == len(self.scores),
            f"Level: lengths differ: {len(self.token_ids)} tokens, {len(self.parents)} parents, "
            f"{len(self.scores)} scores",
        )


@dataclass(frozen=True, slots=True)
class Continuation:
    """What may follow the path that ends at node `at`: a small tree of retrieved tokens.

    `token_ids [n]`, `parents [n]` (-1 = hangs from `at`, else an earlier entry of this continuation),
    `scores [n]` (log-probability that the path from `at` to the entry is accepted), `sources [n]`
    (`Source`), `origins [n, 2]` (document, token offset; -1 where unknown), `match_lens [n]`
    (tokens of context that matched when the entry was proposed; 0 = none).
    """

    token_ids: IntArray
    parents: IntArray
    scores: FloatArray
    sources: npt.NDArray[np.int8]
    origins: IntArray
    match_lens: IntArray
    at: int = 0

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        _require(n > 0, "Continuation: empty; leave it out instead")
        for name in ("parents", "scores", "sources", "origins", "match_lens"):
            _require(len(getattr(self, name)) == n, f"Continuation: {name} has length != {n}")
        _require(
            bool(np.all(self.parents < np.arange(n)) and np.all(self.parents >= -1)),
            "Continuation: parents must point to earlier entries or be -1",
        )

    @property
    def match_len(self) -> int:
        """Longest match behind this continuation, in tokens."""
        return int(self.match_lens.max())


@dataclass(frozen=True)
class TokenTree:
    """Nodes to verify: `token_ids`, `parents`, `scores`, `sources [N]`, `origins [N, 2]`; node 0 is the root.

    Invariants: `parents[0] == -1`, `0 <= parents[i] < i`, each (parent, token) pair once.
    """

    token_ids: IntArray
    parents: IntArray
    scores: FloatArray
    sources: npt.NDArray[np.int8]
    origins: IntArray
    depths: IntArray = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        _require(n > 0 and self.parents[0] == -1, "TokenTree: node 0 must be a root with parent -1")
        _require(
            all(len(a) == n for a in (self.parents, self.scores, self.sources, self.origins)),
            "TokenTree: arrays differ in length",
        )
        rest = self.parents[1:]
        _require(
            bool(np.all(rest >= 0) and np.all(rest < np.arange(1, n))),
            "TokenTree: a parent comes after its child",
        )
        pairs = set(zip(rest.tolist(), self.token_ids[1:].tolist()))
        _require(len(pairs) == n - 1, "TokenTree: the same token hangs twice from one parent")
        depths = np.zeros(n, np.int32)
        for node in range(1, n):
            depths[node] = depths[self.parents[node]] + 1
        object.__setattr__(self, "depths", depths)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """True if every node hangs from the one before it: plain causal order."""
        return bool(np.all(self.parents == np.arange(-1, len(self) - 1)))

    def positions(self, prefix_len: int) -> IntArray:
        """Return each node's position in the text: prefix length plus depth. [N]"""
        return prefix_len + self.depths

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """Return `mask[i, j]` = node j lies on the path from the root to node i, itself included. [N, N]"""
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask

    def children(self) -> list[dict[int, int]]:
        """Return, for every node, its children as {token id: node}."""
        table: list[dict[int, int]] = [{} for _ in range(len(self))]
        for node in range(1, len(self)):
            table[self.parents[node]][int(self.token_ids[node])] = node
        return table

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(int(self.parents[nodes[-1]]))
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Verification:
    """What one target pass says about a tree.

    `logits [N, V]` (row i: what follows node i), `features [N, F]` (the drafter's hidden states, or None),
    `slots [N]` (cache row that holds each node's K/V, counted from the end of the prefix).
    """

    tree: TokenTree
    logits: Tensor
    features: Tensor | None
    slots: IntArray

    def __post_init__(self) -> None:
        n = len(self.tree)
        _require(self.logits.shape[0] == n, f"Verification: {self.logits.shape[0]} logit rows for {n} nodes")
        _require(len(self.slots) == n, f"Verification: {len(self.slots)} slots for {n} nodes")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The agreeing path and what the target says along it.

    `path [n]` (nodes, the root first), `token_ids [n]` (accepted tokens, then the bonus token: entry i is what
    the target drew after node path[i]), `logprobs` (one per token when asked for, else empty).
    """

    path: list[int]
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()

    def __post_init__(self) -> None:
        _require(len(self.path) == len(self.token_ids), "Acceptance: one token per visited node expected")
        _require(self.path[:1] == [0], "Acceptance: the path starts at the root")


class TreeBuilder:
    """Grows a tree; the one place where equal tokens under one parent are merged."""

    def __init__(self, root_token: int) -> None:
        self.token_ids = [int(root_token)]
        self.parents = [-1]
        self.scores = [0.0]
        self.sources = [int(Source.ROOT)]
        self.origins: list[tuple[int, int]] = [(-1, -1)]
        self._nodes: dict[tuple[int, int], int] = {}
        self.children: list[list[int]] = [[]]

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int, score: float, source: int, origin: tuple[int, int] = (-1, -1)) -> int:
        """Add a node and return its number; an existing (parent, token) keeps the better score.

        Its source is that of the better score too, but a place in a text that is known is not given up for none.
        """
        _require(0 <= parent < len(self), f"TreeBuilder: parent {parent} is not among {len(self)} nodes")
        score = min(score, self.scores[parent])
        node = self._nodes.get((parent, token_id))
        if node is None:
            node = self._nodes[parent, token_id] = len(self)
            self.children[parent].append(node)
            self.children.append([])
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.scores.append(score)
            self.sources.append(source)
            self.origins.append(origin)
        else:
            if (origin[0] >= 0, score) > (self.origins[node][0] >= 0, self.scores[node]):
                self.sources[node], self.origins[node] = source, origin
            self.scores[node] = max(score, self.scores[node])
        return node

    def copy(self) -> TreeBuilder:
        """Return an independent copy."""
        twin = TreeBuilder(self.token_ids[0])
        twin.token_ids, twin.parents, twin.scores = list(self.token_ids), list(self.parents), list(self.scores)
        twin.sources, twin.origins = list(self.sources), list(self.origins)
        twin._nodes, twin.children = dict(self._nodes), [list(nodes) for nodes in self.children]
        return twin

    def find(self, parent: int, token_id: int) -> int | None:
        """Return the child of `parent` that holds a token, or None."""
        return self._nodes.get((parent, token_id))

    def build(self, num_nodes: int | None = None) -> TokenTree:
        """Return the tree of the `num_nodes` best nodes (root included); all of them by default.

        Ties go to the node added first, and a parent never scores below its child, so the choice is
        closed under parents.
        """
        order = np.argsort(-np.asarray(self.scores, np.float64), kind="stable")
        keep = np.sort(order[: num_nodes or len(self)])
        rank = np.full(len(self), -1, np.int32)
        rank[keep] = np.arange(len(keep))
        parents = np.asarray(self.parents, np.int32)[keep]
        parents[1:] = rank[parents[1:]]
        return TokenTree(
            np.asarray(self.token_ids, np.int32)[keep],
            parents,
            np.asarray(self.scores, np.float32)[keep],
            np.asarray(self.sources, np.int8)[keep],
            np.asarray(self.origins, np.int32)[keep].reshape(-1, 2),
        )


def chain(token_ids: list[int], source: Source = Source.DRAFT) -> TokenTree:
    """Return the chain of these tokens, the first one as the root."""
    builder = TreeBuilder(token_ids[0])
    for node, token_id in enumerate(token_ids[1:]):
        builder.add(node, token_id, 0.0, source)
    return builder.build()
