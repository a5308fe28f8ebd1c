"""Filled chunks in a file: safetensors, written and read chunk by chunk, with a hash of each.

Knows files, tensors of a pool and the tokens of rows; not whose they are (`about` says that, and only the reader can
judge it). The one idea: the file's layout is plain enough to be written as a stream, so saving a long document needs no
second copy of it in memory. A chunk's hash covers its tokens, its tensors and all that the header says, so whatever was
damaged is found before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longgraft.config import GraftError
from longgraft.pool import ChunkPool, Span
from longgraft.tree import IntArray

VERSION = 1
_KEY = "longgraft_prefix"
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one chunk: where they lie in the pool, their tokens, and which of them have side rows."""

    chunk: int
    token_ids: IntArray
    side: Span


def write(path: str | os.PathLike[str], pool: ChunkPool, pieces: list[Piece], about: dict[str, Any]) -> int:
    """Write the pieces of one text, in order, and `about` (JSON); return the bytes written.

    The file appears complete or not at all. Raises `OSError`.
    """
    target = Path(path)
    tensors, sizes, begin = _layout(pool, pieces)
    inner = json.dumps({"version": VERSION, "chunk_rows": pool.chunk_rows, "pieces": sizes, "about": about})
    header = json.dumps({"__metadata__": {_KEY: inner}, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            digests = []
            for number, piece in enumerate(pieces):
                digest = _begun(inner, number)
                for data in _data(pool, piece):
                    digest.update(data)
                    file.write(data)
                digests.append(digest.digest())
            file.write(b"".join(digests))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return 8 + len(header) + begin


def _layout(pool: ChunkPool, pieces: list[Piece]) -> tuple[dict[str, Any], list[Any], int]:
    """Return the header's tensors, what it says of each piece, and the bytes of all tensors."""
    tensors, sizes, begin = dict[str, Any](), list[Any](), 0

    def add(name: str, kind: str, shape: list[int], itemsize: int) -> None:
        nonlocal begin
        end = begin + int(np.prod(shape)) * itemsize
        tensors[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        begin = end

    for number, piece in enumerate(pieces):
        rows, side = len(piece.token_ids), piece.side if pool.side is not None else (0, 0)
        add(f"{number}.tokens", "I32", [rows], 4)
        shapes = _shapes(pool, rows, side)
        for part, shape in enumerate(shapes):
            add(f"{number}.{part}", _NAMES[pool.dtype], shape, pool.dtype.itemsize)
        sizes.append([rows, list(side), len(shapes)])
    add("sha256", "U8", [len(pieces), 32], 1)
    return tensors, sizes, begin


def _shapes(pool: ChunkPool, rows: int, side: Span) -> list[list[int]]:
    """Return the shapes of a piece's tensors: keys and values of each layer shape, then side rows if it has any."""
    groups = [list(group.shape) for group in pool.rows_of(0, 1)]
    shapes = [[members, rows, heads, size] for members, _, heads, size in groups]
    return shapes + ([[side[1] - side[0], pool.side.shape[1]]] if pool.side is not None and side[1] > side[0] else [])


def _tensors(pool: ChunkPool, piece: Piece) -> list[Tensor]:
    """Return a piece's tensors as views of the pool."""
    tensors = pool.rows_of(piece.chunk, len(piece.token_ids))
    if pool.side is not None and piece.side[1] > piece.side[0]:
        first = piece.chunk * pool.chunk_rows
        tensors.append(pool.side[first + piece.side[0] : first + piece.side[1]])
    return tensors


def _data(pool: ChunkPool, piece: Piece) -> Iterator[Any]:
    yield np.ascontiguousarray(piece.token_ids, np.int32).tobytes()
    for tensor in _tensors(pool, piece):
        yield _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _begun(inner: str, number: int) -> Any:
    return hashlib.sha256(f"{number} {inner}".encode())


class PrefixFile:
    """A file that `write` made, open for reading. Everything wrong with it is a `GraftError` that names it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise GraftError(f"prefix file {path}: no such file; expected one that save_prefix wrote")
        with self._reading():
            self._file = safe_open(str(self.path), framework="pt")
            metadata = self._file.metadata() or {}
        if _KEY not in metadata:
            raise GraftError(f"prefix file {path}: not a saved prefix; expected a file that save_prefix wrote")
        self._inner = metadata[_KEY]
        with self._reading():
            header = json.loads(self._inner)
            self.version, self.about, self.chunk_rows = header["version"], header["about"], header["chunk_rows"]
            if self.version == VERSION and isinstance(self.about, dict):
                self._sizes = [(int(n), (int(a), int(b)), int(parts)) for n, (a, b), parts in header["pieces"]]
                self._digests = self._file.get_tensor("sha256").numpy()
        if self.version != VERSION or not isinstance(self.about, dict):
            raise GraftError(
                f"prefix file {path}: format {self.version!r}, this release reads {VERSION}; save it again"
            )

    def __len__(self) -> int:
        return len(self._sizes)

    def tokens(self) -> list[IntArray]:
        """Return the tokens of each piece; whether they are right, only `read` tells."""
        size, last = self.chunk_rows, len(self) - 1
        with self._reading():
            found = [self._file.get_tensor(f"{number}.tokens").numpy() for number in range(len(self))]
            for number, (one, (rows, (first, end), _)) in enumerate(zip(found, self._sizes)):
                if one.dtype != np.int32 or one.shape != (rows,) or not 0 < rows <= size:
                    raise ValueError(f"piece {number} has {one.shape} tokens, {rows} are announced")
                if (rows < size and number < last) or not 0 <= first <= end <= rows:
                    raise ValueError(f"piece {number} of {rows} rows does not fit among the others")
        return found

    def side(self, number: int) -> Span:
        """Return which rows of a piece have side rows."""
        return self._sizes[number][1]

    def read(self, number: int, pool: ChunkPool, piece: Piece, has_side: bool) -> None:
        """Fill a chunk of the pool with a piece; `has_side`: its side rows are what the pool's are.

        Raises `GraftError` if the piece is not what was written; the chunk may then hold anything.
        """
        with self._reading():
            digest = _begun(self._inner, number)
            digest.update(np.ascontiguousarray(piece.token_ids, np.int32).tobytes())
            parts = self._sizes[number][2]
            tensors = [self._file.get_tensor(f"{number}.{part}") for part in range(parts)]
            for tensor in tensors:
                digest.update(_bytes_of(tensor))
            if digest.digest() != self._digests[number].tobytes():
                raise ValueError(f"chunk {number} does not match its checksum")
            wanted = _tensors(pool, piece if has_side else Piece(piece.chunk, piece.token_ids, (0, 0)))
            for target, tensor in zip(wanted, tensors, strict=has_side):
                if target.shape != tensor.shape or target.dtype != tensor.dtype:
                    raise ValueError(f"chunk {number} holds {tensor.dtype} {list(tensor.shape)}")
                target.copy_(tensor)

    def _reading(self) -> _Reading:
        return _Reading(self.path)


class _Reading:
    """Turns whatever a damaged file makes a reader raise into one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _DAMAGE) and not isinstance(error, GraftError):
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise GraftError(f"prefix file {self.path} is damaged: {reason}; save it again") from error
