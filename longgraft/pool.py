"""The chunk pool: K and V of all layers, and who holds which chunk.

Knows no model, no attention and no tokens: layers are shapes, rows are numbers. The idea: a chunk that no sequence
refers to any more may stay filled, *held* for whoever asks for the same text next; it counts as free all the same,
because it is given up the moment somebody needs room. Neighbouring chunk ids are one strided view, so attention
reads the cache in place, one run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from longgraft.config import GraftError

Span = tuple[int, int]
"""Rows start .. stop-1."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one row of one layer holds: `kv_heads` keys of `key_dim` and as many values of `value_dim`."""

    kv_heads: int
    key_dim: int
    value_dim: int


class ChunkPool:
    """K and V of all layers in chunks of `chunk_rows` rows, with a reference count per chunk.

    `keys[layer] [num_chunks * chunk_rows, Hk, Dk]` and `values[layer] [.., Hk, Dv]` are views: layers of
    equal shape share one allocation, so that a row moves in all of them by one copy. `side [.., F]`: what else is
    known of each row (a drafter's hidden states), or None; it moves with its row. Memory is reserved, not touched: on
    the CPU a chunk costs nothing before it is first written. `num_free` chunks are referred to by no sequence; of
    these, `num_idle` are held; when the others do not suffice, each of `keepers` is asked to drop so many and says how
    many it did.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_chunks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        chunk_rows: int = 256,
        *,
        side: int = 0,
    ) -> None:
        if not layers or num_chunks < 1 or chunk_rows < 1:
            raise ValueError(f"{len(layers)} layers, {num_chunks} x {chunk_rows} rows: expected 1 or more")
        self.layers = tuple(layers)
        self.num_chunks, self.chunk_rows = num_chunks, chunk_rows
        self.dtype, self.device = dtype, torch.device(device)
        self.num_free, self.num_idle = num_chunks, 0
        self.keepers: list[Callable[[int], int]] = []
        self._references = [0] * num_chunks
        self._held = bytearray(num_chunks)
        self._touched = bytearray(num_chunks)
        self._groups: list[Tensor] = []
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for shape in dict.fromkeys(layers):
            members = [layer for layer, other in enumerate(layers) if other == shape]
            for views, size in ((keys, shape.key_dim), (values, shape.value_dim)):
                group = self._reserved(len(members), shape.kv_heads, size)
                views.update((layer, group[i]) for i, layer in enumerate(members))
        self.keys = tuple(keys[layer] for layer in range(len(layers)))
        self.values = tuple(values[layer] for layer in range(len(layers)))
        self.side = self._reserved(1, 1, side)[0, :, 0] if side else None

    def _reserved(self, members: int, heads: int, size: int) -> Tensor:
        rows = (members, self.num_chunks * self.chunk_rows, heads, size)
        self._groups.append(torch.empty(rows, dtype=self.dtype, device=self.device))
        return self._groups[-1]

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes that one chunk takes: keys and values of all layers, and side rows."""
        return sum(prod(group.shape) for group in self._groups) // self.num_chunks * self.dtype.itemsize

    @property
    def num_warm(self) -> int:
        """Free chunks that were written before: taking them asks the system for no memory. O(num_chunks)"""
        return sum(not n and bool(touched) for n, touched in zip(self._references, self._touched))

    def references(self, chunk: int) -> int:
        """Return how many sequences refer to this chunk; 0 = free."""
        return self._references[chunk]

    def is_held(self, chunk: int) -> bool:
        """Say whether the chunk's rows are kept for later sequences."""
        return bool(self._held[chunk])

    def is_shared(self, chunk: int) -> bool:
        """Say whether somebody besides one sequence relies on the chunk's rows, so that nobody may write there."""
        return self._references[chunk] > 1 or bool(self._held[chunk])

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free chunks: the neighbours behind `after`, else a place in the largest gap.

        Held chunks are given up only where there are too few others. Raises GraftError, and takes nothing, if too few
        are free.
        """
        if count > self.num_free:
            more = (count - self.num_free) * self.bytes_per_chunk
            raise GraftError(
                f"KV pool: {count} chunks of {self.chunk_rows} rows needed, {self.num_free} of "
                f"{self.num_chunks} free: raise kv_bytes by {more:,}, lower max_context, or release sequences"
            )
        missing = count - (self.num_free - self.num_idle)
        for keeper in self.keepers:
            missing -= keeper(missing) if missing > 0 else 0
        assert missing <= 0, "chunks are held and nobody gives them up"
        taken: list[int] = []
        chunk = self.num_chunks if after is None else after + 1
        for left in range(count, 0, -1):
            if chunk >= self.num_chunks or self._references[chunk] or self._held[chunk]:
                chunk = self._place(left)
            self._references[chunk] = self._touched[chunk] = 1
            taken.append(chunk)
            chunk += 1
        self.num_free -= count
        return taken

    def _place(self, count: int) -> int:
        """Where `count` chunks start in the largest gap: its middle, so that who ends there can grow on."""
        start = size = run = 0
        for chunk, (references, held) in enumerate(zip(self._references, self._held)):
            run = 0 if references or held else run + 1
            if run > size:
                start, size = chunk - run + 1, run
        assert size, "no chunk is blank, though so many are free"
        return start and start + max(0, size - count) // 2

    def share(self, chunks: Iterable[int]) -> None:
        """Add one reference to each of these chunks, all of them in use or held."""
        for chunk in chunks:
            if not (self._references[chunk] or self._held[chunk]):
                raise ValueError(f"chunk {chunk} is free: expected one in use")
            if not self._references[chunk]:
                self.num_free -= 1
                self.num_idle -= 1
            self._references[chunk] += 1

    def release(self, chunks: Iterable[int]) -> None:
        """Drop one reference to each of these chunks; a chunk without references is free."""
        for chunk in chunks:
            if not self._references[chunk]:
                raise ValueError(f"chunk {chunk} is free already")
            self._references[chunk] -= 1
            if not self._references[chunk]:
                self.num_free += 1
                self.num_idle += self._held[chunk]

    def hold(self, chunk: int) -> None:
        """Keep the rows of a chunk in use after its last sequence has released it, until `drop`."""
        if not self._references[chunk] or self._held[chunk]:
            raise ValueError(f"chunk {chunk} is free or held: expected one in use that is not held")
        self._held[chunk] = 1

    def drop(self, chunk: int) -> None:
        """Hold this chunk no longer."""
        if not self._held[chunk]:
            raise ValueError(f"chunk {chunk} is not held")
        self._held[chunk] = 0
        self.num_idle -= not self._references[chunk]

    def copy_span(self, source: Span, start: int) -> None:
        """Copy pool rows `source` to rows start .., in all layers; the two must not overlap."""
        rows = source[1] - source[0]
        for group in self._groups:
            group[:, start : start + rows] = group[:, source[0] : source[1]]

    def move_rows(self, sources: Sequence[int] | Tensor, targets: Sequence[int] | Tensor) -> None:
        """Copy pool rows `sources` to rows `targets` in all layers; all are read before any is written.

        Row numbers that are tensors on the pool's device are not waited for.
        """
        read, write = (torch.as_tensor(rows, device=self.device) for rows in (sources, targets))
        for group in self._groups:
            group.index_copy_(1, write, group.index_select(1, read))

    def rows_of(self, chunk: int, rows: int, is_side: bool = False) -> list[Tensor]:
        """Return the first `rows` rows of a chunk as views `[layers, rows, Hk, D]`, keys and values of each shape.

        With `is_side` the side rows `[1, rows, 1, F]` come last, if the pool has any.
        """
        first, groups = chunk * self.chunk_rows, self._groups
        if self.side is not None and not is_side:
            groups = groups[:-1]
        return [group[:, first : first + rows] for group in groups]

    def check_integrity(self) -> str:
        """Return what is wrong with the counts, or an empty string."""
        if min(self._references) < 0:
            return "a chunk has a negative reference count"
        free = self._references.count(0)
        if free != self.num_free:
            return f"{free} chunks are free, num_free says {self.num_free}"
        idle = sum(held and not n for held, n in zip(self._held, self._references))
        return "" if idle == self.num_idle else f"{idle} free chunks are held, num_idle says {self.num_idle}"
