"""Runs device rounds, as one launch each where they were recorded as CUDA graphs before.

Knows nothing of what a round does but its two sizes. The one idea: a round of known sizes launches the same kernels on
the same memory each time, so its first run warms everything up, its second is recorded, and from then on it is
replayed. A graph holds addresses: when the index has moved, all graphs go. **Never run on a GPU yet.**
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longgraft.device_round import DeviceRound


class Replay:
    """Queues rounds of one `DeviceRound`; `records`: by CUDA graphs, else kernel by kernel."""

    def __init__(self, one: DeviceRound, records: bool = False) -> None:
        self.round = one
        self.records = records and one.device.type == "cuda"
        self._seen = set[tuple[int, int]]()
        self._graphs: dict[tuple[int, int], tuple[Any, Tensor]] = {}

    def run(self, rows: int, bound: int) -> Tensor:
        """Queue a round (see `DeviceRound.run`); its packed report is overwritten by the next one of these sizes."""
        one, sizes = self.round, (rows, bound)
        is_recording = self.records and sizes in self._seen and sizes not in self._graphs
        if is_recording:  # so that no fault arrives while the index's calls are being recorded
            torch.cuda.synchronize(one.device)
        if one.index is not None and one.index.recover():
            self._graphs.clear()
            self._seen.clear()
            one.propose()
        if not self.records or sizes not in self._seen:
            self._seen.add(sizes)
            return one.run(rows, bound)
        if sizes not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                packed = one.run(rows, bound)
            self._graphs[sizes] = graph, packed
        graph, packed = self._graphs[sizes]
        graph.replay()
        return packed
