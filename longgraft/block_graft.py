"""Block grafting: keep the confident part of a drafted block, give the rest of the budget to retrieval.

Knows trees, drafts and indexes by their seams; no drafter's inside and no cost. The paper's variant for block drafters
(Graft, arXiv 2605.20104, section 4.5): the chain is kept as far as the drafter's own token confidence carries it, and
the tail is filled with retrieved tokens, B_ret = B - B_df. Beyond the paper, retrieval may also hang beside the kept
chain, from every node at which the text is likely to leave it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.draft.base import Draft
from longgraft.tree import Continuation, Source, TreeBuilder


class Retriever(Protocol):
    """What is asked for continuations: an index."""

    def draft(self, budget: int, path: npt.NDArray[np.int32], at: int) -> Continuation | None:
        """Propose at most `budget` nodes after the committed tokens and `path`, hanging from node `at`."""


def keep_confident(
    draft: Draft, builder: TreeBuilder, threshold: float, length: int, by_path: bool = False
) -> list[int]:
    """Add the drafter's chain behind the root, as long as it is confident; return its nodes, the root first.

    A token is kept while its probability given its parent, or with `by_path` that of the whole path, is at least
    `threshold` (0 to 1), and while there are fewer than `length` of them. For a block drafter this is one pass.
    """
    if not 0 <= threshold <= 1 or length < 0:
        raise GraftError(f"threshold is {threshold} and length {length}: expected 0 to 1, and 0 tokens or more")
    least = math.log(threshold) if threshold > 0 else -math.inf
    kept = [0]
    while len(kept) <= length:
        best = _likeliest(draft, builder, kept[-1])
        if best is None:
            break
        token, score = best
        path_score = builder.scores[kept[-1]] + score
        if (path_score if by_path else score) < least:
            break
        kept.append(builder.add(kept[-1], token, path_score, Source.DRAFT))
    return kept


def _likeliest(draft: Draft, builder: TreeBuilder, node: int) -> tuple[int, float] | None:
    """Return a node's likeliest child, or None beyond the block's end."""
    level = draft.expand(builder, [node], 1)
    if not len(level.token_ids):
        return None
    best = int(np.argmax(level.scores))
    return int(level.token_ids[best]), float(level.scores[best])


def retrieve_behind(builder: TreeBuilder, kept: Seq[int], index: Retriever, budget: int) -> list[Continuation]:
    """Return what the index says follows the kept chain: at most `budget` nodes behind its last one (the paper)."""
    return _retrieve(builder, kept, index, [0] * (len(kept) - 1) + [budget])


def retrieve_around(builder: TreeBuilder, kept: Seq[int], index: Retriever, budget: int) -> list[Continuation]:
    """Return what the index says follows every kept node: at most `budget` nodes in all, behind and beside the chain.

    Each node gets a share by the probability that the text comes as far and then leaves the chain; see `shares`.
    """
    return _retrieve(builder, kept, index, shares([builder.scores[node] for node in kept], budget))


def shares(scores: Seq[float], budget: int) -> list[int]:
    """Split `budget` nodes over a chain whose path log-probabilities are `scores`, the root's first.

    Node i is left with probability exp(scores[i]) - exp(scores[i + 1]), the last one with exp(scores[-1]). Largest
    remainders get the nodes that are left over, the deeper one where remainders tie.
    """
    reached = np.exp(np.minimum.accumulate(np.minimum(np.asarray(scores, np.float64), 0.0)))
    leaving = reached - np.append(reached[1:], 0.0)
    exact = leaving / max(float(leaving.sum()), 1e-300) * max(budget, 0)
    whole = np.floor(exact).astype(int)
    order = sorted(range(len(whole)), key=lambda i: (whole[i] - exact[i], -i))
    for i in order[: max(budget, 0) - int(whole.sum())]:
        whole[i] += 1
    return [int(share) for share in whole]


def _retrieve(builder: TreeBuilder, kept: Seq[int], index: Retriever, budgets: Seq[int]) -> list[Continuation]:
    path = np.array([builder.token_ids[node] for node in kept[1:]], np.int32)
    asked = [(depth, node, budget) for depth, (node, budget) in enumerate(zip(kept, budgets)) if budget > 0]
    found = [index.draft(budget, path=path[:depth], at=node) for depth, node, budget in asked]
    return [continuation for continuation in found if continuation is not None]


def grow_best_first(draft: Draft, builder: TreeBuilder, budget: int, width: int) -> None:
    """Add the `budget` likeliest nodes by path probability: DDTree (arXiv 2604.12989), a heap over log marginals.

    Each node is asked about when it is reached, so this is for drafts that answer without another pass (a block's).
    `width`: children looked at per node. Nodes already in the tree are built upon and count nothing.
    """
    heap: list[tuple[float, int, int, int]] = []
    order = count()
    asked = set()

    def ask(node: int) -> None:
        asked.add(node)
        level = draft.expand(builder, [node], width)
        for token, score in zip(level.token_ids.tolist(), level.scores.tolist()):
            heapq.heappush(heap, (-(builder.scores[node] + score), next(order), node, token))

    ask(0)
    end = len(builder) + budget
    while heap and len(builder) < end:
        negative, _, parent, token = heapq.heappop(heap)
        node = builder.add(parent, token, -negative, Source.DRAFT)
        if node not in asked:
            ask(node)
