"""The bytes that stand for one index: its text and what was learnt from it, with a versioned, checked header.

Knows no automaton. The idea: an automaton is a function of its text, so its text is all that is kept (4 bytes a
token) and reading it back builds it anew. Keeping the arrays too would be 15 times larger and no faster: arrays
from outside have to be checked edge by edge, which costs what building costs. (Copies that never leave the
process need no check; those are `SuffixAutomaton.mark`.)

Layout, little-endian: magic 8 bytes, version u32, CRC-32 u32 of all that follows, tokens u64, cells u32, cells
with trials u32; then tokens int32, numbers of those cells int32, their trials float64, their hits float64.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError

MAGIC = b"LGINDEX\0"
VERSION = 1
HEAD = struct.Struct("<8sII")
COUNTS = struct.Struct("<QII")

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]


class Snapshot(NamedTuple):
    """Tokens [n], and trials and hits [cells] as `SuffixAutomaton.learnt` gives them."""

    token_ids: IntArray
    trials: FloatArray
    hits: FloatArray


def pack(snapshot: Snapshot) -> bytes:
    """Return a snapshot as bytes."""
    cells = np.flatnonzero(snapshot.trials)
    body = b"".join(
        (
            COUNTS.pack(len(snapshot.token_ids), len(snapshot.trials), len(cells)),
            snapshot.token_ids.astype("<i4").tobytes(),
            cells.astype("<i4").tobytes(),
            snapshot.trials[cells].astype("<f8").tobytes(),
            snapshot.hits[cells].astype("<f8").tobytes(),
        )
    )
    return HEAD.pack(MAGIC, VERSION, zlib.crc32(body)) + body


def unpack(data: bytes) -> Snapshot:
    """Read bytes of `pack`; raises `GraftError` for anything else, whatever is wrong with it."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise GraftError(f"a snapshot is bytes: got {type(data).__name__}")
    data = bytes(data)
    if len(data) < HEAD.size + COUNTS.size or not data.startswith(MAGIC):
        raise GraftError("not a snapshot of an index: expected bytes that SuffixAutomaton.snapshot returned")
    _, version, checksum = HEAD.unpack_from(data)
    if version != VERSION:
        raise GraftError(f"snapshot of version {version}: this longgraft reads version {VERSION}; make it anew")
    body = memoryview(data)[HEAD.size :]
    tokens, cells, learnt = COUNTS.unpack_from(body)
    if len(body) != COUNTS.size + 4 * tokens + 20 * learnt:
        raise GraftError(f"snapshot of {len(data)} bytes is cut short or has bytes too many: make it anew")
    if zlib.crc32(body) != checksum:
        raise GraftError("snapshot does not match its checksum: it was damaged, make it anew")
    return _checked(_arrays(body, tokens, cells, learnt))


def _arrays(body: memoryview, tokens: int, cells: int, learnt: int) -> Snapshot:
    at = COUNTS.size
    token_ids = np.frombuffer(body, "<i4", tokens, at).astype(np.int32)
    numbers = np.frombuffer(body, "<i4", learnt, at + 4 * tokens)
    if learnt and not (numbers.min() >= 0 and numbers.max() < cells <= 2**20):
        raise GraftError(f"snapshot names cells {numbers.min()} to {numbers.max()}: expected 0 to {cells - 1}")
    trials, hits = np.zeros(min(cells, 2**20)), np.zeros(min(cells, 2**20))
    trials[numbers] = np.frombuffer(body, "<f8", learnt, at + 4 * (tokens + learnt))
    hits[numbers] = np.frombuffer(body, "<f8", learnt, at + 4 * (tokens + learnt) + 8 * learnt)
    return Snapshot(token_ids, trials, hits)


def _checked(snapshot: Snapshot) -> Snapshot:
    trials, hits = snapshot.trials, snapshot.hits
    if not (np.all(np.isfinite(trials)) and np.all(hits >= 0) and np.all(hits <= trials)):
        raise GraftError("snapshot holds hits that are not between 0 and their trials: make it anew")
    return snapshot
