"""What a target pass of N rows behind L cached tokens costs, and how many rows are worth it.

Knows nothing about models: it is given measurements. Each row bucket holds a straight line over the context,
t(N, L) = fixed + slope x L (attention is linear in L), and a slowly learnt correction from real rounds. Between
buckets cost is interpolated; it never falls with N. A round of 1 + k rows is worth
(1 + sum of the k best path probabilities) / t(1 + k, L) tokens a second; every k is tried, because cost has
steps (float32 doubles from one row to two on many CPUs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError

Array = npt.NDArray[np.float64]
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
# A longer tree must promise this much more than plain decoding: measured round times carry several percent of noise.
MARGIN = 1.05
# Entries of a saved table: of the target's passes, and of a drafter's.
TARGET, DRAFTER = "rows_fixed_slope", "drafter_rows_fixed_slope"
LEARNING_RATE = 0.1
# While trees promise less than this over plain decoding, every so many rounds one is plain, to learn its cost.
SMALL_GAIN = 1.3
PLAIN_EVERY = 12
# One measurement may move a correction by at most this factor, so that a hiccup of the machine does little.
MAX_STEP = 1.5


@dataclass
class CostTable:
    """Round costs in seconds: `fixed [B]`, `slope [B]` (per cached token), `correction [B]` for ROW_BUCKETS."""

    fixed: Array
    slope: Array
    frozen: bool = False
    correction: Array = field(default_factory=lambda: np.ones(len(ROW_BUCKETS)))
    since_plain: int = 0

    def rounds(self, max_rows: int, context: int) -> Array:
        """Return t(N, context) for N = 1..max_rows, never falling with N. [max_rows]"""
        at_buckets = np.maximum.accumulate((self.fixed + self.slope * context) * self.correction)
        rows = np.arange(1, max_rows + 1)
        cost = np.interp(rows, ROW_BUCKETS, at_buckets)
        beyond = rows > ROW_BUCKETS[-1]
        cost[beyond] = at_buckets[-1] * rows[beyond] / ROW_BUCKETS[-1]
        return cost

    def choose(
        self,
        scores: Sequence[Sequence[float]],
        contexts: Sequence[int],
        trust: Sequence[float] | None = None,
        beside: int = 0,
        room: int | None = None,
    ) -> list[int]:
        """Return how many nodes (root included) to verify of each tree in a batch.

        `scores[i]`: path log-probabilities of tree i, root first; `trust[i]`: what share of its promises tree i's
        sequence has kept so far. All trees share one flat forward, with `beside` other rows, so their nodes compete
        for the same rows; with nothing worth its cost every tree is its root alone. `room`: at most so many nodes are
        chosen in all, roots not counted.
        """
        sizes = [len(s) - 1 for s in scores]
        owner = np.repeat(np.arange(len(scores)), sizes)
        gains = np.exp(np.concatenate([np.asarray(s[1:], np.float64) for s in scores]))
        gains *= np.ones(len(gains)) if trust is None else np.asarray(trust)[owner]
        order = np.argsort(-gains, kind="stable")[:room]
        base = len(scores)
        cost = self.rounds(base + beside + len(order), int(np.mean(contexts)))[base + beside - 1 :]
        value = (base + np.concatenate([[0.0], np.cumsum(gains[order])])) / cost
        best = int(np.argmax(value))
        if value[best] < MARGIN * value[0] or self._is_unsure(value[best] / value[0]):
            best = 0
        self.since_plain = 0 if best == 0 else self.since_plain + 1
        counts = np.bincount(owner[order[:best]], minlength=base)
        return [1 + int(count) for count in counts]

    def _is_unsure(self, gain: float) -> bool:
        """Say whether to run a plain round to see what one costs: a small gain, and none seen for long.

        An overestimated plain round would otherwise never be found out.
        """
        return not self.frozen and gain < SMALL_GAIN and self.since_plain >= PLAIN_EVERY

    def learn(self, rows: int, context: int, seconds: float) -> None:
        """Move the correction of the nearest row buckets towards one measured round."""
        if self.frozen or not 1 <= rows <= ROW_BUCKETS[-1]:
            return
        expected = self.rounds(rows, context)[-1]
        ratio = float(np.clip(seconds / expected, 1 / MAX_STEP, MAX_STEP))
        nearness = np.interp(np.arange(len(ROW_BUCKETS)), *_hat(rows))
        self.correction *= ratio ** (LEARNING_RATE * nearness)

    def save(self, path: str | Path, drafter: CostTable | None = None) -> None:
        """Write the table, and that of a drafter's passes, as JSON, corrections folded in."""
        document = {"longgraft_cost_table": 1, TARGET: self._rows()}
        if drafter is not None:
            document[DRAFTER] = drafter._rows()
        Path(path).write_text(json.dumps(document, indent=1) + "\n")

    def _rows(self) -> list[list[float]]:
        fixed, slope = self.fixed * self.correction, self.slope * self.correction
        return [[n, float(f), float(s)] for n, f, s in zip(ROW_BUCKETS, fixed, slope)]

    @classmethod
    def load_drafter(cls, path: str | Path) -> CostTable | None:
        """Read the frozen table of a drafter's passes; None if the file holds none."""
        try:
            has_one = DRAFTER in json.loads(Path(path).read_text())
        except (OSError, ValueError, TypeError):
            has_one = True  # `load` says what is wrong with the file
        return cls.load(path, DRAFTER) if has_one else None

    @classmethod
    def load(cls, path: str | Path, whose: str = TARGET) -> CostTable:
        """Read a frozen table; anything else than a table of this version is one clear error."""
        try:
            document: Any = json.loads(Path(path).read_text())
            table = np.asarray(document[whose], np.float64)
            if document["longgraft_cost_table"] != 1 or tuple(table[:, 0].astype(int)) != ROW_BUCKETS:
                raise KeyError("version or row buckets")
            if not np.all(np.isfinite(table)) or np.any(table[:, 1] <= 0) or np.any(table[:, 2] < 0):
                raise ValueError("costs must be positive, finite seconds, and never fall with the context")
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise GraftError(f"cost table {path}: not a longgraft cost table of version 1 ({error})") from error
        return cls(table[:, 1].copy(), table[:, 2].copy(), frozen=True)

    @classmethod
    def fit(cls, times: Mapping[tuple[int, int], float]) -> CostTable:
        """Return the table through measured `times[rows, context]` in seconds.

        All widths at the smallest context give the fixed part; the slope over the context is taken where a width
        was timed at two contexts and is linear in the rows between (attention is).
        """
        low, high = min(c for _, c in times), max(c for _, c in times)
        widths = sorted(n for n, c in times if c == low)
        deep = [n for n in widths if (n, high) in times] if high > low else []
        slopes = [max(times[n, high] - times[n, low], 0.0) / (high - low) for n in deep] or [0.0]
        slope = np.interp(ROW_BUCKETS, deep or [1], slopes)
        if len(deep) > 1:
            beyond = np.array(ROW_BUCKETS) > deep[-1]
            slope[beyond] = slopes[-1] * np.array(ROW_BUCKETS)[beyond] / deep[-1]
        fixed = np.interp(ROW_BUCKETS, widths, [times[n, low] for n in widths]) - slope * low
        return cls(np.maximum.accumulate(np.maximum(fixed, 1e-6)), np.maximum.accumulate(slope))


def _hat(rows: int) -> tuple[list[float], list[float]]:
    """Return a hat function over bucket numbers with its peak where `rows` falls, one bucket wide each side."""
    peak = float(np.interp(rows, ROW_BUCKETS, np.arange(len(ROW_BUCKETS))))
    return [peak - 1.0, peak, peak + 1.0], [0.0, 1.0, 0.0]
