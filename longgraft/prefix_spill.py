"""Chunks that had to leave the pool, on disk until they are asked for again.

Knows files and chunks by name; no request. The one idea: a chunk's rows never change, so a file once written is good
for as long as it is kept, however often its chunk comes and goes. At most `max_bytes` are kept, least recently used
first to go. The files belong to this process: they lie in a folder of their own, readable by its user alone, and go
when the process ends (what a killed one leaves behind is safe to delete).
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections import OrderedDict
from pathlib import Path

import numpy as np

from longgraft.config import GraftError
from longgraft.pool import ChunkPool
from longgraft.prefix_entry import Entry
from longgraft.prefix_file import Piece, PrefixFile, write
from longgraft.tree import IntArray


class Spill:
    """Whole chunks by name in a folder below `folder`. What fails there is a warning: the rows can be made again."""

    def __init__(self, folder: str, max_bytes: int, pool: ChunkPool) -> None:
        self.pool, self.max_bytes = pool, max_bytes
        self.num_bytes = self.num_written = self.num_restored = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        try:
            Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="longgraft-spill-", dir=Path(folder).expanduser()))
        except OSError as error:
            raise GraftError(f"prefix_spill is {folder!r}: expected a folder that can be written ({error})") from error
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, entry: Entry) -> None:
        """Write a chunk that is about to leave, if it is a whole one and room can be made."""
        if len(entry.token_ids) < self.pool.chunk_rows or self.pool.bytes_per_chunk > self.max_bytes:
            return
        if entry.name in self._sizes:
            self._sizes.move_to_end(entry.name)
            return
        self._make_room(self.pool.bytes_per_chunk)
        piece = Piece(entry.chunk, entry.token_ids, entry.side)
        try:
            size = write(self._path(entry.name), self.pool, [piece], {})
        except OSError as error:
            warnings.warn(f"a chunk of the prefix cache could not be written to {self.folder}: {error}", stacklevel=2)
            return
        self._sizes[entry.name] = size
        self.num_bytes += size
        self.num_written += 1
        self._make_room(0)  # a file is a little larger than its chunk

    def _make_room(self, wanted: int) -> None:
        while self._sizes and self.num_bytes + wanted > self.max_bytes:
            self._forget(next(iter(self._sizes)))

    def restore(self, name: bytes, parent: bytes, token_ids: IntArray) -> Entry | None:
        """Bring a chunk back into the pool, with one reference for the caller; None if that cannot be."""
        if name not in self._sizes or not self.pool.num_free:
            return None
        self._sizes.move_to_end(name)
        (chunk,) = self.pool.allocate(1)
        if name not in self._sizes:  # what was dropped to make room took its place
            self.pool.release([chunk])
            return None
        try:
            file = PrefixFile(self._path(name))
            side = file.side(0)
            if not np.array_equal(file.tokens()[0], token_ids):
                raise GraftError(f"prefix file {self._path(name)} holds another text")
            file.read(0, self.pool, Piece(chunk, token_ids, side), has_side=self.pool.side is not None)
        except BaseException as error:
            self.pool.release([chunk])
            self._forget(name)
            if not isinstance(error, GraftError):
                raise
            warnings.warn(f"a chunk of the prefix cache is computed again: {error}", stacklevel=2)
            return None
        self.num_restored += 1
        return Entry(name, parent, token_ids.copy(), chunk, side)

    def clear(self) -> None:
        """Delete all files."""
        for name in list(self._sizes):
            self._forget(name)

    def _path(self, name: bytes) -> Path:
        return self.folder / f"{name.hex()}.safetensors"

    def _forget(self, name: bytes) -> None:
        self.num_bytes -= self._sizes.pop(name, 0)
        self._path(name).unlink(missing_ok=True)
