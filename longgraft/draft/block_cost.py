"""What a pass of a block drafter takes: measured once, corrected by every pass.

Knows seconds, rows and a cost table; no network. The one idea: a pass is one block and some new context rows behind
some held ones, so its table is read at block + new rows, behind the held ones.
"""

from __future__ import annotations

from collections.abc import Callable

from longgraft.cost import ROW_BUCKETS, CostTable

# Context rows that are timed besides none: so many that what one of them takes is not lost in a machine's noise.
MANY = 512


class PassCost:
    """Seconds of a pass. `table` None: made from `timed(held rows, new rows) -> seconds` when first asked."""

    def __init__(
        self, block_size: int, window: int, timed: Callable[[int, int], float], table: CostTable | None
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.table = table
        self._timed = timed

    def seconds(self, new: int, held: int) -> float:
        """Return what a pass with `new` context rows behind `held` ones is expected to take."""
        costs = self.measured().rounds(ROW_BUCKETS[-1], held)
        rows = self.block_size + new
        if rows <= len(costs):
            return float(costs[rows - 1])
        # Context rows beyond the table cost what its last ones do; a share of a whole block each would be far too much.
        slope = (costs[-1] - costs[ROW_BUCKETS[-2] - 1]) / (ROW_BUCKETS[-1] - ROW_BUCKETS[-2])
        return float(costs[-1] + slope * (rows - len(costs)))

    def measured(self) -> CostTable:
        """Return the table, measured when first asked for."""
        if self.table is None:
            self.table = self._measured()
        return self.table

    def learn(self, new: int, held: int, seconds: float) -> None:
        """Take in what a real pass took; before the first measurement there is nothing to correct."""
        if self.table is not None:
            self.table.learn(self.block_size + new, held, seconds)

    def _measured(self) -> CostTable:
        """Time one new row and many behind no context, and one behind many; both kinds of row cost evenly."""
        many = max(2, min(self.window, MANY))
        alone, behind = self._timed(0, 1), self._timed(many, 1)
        each = max(self._timed(0, many) - alone, 0.0) / (many - 1)
        few, more = self.block_size + 1, self.block_size + max(ROW_BUCKETS[-1] - self.block_size, 32)
        step = each * (more - few)
        return CostTable.fit(
            {(few, 0): alone, (more, 0): alone + step, (few, many): behind, (more, many): behind + step}
        )
