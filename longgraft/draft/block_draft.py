"""One round's block as a draft: the marginals of its positions, read at whatever nodes are asked about.

Knows trees and one tensor of log-probabilities; not how it was made. The one idea: a node's children depend on its
depth alone, so what was looked up once for a depth serves every node there.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from torch import Tensor

from longgraft.draft.block_ends import Ends
from longgraft.kernels.top_ids import top_ids
from longgraft.tree import FloatArray, IntArray, Level, TreeBuilder


class BlockDraft:
    """One round's block. The pass runs when first asked; every depth then has its marginal."""

    in_one_pass = True
    is_block = True  # a policy may cut it by its own confidence: nothing is saved by not asking on

    def __init__(self, run: Callable[[], Tensor], expected: Callable[[bool], float], ends: Ends, drafts: int) -> None:
        """`run()` makes the block's log-probabilities `[drafts, V]`; `expected(caught_up)`: its seconds."""
        self._run, self._expected = run, expected
        self._ends, self._drafts = ends, drafts
        self._scores: Tensor | None = None
        self._best: dict[int, tuple[IntArray, FloatArray]] = {}

    def expand(self, tree: TreeBuilder, nodes: Seq[int], width: int) -> Level:
        """Return each node's `width` likeliest children, and besides these every child it already has in `tree`.

        A node of depth d gets the marginal of position d + 1 behind the root. Nodes at or beyond the block's end get
        none, and tokens outside the drafter's own vocabulary no score: the drafter does not know. Children of one
        node are in the order of their scores, existing ones last.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        existing = _children(tree, nodes)
        for node in nodes:
            depth = _depth(tree, node)
            if depth >= self._drafts:
                continue
            ids, best = self._likeliest(depth, width)
            known = [token for token in existing[node] if token not in set(ids.tolist())]
            others = self._scores_of(depth, known)
            token_ids += [*ids.tolist(), *(token for token, _ in others)]
            scores += [*best.tolist(), *(score for _, score in others)]
            parents += [node] * (len(ids) + len(others))
        return Level(np.array(token_ids, np.int32), np.array(parents, np.int32), np.array(scores, np.float32))

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        """Return the expected seconds of the block's one pass, whatever `rows` are; 0 once it has run."""
        return self._expected(caught_up) if self._scores is None else 0.0

    def _block(self) -> Tensor:
        if self._scores is None:
            self._scores = self._run()
        return self._scores

    def _likeliest(self, depth: int, width: int) -> tuple[IntArray, FloatArray]:
        """Return the target's ids and log-probabilities of a depth's `width` likeliest tokens."""
        width = min(max(width, 0), self._ends.size)
        if depth not in self._best or len(self._best[depth][0]) < width:
            row = self._block()[depth : depth + 1]
            best = top_ids(row, width)[0]
            ids = self._ends.ids
            tokens = best if ids is None else ids[best]
            self._best[depth] = tokens.cpu().numpy().astype(np.int32), row[0, best].float().cpu().numpy()
        tokens_, scores = self._best[depth] if width else (np.zeros(0, np.int32), np.zeros(0, np.float32))
        return tokens_[:width], scores[:width]

    def _scores_of(self, depth: int, token_ids: list[int]) -> list[tuple[int, float]]:
        """Return (token, log-probability) of those tokens the drafter knows."""
        rows = self._ends.rows
        size = self._ends.size
        if not token_ids:
            return []
        if rows is None:
            places = [token if 0 <= token < size else -1 for token in token_ids]
        else:
            inside = [0 <= token < len(rows) for token in token_ids]
            places = [int(rows[token]) if ok else -1 for token, ok in zip(token_ids, inside)]
        block = self._block()[depth]
        return [(token, float(block[place])) for token, place in zip(token_ids, places) if place >= 0]


def _depth(tree: TreeBuilder, node: int) -> int:
    depth = 0
    while node:
        node = tree.parents[node]
        depth += 1
    return depth


def _children(tree: TreeBuilder, nodes: Seq[int]) -> dict[int, list[int]]:
    """Return the tokens that hang from each of `nodes`."""
    found: dict[int, list[int]] = {node: [] for node in nodes}
    for token, parent in zip(tree.token_ids, tree.parents):
        if parent in found:
            found[parent].append(token)
    return found
