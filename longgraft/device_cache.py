"""The rows of one sequence as a round on its device writes and reads them: places by a table, lengths by a number.

Knows the chunk pool and attention's seam; no model, no tree. The one idea: chunks are reserved beforehand for all the
rounds that may come, so a row's place never changes and "behind the prefix" is a look-up at a position the device
knows. `SequenceCache` stays the owner of the chunks, and is told at the end how many rows are worth keeping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longgraft.cache import ChunkPool
from longgraft.kernels.bounded import BoundedPrefix, bounded_attention
from longgraft.kernels.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class BoundedPart:
    """All rows of a flat batch: new rows of one sequence, written to pool rows `slots [N]` behind `prefix`.

    `mask [N, N]` and `positions [N]` as everywhere, on the device.
    """

    pool: ChunkPool
    prefix: BoundedPrefix
    slots: Tensor
    positions: Tensor
    mask: Tensor

    @property
    def begin(self) -> int:
        """First row of the batch that is this part's."""
        return 0

    @property
    def end(self) -> int:
        """First row of the batch behind this part's."""
        return len(self.slots)

    def attend(self, layer: int, rows: tuple[Tensor, ...], spec: AttentionSpec, backend: str) -> Tensor:
        """Store K/V of the new rows and attend them: queries, keys and values -> [rows, Hq, Dv]."""
        query, keys, values = rows
        held = self.pool.keys[layer], self.pool.values[layer]
        for place, new in zip(held, (keys, values)):
            place.index_copy_(0, self.slots, new)
        name = "triton" if backend == "triton" else "reference"
        return bounded_attention(query, held, self.prefix, (keys, values), spec, self.mask, self.positions, name)


def keep_path(pool: ChunkPool, slots: Tensor, path: Tensor, count: Tensor) -> None:
    """Move the rows of the first `count` [1] nodes of `path [N]` to the front of `slots [N]`, in all layers."""
    is_kept = torch.arange(len(slots), device=slots.device) < count
    pool.move_rows(torch.where(is_kept, slots[path], slots), slots)
