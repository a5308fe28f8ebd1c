"""The round of one sequence without the host: propose, verify, accept, keep, extend, all on the device.

Knows the target, a device index and tensors; not who asks for the rounds nor what becomes of their tokens. `rounds` is
the plain round, and the oracle of this one. The one idea: **whatever a later round needs of an earlier one is a tensor
on the device**: how long the text is, how much may still come, which tokens, which rows. So rounds are queued one
after another, and the host learns what they did from reports that arrive when they arrive.

The index is extended on a stream of its own while rows are kept; with CUDA graphs a round of known sizes is one launch
(`device_graph`). **Never run on a GPU yet**; the tests run it on the CPU, under a mode that refuses every host read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longgraft.device_cache import BoundedPart, keep_path
from longgraft.device_draw import Drawing
from longgraft.device_tree import DeviceTree, clipped
from longgraft.kernels.bounded import BoundedPrefix
from longgraft.sequence import Sequence
from longgraft.target import Target

NO_END = -2  # stands for an EOS token where there is none
HEAD, COLUMNS = 4, 5


class DeviceIndex(Protocol):
    """What a round asks of the index; `longgraft.index.device.DeviceAutomaton` is the real one. Nothing waits."""

    def extend(self, token_ids: Tensor, count: Tensor | None = None, learn: bool = False) -> None:
        """Take in the first `count` [1] of the committed tokens [n]."""

    def draft(self, budget: int) -> Any:
        """Propose at most `budget` nodes: `Columns`, with `origins` and `probabilities`."""

    def recover(self) -> bool:
        """Act on a fault that has arrived; True: its tensors are others now."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one round did, on the host: `tokens [count]` committed, the `path [count]` they follow, the tree verified.

    `has_fault`: it stopped where the host's sampler must say what is wrong. `is_done`: nothing will come any more.
    `nodes [n, 3]` token, parent, origin (-1: none) of each row but the root; `gains [n]`: path probabilities of all
    drafted nodes, verified or not.
    """

    tokens: list[int]
    path: list[int]
    has_fault: bool
    is_done: bool
    nodes: npt.NDArray[np.int64]
    gains: npt.NDArray[np.float64]

    @classmethod
    def of(cls, packed: npt.NDArray[np.int64], rows: int) -> Report:
        """Read what `DeviceRound._packed` wrote."""
        count, fault, done, num_nodes = packed[:HEAD].tolist()
        new, path, token_ids, parents, origins = packed[HEAD : HEAD + COLUMNS * rows].reshape(COLUMNS, rows)
        there = slice(1, 1 + min(num_nodes, rows - 1))
        nodes = np.stack([token_ids, parents, origins], axis=1)[there]
        gains = packed[HEAD + COLUMNS * rows :].view(np.float64)[:num_nodes]
        return cls(new[:count].tolist(), path[:count].tolist(), bool(fault), bool(done), nodes, gains)


class DeviceRound:
    """The state of one sequence on its device, and the round that moves it on.

    `most_rows`: rows of the widest round, root included; `room`: tokens that may be committed here. Chunks for all of
    it are reserved behind the sequence's prefix, whose length must be one less than its tokens. `index` None: plain
    rounds of one row.
    """

    def __init__(self, target: Target, seq: Sequence, index: DeviceIndex | None, most_rows: int, room: int) -> None:
        self.target, self.pool, self.index = target, seq.cache.pool, index
        self.most_rows, self.vocab_size = (most_rows if index is not None else 1), target.vocab_size
        self.device = device = target.device
        first, params = len(seq.token_ids), seq.sampler.params
        seq.cache.reserve(room + self.most_rows)
        if seq.cache.length == 0:  # no round may read what was never written, not even to mask it
            for group in self.pool.rows_of(seq.cache.chunks[0], 1):
                group.zero_()
        self.rows = seq.cache.pool_rows().to(device)
        self.drawing = Drawing.of(params, target.dtype, device)
        self.ends = torch.tensor(sorted(params.eos_token_ids or ()) or [NO_END], device=device)
        # The last token, then room for all that may come and what a round writes beyond it.
        self.tokens = torch.zeros(room + 1 + self.most_rows, dtype=torch.int64, device=device)
        self.tokens[:1] = seq.token_ids[-1]
        self.prefix_len = torch.full((1,), first - 1, device=device)  # rows in the cache
        self.committed = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_position = first - seq.prompt_len  # output position of the first draw
        self.remaining = torch.full((1,), room, device=device)
        self.is_done = torch.zeros(1, dtype=torch.bool, device=device)
        self.drafted: Any = None
        self.propose()
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and index is not None else None

    def propose(self) -> None:
        """Let the index propose for the next round."""
        if self.index is not None:
            self.drafted = self.index.draft(self.most_rows - 1)

    def run(self, rows: int, bound: int) -> Tensor:
        """Queue one round of `rows` rows behind at most `bound` cached ones; return its packed report."""
        root = self.tokens.index_select(0, self.committed)
        tree = DeviceTree.of(root, self.drafted, rows, self.vocab_size)
        slots = self.rows.index_select(0, self.prefix_len + torch.arange(rows, device=self.device))
        logits = self._verify(tree, slots, bound)
        drawn, is_usable = self.drawing.draw(logits, self.first_position + self.committed + tree.depths)
        path, count = tree.agreed(drawn)
        new = drawn[path]
        kept, fault, ends = self._clip(new, count, is_usable[path])
        ends = ends | fault
        packed = self._packed(tree, torch.cat([kept, fault, ends]), (new, path))
        with self._on_the_side():
            self._extend(new, kept)
        keep_path(self.pool, slots, path, kept)
        self._commit(new, kept, ends)
        self._join()
        return packed

    def _verify(self, tree: DeviceTree, slots: Tensor, bound: int) -> Tensor:
        """Run the target over the tree's rows; K/V land in `slots`. Logits [N, V]."""
        positions = self.prefix_len + tree.depths
        prefix = BoundedPrefix(self.rows[:bound], self.prefix_len, self.pool.chunk_rows)
        part = BoundedPart(self.pool, prefix, slots, positions, tree.mask)
        return self.target.forward_on_device(tree.token_ids, positions, part)

    def _clip(self, new: Tensor, count: Tensor, is_usable: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return how many tokens are committed, whether a draw among them failed, whether the text ends. [1] each"""
        number = torch.arange(len(new), device=self.device)
        failed = ~is_usable & (number < count)
        before = torch.where(failed, number, count).amin(dim=0, keepdim=True)
        kept, ends = clipped(new, before, self.ends, self.remaining)
        fault = (before < count) & ~ends & ~self.is_done
        return torch.where(self.is_done, 0, kept), fault, ends | self.is_done

    def _packed(self, tree: DeviceTree, head: Tensor, found: tuple[Tensor, Tensor]) -> Tensor:
        """Lay out the report for one copy to the host: int64 [4 + 5 N + most]; see `Report.of`."""
        rows, drafted = len(tree), self.drafted
        if drafted is None:
            columns = [torch.zeros_like(self.committed), *found, tree.token_ids, tree.parents, tree.parents]
            return torch.cat([head.long(), *columns])
        known = drafted.origins[: rows - 1].long()
        origins = torch.full((rows,), -1, device=self.device)
        origins[1 : 1 + len(known)] = known
        gains = drafted.probabilities.view(torch.int64)
        columns = [drafted.num_nodes.long(), *found, tree.token_ids, tree.parents, origins, gains]
        return torch.cat([head.long(), *columns])

    def _extend(self, new: Tensor, kept: Tensor) -> None:
        """Tell the index what was committed, and let it propose for the next round."""
        if self.index is not None:
            self.index.extend(new, kept, learn=True)
        self.propose()

    def _commit(self, new: Tensor, kept: Tensor, ends: Tensor) -> None:
        """Move on by the first `kept` tokens; what is written behind them will be overwritten."""
        at = self.committed + 1 + torch.arange(len(new), device=self.device)
        self.tokens.index_copy_(0, at, new)
        self.committed.add_(kept)
        self.prefix_len.add_(kept)
        self.remaining.sub_(kept)
        self.is_done.logical_or_(ends)

    @contextmanager
    def _on_the_side(self) -> Iterator[None]:
        """Queue what follows on the index's stream, behind everything queued so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        """Let what is queued from now on wait for the index."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
