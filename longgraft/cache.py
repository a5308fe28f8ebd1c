"""One sequence's rows in the chunk pool: a committed prefix, and rows reserved behind it for a round.

Knows no model and no attention. The idea: a sequence is a list of chunk ids and a length. Rows of a round are written
behind the length; keeping some of them moves only those not already in place, across all layers at once, and nothing
ever moves because the context is long.

Shapes: Hk key heads, Dk and Dv sizes of a key and of a value row of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from longgraft.pool import ChunkPool, LayerShape, Span

__all__ = ["ChunkPool", "LayerShape", "SequenceCache", "Span"]


class SequenceCache:
    """The rows of one sequence: a committed prefix of `length` rows, and rows reserved behind it for a round.

    A round is `reserve`, `write` for every layer, `keep`. Chunks may be shared with other sequences; the
    prefix is read only, and a shared chunk is copied before rows are written into it. `rows_moved` counts the
    rows that were copied so far (each in all layers). `side_rows`: prefix rows whose side rows are known; all between
    its two numbers. `before_release` is called once, when the cache is about to give all chunks back.
    """

    def __init__(self, pool: ChunkPool) -> None:
        self.pool = pool
        self.length = 0
        self.reserved = 0
        self.rows_moved = 0
        self.side_rows: Span = (0, 0)
        self.before_release: Callable[[], None] | None = None
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
        shared = split is not None and pool.is_shared(self._chunks[split])
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
        twin.length, twin.side_rows = self.length, self.side_rows
        twin._join()
        return twin

    def attach(self, chunks: Sequence[int], rows: int, side_begin: int | None = None) -> None:
        """Begin an empty cache with full chunks that are shared with it already: one reference each becomes its own.

        `rows` more are copied from the chunk behind those, the last of `chunks`, if it is not 0. Side rows are known
        from row `side_begin` on. Raises GraftError, and changes nothing, if there is no room for the copy.
        """
        size = self.pool.chunk_rows
        if self._chunks or not 0 <= rows < size or rows > 0 == len(chunks):
            raise ValueError(f"{len(self._chunks)} chunks are held, {rows} rows to copy: expected none, below {size}")
        full = list(chunks[: len(chunks) - (rows > 0)])
        if rows:
            (fresh,) = self.pool.allocate(1, full[-1] if full else None)
            self.pool.copy_span((chunks[-1] * size, chunks[-1] * size + rows), fresh * size)
            self.pool.release([chunks[-1]])
            full.append(fresh)
            self.rows_moved += rows
        self._chunks, self.length = full, (len(chunks) - (rows > 0)) * size + rows
        self.side_rows = (self.length if side_begin is None else side_begin, self.length)
        self._join()

    def adopt(self, index: int, chunk: int) -> None:
        """Replace the full chunk `index` by `chunk`, which holds the same rows and is shared with this cache now."""
        self.pool.share([chunk])
        self.pool.release([self._chunks[index]])
        self._chunks[index] = chunk
        self._join()

    def write_side(self, first: int, rows: Tensor) -> None:
        """Store the side rows `[n, F]` of prefix rows from `first` on; a gap forgets what lies before it."""
        if self.pool.side is None:
            return
        begin, end = self.side_rows
        self.side_rows = (begin if first == end else first, first + len(rows))
        done = 0
        for start, stop in self._spans(first, first + len(rows)):
            self.pool.side[start:stop].copy_(rows[done : done + stop - start].detach())
            done += stop - start

    def read_side(self, first: int, last: int) -> Tensor:
        """Return a copy of the side rows of prefix rows first .. last-1. [n, F]"""
        begin, end = self.side_rows
        if self.pool.side is None or not begin <= first <= last <= end:
            raise ValueError(f"side rows {first} to {last}: only {begin} to {end} are known")
        return torch.cat([self.pool.side[:0], *(self.pool.side[a:b] for a, b in self._spans(first, last))])

    def release(self) -> None:
        """Give every chunk back; the cache is empty and can be used again."""
        call, self.before_release = self.before_release, None
        try:
            if call is not None:
                call()
        finally:
            self._cut(0)

    def _cut(self, length: int) -> None:
        """Set the prefix to `length` rows, nothing reserved, and give back chunks behind it."""
        self.length, self.reserved = length, 0
        self.side_rows = (min(self.side_rows[0], length), min(self.side_rows[1], length))
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

    def pool_rows(self) -> Tensor:
        """Return the pool row of every row, reserved ones and what is left of the last chunk included. [n] int64"""
        return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in self._joined)])

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
        if any(self.pool.is_shared(chunk) for chunk in writable):
            return "reserved rows lie in a shared chunk"
        rows_at = [row for start, stop in self._joined for row in range(start, stop, size)]
        return "" if rows_at == [chunk * size for chunk in self._chunks] else "spans and chunks differ"
