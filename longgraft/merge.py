"""Merge: what the drafter and the index say about one parent's children becomes one distribution.

Knows trees and numbers; no drafter, no index, no cost. Each source is a distribution over the children it names and
"none of these". What one source leaves to "none" it leaves to the other's opinion, so both speak about the same
options; the two are then multiplied, each to the power of a weight (a logarithmic opinion pool), and normalised. The
weights learn from every token that is committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longgraft.tree import Continuation, Level, Source, TreeBuilder

Array = npt.NDArray[np.float64]
# A source never leaves less than this to "none": nothing is certain.
LEAST_REST = 1e-3
# Weights of (drafter beside index, index beside drafter, drafter alone) at first; see eval/LOG.md for where they ended.
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
    """A tree under way, with what each source says about every edge.

    `builder` holds the nodes; after `combine` its scores are the merged path log-probabilities. `asked`: nodes whose
    children the drafter named, `looked_up`: nodes whose children the index named.
    """

    def __init__(self, root_token: int) -> None:
        self.builder = TreeBuilder(root_token)
        self.asked: set[int] = set()
        self.looked_up: set[int] = set()
        self._drafted: list[float] = [np.nan]
        self._found: list[float] = [np.nan]

    def __len__(self) -> int:
        return len(self.builder)

    def add_level(self, level: Level, nodes: Iterable[int], vocab_size: int) -> list[int]:
        """Take in what the drafter says about `nodes`; return the new nodes."""
        self.asked.update(nodes)
        before = len(self)
        for parent, token, score in zip(level.parents.tolist(), level.token_ids.tolist(), level.scores.tolist()):
            if 0 <= token < vocab_size:
                node = self._add(parent, token, Source.DRAFT, (-1, -1))
                self._drafted[node] = min(score, 0.0)
        return list(range(before, len(self)))

    def add_found(self, found: Continuation | None, vocab_size: int, max_depth: int, depths: list[int]) -> None:
        """Take in what the index says below node `found.at`; nodes deeper than `max_depth` are left out."""
        if found is None:
            return
        nodes, tokens, parents = list[int](), found.token_ids.tolist(), found.parents.tolist()
        sources, origins, scores = found.sources.tolist(), found.origins.tolist(), found.scores.tolist()
        for token, parent, score, source, origin in zip(tokens, parents, scores, sources, origins):
            at = found.at if parent < 0 else nodes[parent]
            if at < 0 or not 0 <= token < vocab_size or depths[at] >= max_depth:
                nodes.append(-1)
                continue
            nodes.append(self._add(at, token, Source(source), (origin[0], origin[1])))
            if nodes[-1] == len(depths):
                depths.append(depths[at] + 1)
            self.looked_up.add(at)
            self._found[nodes[-1]] = score - (scores[parent] if parent >= 0 else 0.0)

    def _add(self, parent: int, token: int, source: Source, origin: tuple[int, int]) -> int:
        builder = self.builder
        node = builder.add(parent, token, -np.inf, source, origin)
        if node == len(self._drafted):
            self._drafted.append(np.nan)
            self._found.append(np.nan)
        elif source != Source.DRAFT and builder.sources[node] == Source.DRAFT:
            # Where both propose a token, its place in the text says more to a reader than that it was drafted too.
            builder.sources[node], builder.origins[node] = int(source), origin
        return node

    def combine(self, weights: Weights) -> None:
        """Set the builder's scores to merged path log-probabilities. O(nodes)"""
        n = len(self)
        self._options = _Options(self, weights)
        logs = self._options.conditional.tolist()
        scores, parents = self.builder.scores, self.builder.parents
        for node in range(1, n):
            scores[node] = scores[parents[node]] + logs[node - 1]

    def coverage(self, node: int, least: float = 0.1) -> float:
        """Return how likely it is that one of a node's likelier children (at least `least` each) comes."""
        scores = self.builder.scores
        shares = (np.exp(scores[child] - scores[node]) for child in self.builder.children[node])
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
            following = next((c for c in self.builder.children[node] if self.builder.token_ids[c] == token), None)
            if node in self.asked:
                expected += 1.0 - float(self._options.none[node])
                came += following is not None
                self._options.learn(weights, node, following, node in self.looked_up)
            node = following
        return expected, came


class _Options:
    """Both opinions about every edge and every "none", laid side by side. Edges are nodes 1 .. n-1."""

    def __init__(self, tree: Opinions, weights: Weights) -> None:
        n = len(tree)
        self.parents = np.asarray(tree.builder.parents[1:], np.int64)
        asked, looked_up = _flags(tree.asked, n), _flags(tree.looked_up, n)
        drafted, found = np.exp(tree._drafted[1:]), np.exp(tree._found[1:])
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


def _flags(nodes: set[int], n: int) -> npt.NDArray[np.bool_]:
    flags = np.zeros(n, np.bool_)
    flags[list(nodes)] = True
    return flags
