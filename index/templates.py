"""Subtrees of the successor table, hung from the root by a fixed shape: what the paper fills pruned rows with.

Knows rows of token ids and nothing else: no text, no model, no probabilities of this round. The one idea: a shape says
which successor (rank) of which node stands where, so that a whole depth is one gather, and every node is
`rows[token of its parent, rank]`.

The widths by depth of the 52-node shape are the paper's (arXiv 2605.20104, the stage pruned at the root). Of the other
stages and of who hangs from whom only the principle is known (static, unbalanced, the chain of likeliest successors the
deepest), so two rules of our own fill that in:

- *Widths*: the same proportions for every size. The nodes are dealt out to the depths in proportion to the paper's
  widths, rests to the largest remainder (of equal ones the shallower); 52 nodes give those widths exactly.
- *Places*: the successor of rank r (from 0 on) is worth 1 / (1 + r) of the first. A depth takes, from all children of
  the depth above, those with the best product along the path; of equal ones, that of the better parent. Measured hit
  rates of a token's successor row fall about like this (0.30, 0.15, 0.08, 0.05, 0.03: `hazards.json`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.tree import Continuation, Source

IntArray = npt.NDArray[np.int32]
PAPER_WIDTHS = (8, 10, 8, 6, 5, 4, 4, 4, 3)  # by depth, 52 nodes
NUM_RANKS = 8  # successors kept of each token
FIRST_HIT = 0.3  # how often the first successor is the token that comes
EMPTY = -1


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A shape of n nodes, breadth first: `parents [n]` (-1: the root), `ranks [n]`, `scores [n]`.

    `widths`: nodes at each depth. Scores are path log-probabilities as far as a fixed shape can know them.
    """

    widths: tuple[int, ...]
    parents: IntArray
    ranks: IntArray
    scores: npt.NDArray[np.float32]

    def fill(self, rows: IntArray, token_id: int, at: int = 0) -> Continuation | None:
        """Look the shape up in successor `rows [V, k]` (-1: empty) below node `at`, which holds `token_id`.

        A missing entry leaves out the node and all below it. None if nothing is left. One gather a depth.
        """
        tokens = np.full(len(self.parents) + 1, token_id, np.int64)  # that node last: parent -1 finds it
        end = 0
        for width in self.widths:
            span = slice(end, end + width)
            end += width
            tokens[span] = _successors(rows, tokens[self.parents[span]], self.ranks[span])
        found = np.flatnonzero(tokens[:-1] != EMPTY)
        if not len(found):
            return None
        place = np.full(len(tokens), -1, np.int32)
        place[found] = np.arange(len(found))
        n = len(found)
        return Continuation(
            tokens[found].astype(np.int32),
            place[self.parents[found]],
            self.scores[found],
            np.full(n, Source.SUCCESSOR, np.int8),
            np.full((n, 2), -1, np.int32),
            np.zeros(n, np.int32),
            at,
        )


@lru_cache(maxsize=128)
def template(num_nodes: int) -> Template:
    """Return the shape of `num_nodes` nodes (root not counted); made once."""
    if num_nodes < 1:
        raise GraftError(f"template of {num_nodes} nodes: expected 1 or more")
    return shape_of(widths_of(num_nodes))


def widths_of(num_nodes: int) -> tuple[int, ...]:
    """Deal nodes out to depths in proportion to `PAPER_WIDTHS`, by largest remainders; empty depths are left out.

    More than 52 nodes ask for more successors than a token has: what a depth cannot hold goes to the next.
    """
    shares = num_nodes * np.asarray(PAPER_WIDTHS, np.int64)
    total = sum(PAPER_WIDTHS)
    widths = shares // total
    order = np.argsort(-(shares % total), kind="stable")
    widths[order[: num_nodes - int(widths.sum())]] += 1
    dealt: list[int] = []
    spare, room = 0, NUM_RANKS
    for width in widths[widths > 0].tolist():
        dealt.append(min(width + spare, room))
        spare += width - dealt[-1]
        room = NUM_RANKS * dealt[-1]
    return tuple(dealt)


def shape_of(widths: tuple[int, ...], num_ranks: int = NUM_RANKS) -> Template:
    """Return the best shape with at most these widths, by the rule of places."""
    parents, ranks, made = [np.empty(0, np.int32)], [np.empty(0, np.int32)], []
    above, worth, first = np.array([-1]), np.array([1.0]), 0
    costs: list[npt.NDArray[np.float64]] = []
    for width in widths:
        # Integers while they are exact: products of small ranks, so that equal ones are equal.
        products = np.multiply.outer(worth, 1.0 + np.arange(num_ranks)).ravel()
        chosen = np.argsort(products, kind="stable")[:width]
        parents.append(above[chosen // num_ranks].astype(np.int32))
        ranks.append((chosen % num_ranks).astype(np.int32))
        worth = products[chosen]
        made.append(len(chosen))
        costs.append(np.log(worth) - len(made) * np.log(FIRST_HIT))
        above = first + np.arange(len(chosen))
        first += len(chosen)
    return Template(
        tuple(made), np.concatenate(parents), np.concatenate(ranks), -np.concatenate(costs).astype(np.float32)
    )


def _successors(rows: IntArray, tokens: npt.NDArray[np.int64], ranks: IntArray) -> npt.NDArray[np.int64]:
    """Return rows[tokens, ranks], or -1 where there is no such row or entry. [n]"""
    known = (tokens >= 0) & (tokens < rows.shape[0]) & (ranks < rows.shape[1])
    found = rows[np.where(known, tokens, 0), np.where(known, ranks, 0)] if rows.size else EMPTY
    return np.where(known, found, EMPTY).astype(np.int64)
