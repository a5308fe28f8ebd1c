"""The nearest of many unit vectors, for a set that grows by a few at a time: exact, inverted lists, GPU.

Knows no text, no positions and no model. The one idea: whatever finds a shortlist, the rows on it are scored once
more by one and the same sum over the stored float32 vectors and ordered by (score, newest first), so that every
exact backend gives the same bits and equal scores never fall one way today and another tomorrow.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.device_keys import TorchShortlist

FloatArray = npt.NDArray[np.float32]
RowArray = npt.NDArray[np.int64]
BACKENDS = ("auto", "numpy", "faiss", "faiss-gpu", "torch")  # the last also with a device: torch:cuda
EXACT_BELOW = 262_144  # exact search of 64 dimensions costs 2-3 ms at 128K keys on one busy core; lists win beyond
CAPACITY = 1 << 20  # keys: 268 MB of 64 dimensions when full
NUM_LISTS = 256  # with NUM_PROBES 8: about 3 % of the keys are read
NUM_PROBES = 8
TRAIN_ROWS = 16_384  # k-means sees every n-th key; 64 keys a list
TRAIN_ROUNDS = 5
RETRAIN_GROWTH = 4  # lists are learnt anew when the set has grown by this factor
BLOCK = 1024  # keys wait in the exactly searched tail until a block is full
SLACK = 8  # rows fetched beyond k, to see ties at the border
ROUNDING = 4e-6  # two float32 sums of products of unit vectors differ by less


@cache
def faiss_module() -> Any:
    """Return the faiss module, or None where it is not installed."""
    try:
        return import_module("faiss")
    except ImportError:
        return None


class NearestRows:
    """Unit vectors `[n, dim]` in order of arrival; the `k` with the largest inner products with a query.

    `backend`: "faiss" (exact by brute force below `exact_below` rows, inverted lists above), "numpy" (always exact,
    cost linear in n), "faiss-gpu" (exact, 16-bit keys on the device make the shortlist), "torch" or "torch:DEVICE"
    (exact, all keys in torch's memory there, no other package), "auto" (faiss if installed, never a GPU). Lists are
    trained inside the `extend` that reaches `exact_below`, which blocks for a second or
    two; until then, and for the newest rows always, search is exact.
    """

    def __init__(
        self, dim: int, *, capacity: int = CAPACITY, backend: str = "auto", exact_below: int = EXACT_BELOW
    ) -> None:
        if dim < 1:
            raise GraftError(f"dense keys of {dim} dimensions: expected 1 or more")
        kind, _, device = backend.partition(":")
        if kind not in BACKENDS or (device and kind != "torch"):
            raise GraftError(f"dense store backend {backend!r}: expected one of {', '.join(BACKENDS)}")
        faiss = None if kind in ("numpy", "torch") else faiss_module()
        if faiss is None and backend.startswith("faiss"):
            raise GraftError(f"dense store backend {backend!r}: faiss is not installed; install {_package(backend)}")
        if backend == "faiss-gpu" and not getattr(faiss, "get_num_gpus", lambda: 0)():
            raise GraftError(
                "dense store backend 'faiss-gpu': this faiss sees no GPU; install faiss-gpu or use 'faiss'"
            )
        self.dim = dim
        self.exact_below = exact_below
        self._faiss = faiss
        self.capacity = capacity
        self._n = self._peak = 0
        self._rows = self._room()
        self._mirror: _Mirror | None = None
        if backend == "faiss-gpu":
            self._mirror = _Device(faiss, dim)
        elif kind == "torch":
            self._mirror = TorchShortlist(dim, capacity, device or "cpu")

    def __len__(self) -> int:
        return self._n

    def _room(self) -> FloatArray:
        try:
            return np.empty((self.capacity, self.dim), np.float32)
        except (MemoryError, ValueError):
            raise GraftError(
                f"dense store: no address space for {self.capacity} keys of {self.dim} dimensions: lower its capacity"
            ) from None

    @property
    def memory_bytes(self) -> int:
        """Bytes touched since the last `reset`, lists included; room that was never used costs address space only."""
        return 4 * self.dim * self._peak + (self._mirror.memory_bytes if self._mirror else 0)

    @property
    def is_exact(self) -> bool:
        """Whether every search so far would have been exact."""
        return not isinstance(self._mirror, _Lists)

    def matrix(self) -> FloatArray:
        """Return a view of the stored vectors. [n, dim]"""
        return self._rows[: self._n]

    def extend(self, vectors: FloatArray) -> None:
        """Append unit vectors [m, dim]. O(m): nothing that is there moves, so no call takes longer than its rows."""
        end = self._n + len(vectors)
        if end > self.capacity:
            raise GraftError(f"{end} dense keys: there is room for {self.capacity}")
        self._rows[self._n : end] = vectors
        self._n, self._peak = end, max(end, self._peak)
        if self._faiss is not None and end >= self.exact_below and self._wants_lists():
            self._mirror = _Lists(self._faiss, self.matrix())
        if self._mirror is not None:
            self._mirror.follow(self.matrix())

    def _wants_lists(self) -> bool:
        if isinstance(self._mirror, _Lists):
            return self._n >= RETRAIN_GROWTH * self._mirror.trained_on
        return self._mirror is None

    def truncate(self, n: int) -> None:
        """Keep the first `n` vectors."""
        self._n = min(n, self._n)
        if self._mirror is not None:
            self._mirror.truncate(self._n)
        if self._n < self.exact_below and isinstance(self._mirror, _Lists):
            self._mirror = None

    def reset(self) -> None:
        """Drop all vectors and give their memory back."""
        self.truncate(0)
        if self._peak:
            self._rows, self._peak = self._room(), 0

    def search(self, query: FloatArray, k: int, limit: int | None = None) -> tuple[RowArray, FloatArray]:
        """Return the rows and scores of the `k` best among the first `limit`, best first, newest first of equals."""
        limit = self._n if limit is None else min(max(limit, 0), self._n)
        k = min(k, limit)
        if k <= 0:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        if self._mirror is not None:
            return self._mirrored(self._mirror, query, k, limit)
        if self._faiss is None or k + SLACK >= limit:
            return self._exact(query, k, 0, limit)
        _, found = self._faiss.knn(query[None], self._rows[:limit], k + SLACK, metric=self._faiss.METRIC_INNER_PRODUCT)
        rows, scores = self._ordered(found[0], query)
        if scores[k - 1] - scores[-1] < ROUNDING:  # more equals than were fetched: let all of them compete
            return self._exact(query, k, 0, limit)
        return rows[:k], scores[:k]

    def _mirrored(self, mirror: _Mirror, query: FloatArray, k: int, limit: int) -> tuple[RowArray, FloatArray]:
        found = mirror.search(query, k + SLACK + max(mirror.covered - limit, 0))
        tail, _ = self._exact(query, k, min(mirror.covered, limit), limit)
        found = found[(found >= 0) & (found < min(limit, mirror.covered))]
        if not isinstance(mirror, _Lists) and not mirror.is_checked and mirror.covered:
            _, best = self._exact(query, 1, 0, min(mirror.covered, limit))
            _, reached = self._ordered(found, query)
            if len(best) and not (len(reached) and reached[0] >= best[0] - ROUNDING):
                raise GraftError("dense store: the GPU missed the nearest key; use backend 'faiss' or 'numpy'")
            mirror.is_checked = True
        rows, scores = self._ordered(np.concatenate([found, tail]), query)
        if mirror.is_precise and len(rows) < limit and scores[k - 1] - scores[-1] < ROUNDING:
            return self._exact(query, k, 0, limit)  # more equals than were fetched: let all of them compete
        return rows[:k], scores[:k]

    def _exact(self, query: FloatArray, k: int, start: int, limit: int) -> tuple[RowArray, FloatArray]:
        """Return the best of rows [start, limit), all equals considered."""
        scores = self._rows[start:limit] @ query
        if k < len(scores):
            border = np.partition(scores, len(scores) - k)[len(scores) - k]
            found = np.flatnonzero(scores >= border - ROUNDING)
        else:
            found = np.arange(len(scores))
        rows, exact = self._ordered(found + start, query)
        return rows[:k], exact[:k]

    def _ordered(self, rows: RowArray, query: FloatArray) -> tuple[RowArray, FloatArray]:
        scores = (self._rows[rows] * query).sum(axis=1)
        order = np.lexsort((-rows, -scores))
        return rows[order], scores[order]

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first broken invariant. O(n)"""
        if not 0 <= self._n <= self._peak <= self.capacity:
            return f"{self._n} keys (once {self._peak}) in room for {self.capacity}"
        lengths = np.linalg.norm(self.matrix(), axis=1)
        wrong = np.flatnonzero(~((np.abs(lengths - 1) < 1e-3) | (lengths == 0)))
        if len(wrong):
            return f"key {wrong[0]} has length {lengths[wrong[0]]}, not 1"
        if self._mirror is not None and not self._mirror.covered <= self._n:
            return f"lists cover {self._mirror.covered} keys of {self._n}"
        return ""


class _Lists:
    """Inverted lists of 16-bit keys over the first `covered` rows."""

    is_precise = False

    def __init__(self, faiss: Any, matrix: FloatArray) -> None:
        dim, self.trained_on = matrix.shape[1], len(matrix)
        lists = max(1, min(NUM_LISTS, len(matrix) // 64))
        flat = faiss.IndexFlatIP(dim)
        self._index = faiss.IndexIVFScalarQuantizer(
            flat, dim, lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        )
        self._index.nprobe = NUM_PROBES
        self._index.cp.niter = TRAIN_ROUNDS
        self._index.train(np.ascontiguousarray(matrix[:: max(1, len(matrix) // TRAIN_ROWS)]))
        self._bytes_a_key = 2 * dim + 8
        self.covered = 0

    @property
    def memory_bytes(self) -> int:
        return self.covered * self._bytes_a_key

    def follow(self, matrix: FloatArray) -> None:
        """Take in whole blocks of new rows; the rest stay in the tail."""
        end = len(matrix) - len(matrix) % BLOCK
        if end > self.covered:
            self._index.add(matrix[self.covered : end])
            self.covered = end

    def truncate(self, n: int) -> None:
        if n < self.covered:
            self._index.remove_ids(np.arange(n, self.covered, dtype=np.int64))
            self.covered = n

    def search(self, query: FloatArray, k: int) -> RowArray:
        return np.asarray(self._index.search(query[None], k)[1][0], np.int64)


class _Device:
    """All rows in 16 bits on the first GPU, added by blocks (one add there moves the whole index)."""

    is_precise = False

    def __init__(self, faiss: Any, dim: int) -> None:
        self._resources = faiss.StandardGpuResources()
        config = faiss.GpuIndexFlatConfig()
        config.useFloat16 = True
        self._index = faiss.GpuIndexFlatIP(self._resources, dim, config)
        self.covered = 0
        self.is_checked = False  # its first answer is compared with an exact one

    @property
    def memory_bytes(self) -> int:
        return 2 * self._index.d * self.covered

    def follow(self, matrix: FloatArray) -> None:
        end = len(matrix) - len(matrix) % BLOCK
        if end > self.covered:
            self._index.add(np.ascontiguousarray(matrix[self.covered : end]))
            self.covered = end

    def truncate(self, n: int) -> None:
        if n < self.covered:  # a flat GPU index cannot drop rows: the next block brings all of them again
            self._index.reset()
            self.covered = 0

    def search(self, query: FloatArray, k: int) -> RowArray:
        if self.covered == 0:
            return np.zeros(0, np.int64)
        return np.asarray(self._index.search(query[None], min(k, self.covered, 2048))[1][0], np.int64)


_Mirror = _Lists | _Device | TorchShortlist


def _package(backend: str) -> str:
    return "faiss-gpu" if backend == "faiss-gpu" else "faiss-cpu"
