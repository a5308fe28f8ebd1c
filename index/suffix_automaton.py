"""Suffix automaton over token ids with a learnt best-first draft: the Python face of the native index.

Knows no model and no successor table of its own. Without the native module a Python twin with the same results
serves in its place, and says so once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.native import native_module
from longgraft.index.rank import NUM_CELLS, Ranking
from longgraft.index.snapshot import Snapshot, pack, unpack
from longgraft.index.twin import PythonIndex

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
NO_PATH = np.zeros(0, np.int32)
NO_LIMIT = 2**31 - 1  # vocabulary size where none is known
MAX_TOKENS = 2**29  # as in the header: two edges for each still fit a table numbered by int32
# Nodes less likely than this do not pay for a row of any forward.
MIN_PROBABILITY = 0.002


class Nodes(NamedTuple):
    """A drafted tree, likeliest node first; all arrays [n].

    `parents`: -1 = hangs from the context, else an earlier node. `scores`: log-probability of the whole path.
    `match_lens`: tokens of context that matched (0: no match behind it). `origins`: offset of the token it
    copies, most recent occurrence (-1: successor row). `cells`: which hazard it was ranked by.
    """

    token_ids: IntArray
    parents: IntArray
    scores: FloatArray
    match_lens: IntArray
    origins: IntArray
    cells: IntArray


class Options(NamedTuple):
    """What is listed after one context, in order; probabilities and the unlisted rest add up to 1. All [n]."""

    token_ids: IntArray
    match_lens: IntArray
    origins: IntArray
    cells: IntArray
    probabilities: npt.NDArray[np.float64]


@cache
def default_ranking() -> Ranking:
    """Return the packaged hazards, read once."""
    return Ranking()


def as_token_ids(token_ids: npt.ArrayLike, room: int = MAX_TOKENS) -> IntArray:
    """Return ids as a contiguous int32 array [n]; raises `GraftError` for anything but a row of <= `room` integers."""
    try:
        array = np.asarray(token_ids)
    except ValueError as error:
        raise GraftError(f"token ids do not form an array ({error}): expected one row of integers") from None
    if array.size > room:
        raise GraftError(f"{array.size} token ids: expected at most {room}, the room left of {MAX_TOKENS}")
    if array.dtype != np.int32:
        if array.size == 0:
            return NO_PATH
        if array.dtype.kind not in "iu":
            raise GraftError(f"token ids are {array.dtype}: expected integers")
        if array.min() < -(2**31) or array.max() >= 2**31:
            raise GraftError(f"token ids from {array.min()} to {array.max()}: expected 32-bit integers")
        array = array.astype(np.int32)
    if array.ndim != 1:
        raise GraftError(f"token ids have shape {array.shape}: expected one row of them")
    return np.ascontiguousarray(array)


def as_path(path: npt.ArrayLike, vocab_size: int) -> IntArray:
    """Return a path of proposed tokens as ids [n]; raises `GraftError` for one that no vocabulary of this size has."""
    if path is NO_PATH or (isinstance(path, tuple) and not path):
        return NO_PATH
    ids = as_token_ids(path)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise GraftError(f"path holds token ids {ids.min()} to {ids.max()}: expected 0 to {vocab_size - 1}")
    return ids


def refuse_id(ids: IntArray, place: int, vocab_size: int) -> None:
    """Raise `GraftError` for the id at `place`; -1: all are right."""
    if place >= 0:
        raise GraftError(
            f"token id {ids[place]} at place {place}: expected 0 to {vocab_size - 1}, or -1 between documents"
        )


class SuffixAutomaton:
    """Everything that occurred in a growing text, and what may come next after it.

    Token ids are 0 to `vocab_size` - 1; -1 separates documents and nothing matches across it. `native`: use the
    native index (True), the Python twin (False) or whichever there is (None).
    """

    def __init__(
        self, vocab_size: int = NO_LIMIT, *, ranking: Ranking | None = None, native: bool | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.ranking = ranking or default_ranking()
        module = native_module() if native is not False else None
        index = module.Index if module else None
        if native and index is None:
            raise GraftError("the native index was not built: install a C++ compiler and reinstall longgraft")
        self.is_native = index is not None
        self._index = PythonIndex(self.ranking) if index is None else index(*self.ranking.tables())

    def __len__(self) -> int:
        return len(self._index)

    def extend(self, token_ids: npt.ArrayLike, learn: bool = False, successors: IntArray | None = None) -> None:
        """Append tokens [n], amortised O(n); all of them or, with a `GraftError`, none.

        `learn`: before each token, score what was listed for its place against it (its cells' hazards move).
        """
        ids = as_token_ids(token_ids, MAX_TOKENS - len(self))
        try:
            wrong = self._index.extend(ids, learn and self.ranking.learns, successors, self.vocab_size)
        except MemoryError:
            raise GraftError(f"no memory for {len(ids)} more tokens: the index was emptied") from None
        refuse_id(ids, wrong, self.vocab_size)

    def match(self) -> tuple[int, int]:
        """Return (length, end) of the longest suffix that occurred before: its text is tokens[end - length : end].

        `end` is its most recent earlier end; (0, 0) if there is none.
        """
        length, end = self._index.match()
        return length, end

    def draft(
        self,
        budget: int,
        path: npt.ArrayLike = NO_PATH,
        threshold: float = MIN_PROBABILITY,
        successors: IntArray | None = None,
    ) -> Nodes:
        """Return the at most `budget` likeliest nodes after the text and `path`, none below `threshold`."""
        if not 0 < threshold < 1:
            raise GraftError(f"threshold is {threshold}: expected between 0 and 1")
        out = np.empty((6, max(budget, 0)), np.int32)
        n = self._index.draft(out, as_path(path, self.vocab_size), threshold, successors)
        return Nodes(out[0, :n], out[1, :n], out[2, :n].view(np.float32), out[3, :n], out[4, :n], out[5, :n])

    def options(self, path: npt.ArrayLike = NO_PATH, successors: IntArray | None = None) -> Options:
        """Return all that is listed after the text and `path`, with its probabilities."""
        return Options(*self._index.options(as_path(path, self.vocab_size), successors))

    def mark(self) -> None:
        """Make `truncate` to here or later quick, at the price of a copy of the automaton (see `memory_bytes`).

        Two marks are kept, the earliest and the latest: the end of the prompt, say, and of the last turn.
        """
        try:
            self._index.mark()
        except MemoryError:
            raise GraftError(f"no memory for a mark at {len(self)} tokens: truncate will build anew") from None

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; what was learnt stays. O(length), after a mark O(length - mark) appends.

        The nearest mark is copied back and what follows it appended; without one everything is built anew.
        """
        if not 0 <= length <= len(self):
            raise GraftError(f"truncate to {length} tokens: the index holds {len(self)}")
        try:
            self._index.truncate(length)
        except MemoryError:
            raise GraftError(f"no memory to truncate to {length} tokens: the index was emptied") from None

    def snapshot(self) -> bytes:
        """Return text and what was learnt as bytes, 4 a token; `restore` gives the same lists and drafts again."""
        return pack(Snapshot(self.tokens(), *self.learnt()))

    def restore(self, data: bytes) -> None:
        """Become what `snapshot` saw, of any index with as many cells; on a `GraftError` nothing has changed."""
        saved = unpack(data)
        if len(saved.trials) != NUM_CELLS:
            raise GraftError(f"snapshot has {len(saved.trials)} cells: this ranking has {NUM_CELLS}")
        made = SuffixAutomaton(self.vocab_size, ranking=self.ranking, native=self.is_native)
        made.extend(saved.token_ids)
        made.set_learnt(saved.trials, saved.hits)
        self._index = made._index

    def reset(self) -> None:
        """Forget the text and what was learnt."""
        self._index.reset()

    def learnt(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the trials and hits that each cell has seen, forgetting included. [NUM_CELLS] each"""
        trials, hits = self._index.learnt()
        return trials, hits

    def states(self) -> IntArray:
        """Return (length, length of its link, count, last end) of every state but the root, sorted. [n, 4]

        For tests and for looking inside: a state stands for the strings of link + 1 to length tokens before `end`.
        """
        table = self._index.states().reshape(-1, 4)
        return table[np.lexsort(table.T)]

    def set_learnt(self, trials: npt.NDArray[np.float64], hits: npt.NDArray[np.float64]) -> None:
        """Take over what `learnt` of another index gave. [NUM_CELLS] each"""
        if trials.shape != (NUM_CELLS,) or hits.shape != (NUM_CELLS,):
            raise GraftError(f"trials {trials.shape} and hits {hits.shape}: expected ({NUM_CELLS},) each")
        self._index.set_learnt(trials, hits)

    def image(self, room: int) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays that a device starts from, with room for that many more tokens (bindings.cpp)."""
        if isinstance(self._index, PythonIndex):
            raise GraftError("a device starts from the native index: install a C++ compiler and reinstall longgraft")
        arrays: tuple[npt.NDArray[Any], ...] = self._index.image(room)
        return arrays

    def tokens(self) -> IntArray:
        """Return a copy of the text. [n]"""
        return self._index.tokens()

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first broken invariant; O(len) and for idle moments."""
        return str(self._index.check_integrity())

    @property
    def steps(self) -> int:
        """Work done so far, in visited states and copied edges: linear in the tokens on any text."""
        return int(self._index.steps)

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
        return int(self._index.memory_bytes)
