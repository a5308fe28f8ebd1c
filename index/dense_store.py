"""Where in the text was the target in a state like the one it is in now?

Knows states and positions, no model. The one idea: exact matching is blind where a copy *starts*, because the
token before differs; the target's own hidden state at an earlier place may still look alike, and what followed
there is worth a guess here.

Key j is the state at position j, which predicted token j + 1. The newest state there is when a round begins is the
one that predicted the root, so a hit j says: here the root plays the part of token j + 1, and tokens j + 2 and on may
follow it (`places_after`).
"""

from __future__ import annotations

from numbers import Integral

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.nearest import CAPACITY, EXACT_BELOW, NearestRows
from longgraft.index.projection import FloatArray, Projection, as_states

PositionArray = npt.NDArray[np.int64]
NO_HITS = (np.zeros(0, np.int64), np.zeros(0, np.float32))
DIM = 64
FIT_AFTER = 1024  # states that centre and scale the keys
LEAST_TO_FIT = 64  # a search before that many states finds nothing
RECENT = 2


class DenseStore:
    """Keys from the hidden states of one sequence, and the positions whose state was most alike.

    `dim`: dimensions of a key, 4 bytes each a token. `capacity`: keys kept; states that come later are counted but
    not stored, so the earlier text stays searchable and positions stay right. `recent`: as many of the newest
    positions are never returned. `projection`: fixed in advance, else fitted on the first `fit_after` states (or, if
    asked earlier, on those there are) and kept until `reset`. `backend`, `exact_below`: see `NearestRows`.
    """

    def __init__(
        self,
        *,
        dim: int = DIM,
        capacity: int = CAPACITY,
        recent: int = RECENT,
        fit_after: int = FIT_AFTER,
        projection: Projection | None = None,
        backend: str = "auto",
        exact_below: int = EXACT_BELOW,
    ) -> None:
        _whole("dim", dim, 1)
        _whole("capacity", capacity, 1)
        _whole("recent", recent, 0)
        _whole("fit_after", fit_after, 1)
        _whole("exact_below", exact_below, 1)
        self.capacity, self.recent, self.fit_after = capacity, recent, fit_after
        self._given = self._projection = projection
        dim = dim if projection is None else projection.dim
        self._rows = NearestRows(dim, capacity=capacity, backend=backend, exact_below=exact_below)
        self._hidden = None if projection is None else projection.hidden
        self._positions = np.empty(capacity, np.int64)
        self._waiting: list[FloatArray] = []  # states seen before there is a projection
        self._length = self._num_keys = 0

    def __len__(self) -> int:
        return self._length

    @property
    def num_keys(self) -> int:
        """States that can be found: fewer than `len` once full, or where some were skipped."""
        return self._num_keys

    @property
    def is_full(self) -> bool:
        """Whether later states are only counted."""
        return self._num_keys >= self.capacity

    @property
    def memory_bytes(self) -> int:
        """Bytes held, states that wait for the projection included."""
        fixed = 0 if self._projection is None else self._projection.matrix.nbytes + self._projection.mean.nbytes
        return self._rows.memory_bytes + 8 * self._num_keys + fixed + sum(s.nbytes for s in self._waiting)

    def extend(self, states: npt.ArrayLike) -> None:
        """Take in the states of the next positions. [n, hidden]; all of them or, with a `GraftError`, none."""
        array = as_states(states, self._hidden)
        self._hidden = array.shape[1]
        taken = array[: self.capacity - self._num_keys]
        self._remember(self._length, len(taken))
        self._length += len(array)
        if self._projection is not None:
            self._rows.extend(self._projection.keys(taken))
            return
        self._waiting.append(taken.copy())
        if self._num_keys >= self.fit_after:
            self._fit()

    def skip(self, count: int) -> None:
        """Pass over `count` positions whose states are not to be had; they are never found."""
        _whole("count", count, 0)
        self._length += count

    def _remember(self, start: int, count: int) -> None:
        end = self._num_keys + count
        self._positions[self._num_keys : end] = np.arange(start, start + count)
        self._num_keys = end

    def _fit(self) -> None:
        waiting = np.concatenate(self._waiting)
        self._projection = Projection.fit(waiting[: self.fit_after], self._rows.dim)
        self._rows.extend(self._projection.keys(waiting))
        self._waiting = []

    def search(self, state: npt.ArrayLike, k: int) -> tuple[PositionArray, FloatArray]:
        """Return positions and scores (cosines) of the at most `k` keys most like `state [hidden]`, best first.

        Of equal scores the newer position comes first. Empty before `LEAST_TO_FIT` states are known.
        """
        _whole("k", k, 0)
        query = self._query(state)
        if query is None:
            return NO_HITS
        limit = int(np.searchsorted(self._positions[: self._num_keys], self._length - self.recent))
        rows, scores = self._rows.search(query, k, limit)
        return self._positions[rows], scores

    def scores(self, state: npt.ArrayLike, positions: npt.ArrayLike) -> FloatArray:
        """Return how alike the states at `positions [n]` are to `state [hidden]`: cosines; -1 where there is no key.

        For ranking what exact matching found: of a place p, ask for position p - 2.
        """
        wanted = np.asarray(positions, np.int64).ravel()
        scores = np.full(len(wanted), -1, np.float32)
        query, known = self._query(state), self._positions[: self._num_keys]
        if query is None or len(known) == 0:
            return scores
        rows = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        there = known[rows] == wanted
        scores[there] = (self._rows.matrix()[rows[there]] * query).sum(axis=1)
        return scores

    def _query(self, state: npt.ArrayLike) -> FloatArray | None:
        array = as_states(np.asarray(state)[None], self._hidden)
        if self._projection is None:
            if self._num_keys < LEAST_TO_FIT:
                return None
            self._fit()
        assert self._projection is not None
        return self._projection.keys(array)[0]

    def truncate(self, length: int) -> None:
        """Keep the states of the first `length` positions; the projection stays."""
        if not 0 <= length <= self._length:
            raise GraftError(f"truncate to {length} states: the dense store holds {self._length}")
        keep = int(np.searchsorted(self._positions[: self._num_keys], length))
        if self._projection is None and keep < self._num_keys:
            self._waiting = [np.concatenate(self._waiting)[:keep]]
        self._rows.truncate(keep)
        self._length, self._num_keys = length, keep

    def reset(self) -> None:
        """Forget all states, and the projection unless it was given."""
        self._rows.reset()
        self._waiting = []
        self._projection = self._given
        self._hidden = None if self._given is None else self._given.hidden
        self._length = self._num_keys = 0

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first broken invariant. O(len)"""
        known = len(self._rows) + sum(len(states) for states in self._waiting)
        positions = self._positions[: self._num_keys]
        if known != self._num_keys or self._num_keys > min(self._length, self.capacity):
            return f"{known} keys for {self._num_keys} positions of {self._length} (capacity {self.capacity})"
        if len(positions) and (
            np.any(np.diff(positions) <= 0) or not 0 <= positions[0] <= positions[-1] < self._length
        ):
            return f"positions do not ascend within the {self._length} there are"
        return self._rows.check_integrity()


def places_after(positions: npt.ArrayLike, token_ids: npt.ArrayLike, root: int) -> PositionArray:
    """Return the places p in `token_ids [n]` whose token may follow the token `root`, one for each hit that has one.

    Of a hit j, p = j + 2. Places where `root` itself comes before (token j + 1) go first; else the order of the hits
    is kept.
    """
    places, tokens = np.asarray(positions, np.int64) + 2, np.asarray(token_ids)
    places = places[(places >= 1) & (places < len(tokens))]
    return places[np.argsort(tokens[places - 1] != root, kind="stable")]


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise GraftError(f"dense store: {name} is {value!r}: expected a whole number from {least}")
