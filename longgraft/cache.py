"""The KV cache: a pool of chunks shared by sequences, and one sequence's rows in it.

Knows no model and no attention: layers are shapes, rows are numbers. The idea: a sequence is a list of chunk
ids and a length. Rows of a round are written behind the length; keeping some of them moves only those not
already in place, across all layers at once, and nothing ever moves because the context is long. Neighbouring
chunk ids are one strided view, so attention reads the cache in place, one run at a time.

Shapes: Hk key heads, Dk and Dv sizes of a key and of a value row of one head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from longgraft.config import GraftError

Span = tuple[int, int]
"""Rows start .. stop-1 of the pool."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one row of one layer holds: `kv_heads` keys of `key_dim` and as many values of `value_dim`."""

    kv_heads: int
    key_dim: int
    value_dim: int


class ChunkPool:
    """K and V of all layers in chunks of `chunk_rows` rows, with a reference count per chunk.

    `keys[layer] [num_chunks * chunk_rows, Hk, Dk]` and `values[layer] [.., Hk, Dv]` are views: layers of
    equal shape share one allocation, so that a row moves in all of them by one copy. Memory is reserved, not
    touched: on the CPU a chunk costs nothing before it is first written.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_chunks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        chunk_rows: int = 256,
    ) -> None:
        if not layers or num_chunks < 1 or chunk_rows < 1:
            raise ValueError(f"{len(layers)} layers, {num_chunks} x {chunk_rows} rows: expected 1 or more")
        self.layers = tuple(layers)
        self.num_chunks, self.chunk_rows = num_chunks, chunk_rows
        self.dtype, self.device = dtype, torch.device(device)
        self.num_free = num_chunks
        self._references = [0] * num_chunks
        self._groups: list[Tensor] = []
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for shape in dict.fromkeys(layers):
            members = [layer for layer, other in enumerate(layers) if other == shape]
            for views, size in ((keys, shape.key_dim), (values, shape.value_dim)):
                rows = (len(members), num_chunks * chunk_rows, shape.kv_heads, size)
                self._groups.append(torch.empty(rows, dtype=dtype, device=self.device))
                views.update((layer, self._groups[-1][i]) for i, layer in enumerate(members))
        self.keys = tuple(keys[layer] for layer in range(len(layers)))
        self.values = tuple(values[layer] for layer in range(len(layers)))

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes that one chunk takes in all layers, keys and values."""
        return sum(prod(group.shape) for group in self._groups) // self.num_chunks * self.dtype.itemsize

    def references(self, chunk: int) -> int:
        """Return how many sequences hold this chunk; 0 = free."""
        return self._references[chunk]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free chunks: the neighbours behind `after`, else a place in the largest gap.

        Raises GraftError, and takes nothing, if too few are free.
        """
        if count > self.num_free:
            more = (count - self.num_free) * self.bytes_per_chunk
            raise GraftError(
                f"KV pool: {count} chunks of {self.chunk_rows} rows needed, {self.num_free} of "
                f"{self.num_chunks} free: raise kv_bytes by {more:,}, lower max_context, or release sequences"
            )
        taken: list[int] = []
        chunk = self.num_chunks if after is None else after + 1
        for left in range(count, 0, -1):
            if chunk >= self.num_chunks or self._references[chunk]:
                chunk = self._place(left)
            self._references[chunk] = 1
            taken.append(chunk)
            chunk += 1
        self.num_free -= count
        return taken

    def _place(self, count: int) -> int:
        """Where `count` chunks start in the largest gap: its middle, so that who ends there can grow on."""
        start = size = run = 0
        for chunk, references in enumerate(self._references):
            run = 0 if references else run + 1
            if run > size:
                start, size = chunk - run + 1, run
        return start and start + max(0, size - count) // 2

    def share(self, chunks: Iterable[int]) -> None:
        """Add one reference to each of these chunks, all of them in use."""
        for chunk in chunks:
            if not self._references[chunk]:
                raise ValueError(f"chunk {chunk} is free: expected one in use")
            self._references[chunk] += 1

    def release(self, chunks: Iterable[int]) -> None:
        """Drop one reference to each of these chunks; a chunk without references is free."""
        for chunk in chunks:
            if not self._references[chunk]:
                raise ValueError(f"chunk {chunk} is free already")
            self._references[chunk] -= 1
            self.num_free += self._references[chunk] == 0

    def copy_span(self, source: Span, start: int) -> None:
        """Copy pool rows `source` to rows start .., in all layers; the two must not overlap."""
        rows = source[1] - source[0]
        for group in self._groups:
            group[:, start : start + rows] = group[:, source[0] : source[1]]

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pool rows `sources` to rows `targets` in all layers; all are read before any is written."""
        read, write = (torch.tensor(rows, device=self.device) for rows in (sources, targets))
        for group in self._groups:
            group.index_copy_(1, write, group.index_select(1, read))

    def check_integrity(self) -> str:
        """Return what is wrong with the counts, or an empty string."""
        if min(self._references) < 0:
            return "a chunk has a negative reference count"
        free = self._references.count(0)
        return "" if free == self.num_free else f"{free} chunks are free, num_free says {self.num_free}"


class SequenceCache:
    """The rows of one sequence: a committed prefix of `length` rows, and rows reserved behind it for a round.

    A round is `reserve`, `write` for every layer, `keep`. Chunks may be shared with other sequences; the
    prefix is read only, and a shared chunk is copied before rows are written into it. `rows_moved` counts the
    rows that were copied so far (each in all layers).
    """

    def __init__(self, pool: ChunkPool) -> None:
        self.pool = pool
        self.length = 0
        self.reserved = 0
        self.rows_moved = 0
        self._chunks: list[int] = []
        self._joined = list[Span]()

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunk ids in order; chunk i holds rows i * chunk_rows .. of the sequence."""
        return tuple(self._chunks)

    def reserve(self, rows: int, behind: int = 0) -> None:
        """Make room for `rows` rows behind the prefix and the first `behind` rows reserved earlier; drop the others.

        Raises GraftError, and changes nothing, if the pool has too few free chunks.
        """
        pool, size = self.pool, self.pool.chunk_rows
        if rows < 0 or not 0 <= behind <= self.reserved:
            raise ValueError(f"{rows} rows to reserve behind {behind} of {self.reserved}: expected 0 or more")
        rows += behind
        needed = -(-(self.length + rows) // size) - len(self._chunks)
        split = self.length // size if rows and self.length % size else None
        shared = split is not None and pool.references(self._chunks[split]) > 1
        fresh = pool.allocate(max(needed, 0) + shared, self._chunks[-1] if self._chunks else None)
        if split is not None and shared:
            self._own(split, fresh.pop(0))
        self._chunks += fresh
        self.reserved = rows
        if needed > 0 or shared:
            self._join()

    def _own(self, index: int, fresh: int) -> None:
        """Replace the shared, partly filled chunk `index` by a copy of its prefix rows."""
        size, old = self.pool.chunk_rows, self._chunks[index]
        rows = self.length - index * size
        self.pool.copy_span((old * size, old * size + rows), fresh * size)
        self.pool.release([old])
        self._chunks[index] = fresh
        self.rows_moved += rows

    def write(self, layer: int, keys: Tensor, values: Tensor, behind: int = 0) -> None:
        """Write `keys [T, Hk, Dk]` and `values [T, Hk, Dv]` into T reserved rows of `layer`, from row `behind` on."""
        rows = keys.shape[0]
        held = self.pool.keys[layer], self.pool.values[layer]
        for name, new, pool in zip(("keys", "values"), (keys, values), held):
            if new.shape != (rows, *pool.shape[1:]) or behind + rows > self.reserved:
                wanted = f"expected {rows} rows of {list(pool.shape[1:])}, {self.reserved} are reserved"
                raise ValueError(f"layer {layer}: {name} are {list(new.shape)}: {wanted}")
            if new.dtype != self.pool.dtype:
                raise ValueError(f"layer {layer}: {name} are {new.dtype}, the cache holds {self.pool.dtype}")
        done = 0
        for start, stop in self._spans(self.length + behind, self.length + behind + rows):
            for new, pool in zip((keys, values), held):
                pool.narrow(0, start, stop - start).copy_(new.detach().narrow(0, done, stop - start))
            done += stop - start

    def runs(self, layer: int, reserved: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return the prefix of `layer` as views (K [n, Hk, Dk], V [n, Hk, Dv]), one per run of chunks.

        With `reserved`, so many of the reserved rows follow; they must have been written.
        """
        if not 0 <= reserved <= self.reserved:
            raise ValueError(f"{reserved} reserved rows asked for, {self.reserved} are there")
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        spans = self._spans(0, self.length + reserved)
        return [(keys.narrow(0, at, end - at), values.narrow(0, at, end - at)) for at, end in spans]

    def keep(self, path: Sequence[int]) -> None:
        """Commit the reserved rows `path`, in this order, as the next rows of the prefix; drop the others.

        Copies only rows with path[i] != i; chunks left over are released.
        """
        if len(set(path)) != len(path) or not all(0 <= row < self.reserved for row in path):
            raise ValueError(f"path {list(path)}: expected different rows below {self.reserved}")
        moves = [(row, target) for target, row in enumerate(path) if row != target]
        if moves:
            sources, targets = ([self._pool_row(self.length + row) for row in rows] for rows in zip(*moves))
            self.pool.move_rows(sources, targets)
            self.rows_moved += len(moves)
        self._cut(self.length + len(path))

    def _pool_row(self, row: int) -> int:
        return self._chunks[row // self.pool.chunk_rows] * self.pool.chunk_rows + row % self.pool.chunk_rows

    def truncate(self, length: int) -> None:
        """Shorten the prefix to `length` rows; reserved rows are dropped."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} rows to {length}")
        self._cut(length)

    def fork(self) -> SequenceCache:
        """Return a cache with the same prefix that shares every chunk; neither sees what the other writes."""
        if self.reserved:
            raise ValueError(f"{self.reserved} rows are reserved: fork between rounds")
        twin = SequenceCache(self.pool)
        twin._chunks = self._chunks[: -(-self.length // self.pool.chunk_rows)]
        self.pool.share(twin._chunks)
        twin.length = self.length
        twin._join()
        return twin

    def release(self) -> None:
        """Give every chunk back; the cache is empty and can be used again."""
        self._cut(0)

    def _cut(self, length: int) -> None:
        """Set the prefix to `length` rows, nothing reserved, and give back chunks behind it."""
        self.length, self.reserved = length, 0
        needed = -(-length // self.pool.chunk_rows)
        if needed < len(self._chunks):
            self.pool.release(self._chunks[needed:])
            del self._chunks[needed:]
            self._join()

    def _join(self) -> None:
        """Find the spans of neighbouring chunks: once per change of the chunk list, for all layers."""
        size, spans = self.pool.chunk_rows, list[Span]()
        for chunk in self._chunks:
            joins = bool(spans) and spans[-1][1] == chunk * size
            start = spans.pop()[0] if joins else chunk * size
            spans.append((start, (chunk + 1) * size))
        self._joined = spans

    def _spans(self, first: int, last: int) -> Iterator[Span]:
        """Yield rows first .. last-1 of the sequence as spans of pool rows."""
        done = 0
        for start, stop in self._joined:
            low, high = start + max(first - done, 0), min(start + last - done, stop)
            if low < high:
                yield low, high
            done += stop - start

    def check_integrity(self) -> str:
        """Return what is wrong with this sequence, or an empty string."""
        size = self.pool.chunk_rows
        if len(self._chunks) * size < self.length + self.reserved:
            return f"{len(self._chunks)} chunks cannot hold {self.length + self.reserved} rows"
        if len(set(self._chunks)) != len(self._chunks):
            return "one chunk appears twice"
        if any(not self.pool.references(chunk) for chunk in self._chunks):
            return "a chunk in use is free in the pool"
        writable = self._chunks[self.length // size :] if self.reserved else []
        if any(self.pool.references(chunk) > 1 for chunk in writable):
            return "reserved rows lie in a shared chunk"
        rows_at = [row for start, stop in self._joined for row in range(start, stop, size)]
        return "" if rows_at == [chunk * size for chunk in self._chunks] else "spans and chunks differ"
