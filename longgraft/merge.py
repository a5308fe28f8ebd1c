"""Merge: what the drafter and the index say about one parent's children becomes one distribution.

Knows trees and numbers; no drafter, no index, no cost. Each source is a distribution over the children it names and
"none of these". What one source leaves to "none" it leaves to the other's opinion, so both speak about the same
options; the two are then multiplied, each to the power of a weight (a logarithmic opinion pool), and normalised. The
weights learn from every token that is committed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longgraft.tree import Continuation, Level, TreeBuilder

Array = npt.NDArray[np.float64]
# A source never leaves less than this to "none": nothing is certain.
LEAST_REST = 1e-3
# Weights of (drafter beside index, index beside drafter, drafter alone) at first; eval/LOG.md says where they ended.
FIRST_WEIGHTS = (0.7, 0.4, 1.0)
# Steps shrink from the first to the second as 1 / number of observations.
LEARNING_RATES = (0.2, 0.02)
WEIGHT_RANGE = (0.0, 2.0)
STEEPEST = 3.0  # nats: one surprise moves a weight by at most a step times this


@dataclass
class Weights:
    """How much each source counts: `both` (drafter, index) where both speak, `alone` where only the drafter does."""

    both: Array = field(default_factory=lambda: np.array(FIRST_WEIGHTS[:2]))
    alone: Array = field(default_factory=lambda: np.array([FIRST_WEIGHTS[2], 0.0]))
    seen: list[int] = field(default_factory=lambda: [0, 0])

    def learn(self, is_both: bool, features: Array, probabilities: Array, outcome: int) -> None:
        """Take a gradient step on the log-likelihood of what came; `features [options, 2]`: log-probabilities."""
        gradient = np.clip(features[outcome] - probabilities @ features, -STEEPEST, STEEPEST)
        weights, used = (self.both, (1.0, 1.0)) if is_both else (self.alone, (1.0, 0.0))
        first, last = LEARNING_RATES
        weights += max(last, first / (1 + self.seen[is_both])) * gradient * used
        np.clip(weights, *WEIGHT_RANGE, out=weights)
        self.seen[is_both] += 1


class Opinions:
    """What each source says about the edges of a tree under way.

    `builder` holds the nodes; after `combine` its scores are the merged path log-probabilities. `asked`: nodes whose
    children the drafter named, `looked_up`: nodes whose children the index named.
    """

    def __init__(self, builder: TreeBuilder) -> None:
        self.builder = builder
        self.asked: set[int] = set()
        self.looked_up: set[int] = set()
        # Log-probability of a node given its parent, by who said so.
        self.drafted: dict[int, float] = {}
        self.found: dict[int, float] = {}

    def take_level(self, level: Level, nodes: Iterable[int]) -> None:
        """Take in what the drafter says about `nodes`; entries that are not in the tree do not count."""
        self.asked.update(nodes)
        for parent, token, score in zip(level.parents.tolist(), level.token_ids.tolist(), level.scores.tolist()):
            node = self.builder.find(parent, token)
            if node is not None and math.isfinite(score):
                self.drafted[node] = min(score, 0.0)

    def take_found(self, found: Continuation, nodes: list[int]) -> None:
        """Take in what the index says; `nodes`: of each of its entries, as `graft` returns them."""
        scores = found.scores.tolist()
        for node, parent, score in zip(nodes, found.parents.tolist(), scores):
            if node >= 0:
                self.looked_up.add(self.builder.parents[node])
                self.found[node] = score - (scores[parent] if parent >= 0 else 0.0)

    def combine(self, weights: Weights) -> None:
        """Set the builder's scores to merged path log-probabilities. O(nodes)"""
        self._options = _Options(self, weights)
        logs = self._options.conditional.tolist()
        scores, parents = self.builder.scores, self.builder.parents
        for node in range(1, len(self.builder)):
            scores[node] = scores[parents[node]] + logs[node - 1]

    def coverage(self, node: int, least: float = 0.1) -> float:
        """Return how likely it is that one of a node's likelier children (at least `least` each) comes."""
        scores = self.builder.scores
        shares = (math.exp(scores[child] - scores[node]) for child in self.builder.children[node])
        return float(sum(share for share in shares if share >= least))

    def learn(self, weights: Weights, token_ids: Iterable[int]) -> tuple[float, int]:
        """Let the weights learn from the tokens that came, as far as they stay inside the tree.

        Returns, over the nodes passed that the drafter was asked about, how many children were expected to come and
        how many did.
        """
        node: int | None = 0
        expected, came = 0.0, 0
        for token in token_ids:
            if node is None or not self.builder.children[node]:
                break
            following = self.builder.find(node, token)
            if node in self.asked:
                expected += 1.0 - float(self._options.none[node])
                came += following is not None
                self._options.learn(weights, node, following, node in self.looked_up)
            node = following
        return expected, came


class _Options:
    """Both opinions about every edge and every "none", laid side by side. Edges are nodes 1 .. n-1."""

    def __init__(self, tree: Opinions, weights: Weights) -> None:
        n = len(tree.builder)
        self.parents = np.asarray(tree.builder.parents[1:], np.int64)
        asked, looked_up = _flags(tree.asked, n), _flags(tree.looked_up, n)
        drafted, found = _shares(tree.drafted, n), _shares(tree.found, n)
        # [n] each: the logarithm of every parent's "none", and [n - 1] of every edge, by source.
        (edge_d, none_d), (edge_r, none_r) = self._complete(drafted, found, n), self._complete(found, drafted, n)
        self.edges, self.nones = np.stack([edge_d, edge_r], 1), np.stack([none_d, none_r], 1)
        used = np.where((asked & looked_up)[:, None], weights.both, np.where(asked[:, None], weights.alone, (0.0, 1.0)))
        edges = np.exp((self.edges * used[self.parents]).sum(1))
        nones = np.exp((self.nones * used).sum(1))
        total = np.bincount(self.parents, edges, n) + nones
        self.conditional = np.log(np.maximum(edges / total[self.parents], 1e-12))
        self.none = nones / total

    def _complete(self, own: Array, other: Array, n: int) -> tuple[Array, Array]:
        """Return a source's log-probabilities of all edges and of "none", its rest shared out as the other says."""
        mine, theirs = np.nan_to_num(own), np.nan_to_num(other)
        rest = np.clip(1.0 - np.bincount(self.parents, mine, n), LEAST_REST, 1.0)
        other_rest = np.clip(1.0 - np.bincount(self.parents, theirs, n), LEAST_REST, 1.0)
        is_missing = np.isnan(own)
        left = other_rest + np.bincount(self.parents, theirs * is_missing, n)
        shared = rest[self.parents] * theirs / left[self.parents]
        edges = np.log(np.maximum(np.where(is_missing, shared, mine), 1e-9))
        return edges, np.log(np.maximum(rest * other_rest / left, 1e-9))

    def learn(self, weights: Weights, node: int, child: int | None, is_both: bool) -> None:
        rows = np.flatnonzero(self.parents == node)
        features = np.concatenate([self.nones[node : node + 1], self.edges[rows]])
        probabilities = np.concatenate([self.none[node : node + 1], np.exp(self.conditional[rows])])
        outcome = 0 if child is None else 1 + int(np.flatnonzero(rows == child - 1)[0])
        weights.learn(is_both, features, probabilities, outcome)


def _shares(logs: dict[int, float], n: int) -> Array:
    """Return the probabilities of nodes 1 .. n-1, NaN where nothing was said."""
    shares = np.full(n, np.nan)
    shares[list(logs)] = np.exp(list(logs.values()))
    return shares[1:]


def _flags(nodes: set[int], n: int) -> npt.NDArray[np.bool_]:
    flags = np.zeros(n, np.bool_)
    flags[list(nodes)] = True
    return flags
