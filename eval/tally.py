"""What a replay counts: steps, tokens, nodes, times, and how often each predicted probability came true.

Knows no drafter and no file. Acceptance length = output tokens / steps, the bonus token included, the root not
counted. A prediction is *off* where a bin of at least 1,000 nodes misses by more than 0.05 + 2 standard errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

PROBABILITY_EDGES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
JUDGED_NODES = 1000
LARGEST_GAP = 0.05


@dataclass
class Tally:
    """Counts of one or more replays. `bins [bins, 3]`: nodes, sum of predicted, accepted, by probability.

    `seconds`: one drafting time a step: `extend` by the tokens of the step before, then `draft`.
    """

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    accepted: int = 0
    seconds: list[float] = field(default_factory=list)
    bins: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(PROBABILITY_EDGES) + 1, 3)))

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.accepted += other.accepted
        self.seconds += other.seconds
        self.bins += other.bins

    def summary(self) -> dict[str, float]:
        """Return the figures that are reported."""
        p50, p99 = np.percentile(np.array(self.seconds or [0.0]) * 1e6, [50, 99])
        return {
            "acceptance_length": round(self.tokens / max(self.steps, 1), 3),
            "accepted_per_node": round(self.accepted / max(self.nodes, 1), 3),
            "nodes_per_step": round(self.nodes / max(self.steps, 1), 1),
            "draft_us_p50": round(float(p50), 1),
            "draft_us_p99": round(float(p99), 1),
            "steps": self.steps,
        }

    def count_bins(self, scores: npt.NDArray[np.float32], path: list[int]) -> None:
        """Count the nodes of one draft: `scores [n]` log-probabilities of whole paths, `path` the accepted nodes."""
        probabilities = np.exp(scores.astype(np.float64))
        which = np.searchsorted(PROBABILITY_EDGES, probabilities, side="right")
        hit = np.zeros(len(which))
        hit[path] = 1.0
        for column, weights in enumerate((None, probabilities, hit)):
            self.bins[:, column] += np.bincount(which, weights, len(self.bins))


def accepted_path(token_ids: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> list[int]:
    """Return the nodes along which a tree agrees with what really came; parents: -1 = hangs from the context."""
    path: list[int] = []
    at, wanted = -1, truth[0] if truth else None
    for node, (token, parent) in enumerate(zip(token_ids, parents)):
        if parent == at and token == wanted:
            path.append(node)
            at, wanted = node, truth[len(path)] if len(path) < len(truth) else None
    return path


def calibration(bins: npt.NDArray[np.float64]) -> list[dict[str, Any]]:
    """Return the reliability diagram: a row per bin of predicted path probability that holds nodes.

    `standard_error`: of the observed share, as if nodes were independent (they are not: it is the least it can be).
    """
    lows = (0.0, *PROBABILITY_EDGES)
    rows = []
    for low, (n, total, hits) in zip(lows, bins.tolist()):
        if n:
            predicted, observed = total / n, hits / n
            error = sqrt(observed * (1 - observed) / n)
            off = n >= JUDGED_NODES and abs(predicted - observed) > LARGEST_GAP + 2 * error
            rows.append(
                {
                    "from": low,
                    "nodes": int(n),
                    "predicted": round(predicted, 4),
                    "observed": round(observed, 4),
                    "standard_error": round(error, 4),
                    "off": off,
                }
            )
    return rows
