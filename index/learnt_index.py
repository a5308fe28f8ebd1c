"""The text of one sequence, and what may come next after it by a ranking that learns: the Python face.

Knows no model. Other engines can use it on its own: `extend` by what was committed, `draft(budget)`, `truncate`,
`reset`. Without the native module a Python twin with the same results serves in its place, and says so once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.learnt_twin import PythonLearntIndex
from longgraft.index.native import native_module
from longgraft.index.suffix_automaton import (
    MAX_TOKENS,
    MIN_PROBABILITY,
    NO_LIMIT,
    NO_PATH,
    as_path,
    as_token_ids,
    refuse_id,
)
from longgraft.index.weights import Weights

IntArray = npt.NDArray[np.int32]
ELSEWHERE = 1 << 30  # places from here on lie in the side text


class Nodes(NamedTuple):
    """A drafted tree, likeliest node first; all arrays [n].

    `parents`: -1 = hangs from the context, else an earlier node. `scores`: log-probability of the whole path.
    `match_lens`: tokens of context that matched, at most 32 (0: no match behind it). `places`: how many tokens stood
    before the one that it copies, plus `ELSEWHERE` in the side text; -1: copied from nowhere.
    """

    token_ids: IntArray
    parents: IntArray
    scores: npt.NDArray[np.float32]
    match_lens: IntArray
    places: IntArray


class Options(NamedTuple):
    """What is listed after one context; probabilities and `rest` (none of these) add up to 1. Arrays [n]."""

    token_ids: IntArray
    match_lens: IntArray
    places: IntArray
    probabilities: npt.NDArray[np.float64]
    rest: float


@cache
def default_weights() -> Weights:
    """Return the packaged weights, read once."""
    return Weights()


class LearntIndex:
    """A growing text with side texts, and the learnt ranking of what may come next.

    Token ids are 0 to `vocab_size` - 1; -1 separates documents and nothing matches across it. `token_kinds
    [vocab_size]`: coarse kind of each token's text, 0 to 7 (0, or None: unknown). `native`: use the native index
    (True), the Python twin (False) or whichever there is (None).
    """

    def __init__(
        self,
        vocab_size: int = NO_LIMIT,
        *,
        weights: Weights | None = None,
        token_kinds: npt.NDArray[np.uint8] | None = None,
        native: bool | None = None,
    ) -> None:
        self.vocab_size = _whole("vocab_size", vocab_size, 1)
        self.start = weights or default_weights()
        if token_kinds is not None and (
            not isinstance(token_kinds, np.ndarray)
            or token_kinds.dtype != np.uint8
            or token_kinds.ndim != 1
            or token_kinds.max(initial=0) > 7
        ):
            raise GraftError("token_kinds: expected a row of uint8, each 0 to 7")
        module = native_module() if native is not False else None
        if native and module is None:
            raise GraftError("the native index was not built: install a C++ compiler and reinstall longgraft")
        self.is_native = module is not None
        kind = PythonLearntIndex if module is None else module.LearntIndex
        self._index = kind(self.start.values, token_kinds, self.start.rate, self.start.shrink)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def side_len(self) -> int:
        """Tokens of the side text."""
        return int(self._index.side_len)

    def extend(self, token_ids: npt.ArrayLike, learn: bool = False, successors: IntArray | None = None) -> None:
        """Append tokens [n], O(n); all of them or, with a `GraftError`, none.

        `learn`: they were generated, so the source pointer follows them and the weights learn from each.
        `successors [vocab_size, k]`: the target's likeliest successors of each token, -1 = empty.
        """
        ids = as_token_ids(token_ids, MAX_TOKENS - len(self))
        try:
            wrong = self._index.extend(ids, learn, successors, self.vocab_size)
        except MemoryError:
            raise GraftError(f"no memory for {len(ids)} more tokens: the index was emptied") from None
        refuse_id(ids, wrong, self.vocab_size)

    def extend_side(self, token_ids: npt.ArrayLike) -> int:
        """Append a text from elsewhere [n], after a separator; returns the place of its first token."""
        ids = as_token_ids(token_ids, MAX_TOKENS - self.side_len - 1)
        wrong = np.flatnonzero((ids < -1) | (ids >= self.vocab_size))
        refuse_id(ids, int(wrong[0]) if len(wrong) else -1, self.vocab_size)  # before anything is appended
        if self.side_len:
            self._index.extend_side(np.full(1, -1, np.int32), self.vocab_size)
        start = ELSEWHERE + self.side_len
        try:
            self._index.extend_side(ids, self.vocab_size)
        except MemoryError:
            raise GraftError(f"no memory for {len(ids)} more tokens: the index was emptied") from None
        return start

    def clear_side(self) -> None:
        """Forget the side text."""
        self._index.clear_side()

    def begin(self, prompt_len: int) -> None:
        """Say how many tokens are the prompt: places after it weigh differently."""
        self._index.begin(_whole("prompt_len", prompt_len))

    def hint(self, places: npt.ArrayLike, cosines: npt.ArrayLike) -> None:
        """Propose to go on at these places [n] of the own text, best first, until the text changes or the next call.

        `cosines [n]`: how alike the target's state there was to its newest one (`DenseStore.search`; of a hit j the
        place is j + 2). The first 16 are looked at, and only where no match is longer than 3 tokens. They hold for
        what comes next, not further down a path. The weights they start from were fitted on keys of 64 dimensions.
        """
        ids, scores = as_token_ids(places), _as_cosines(cosines)
        if len(ids) != len(scores):
            raise GraftError(f"{len(ids)} hints with {len(scores)} cosines: expected as many")
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self)):
            raise GraftError(f"hints from {ids.min()} to {ids.max()}: expected places from 0 to {len(self) - 1}")
        self._index.hint(ids, scores)

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
        out = np.empty((5, max(_whole("budget", budget, None), 0)), np.int32)
        n = self._index.draft(out, as_path(path, self.vocab_size), threshold, successors)
        return Nodes(out[0, :n], out[1, :n], out[2, :n].view(np.float32), out[3, :n], out[4, :n])

    def options(self, path: npt.ArrayLike = NO_PATH, successors: IntArray | None = None) -> Options:
        """Return all that is listed after the text and `path`, with its probabilities."""
        return Options(*self._index.options(as_path(path, self.vocab_size), successors))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, O(length): everything is built anew. Learnt weights stay."""
        if not 0 <= _whole("length", length, None) <= len(self):
            raise GraftError(f"truncate to {length} tokens: the index holds {len(self)}")
        self._index.truncate(length)

    def reset(self) -> None:
        """Forget all texts and what was learnt."""
        self._index.reset()

    def tokens(self) -> IntArray:
        """Return a copy of the text. [n]"""
        return self._index.tokens()

    def weights(self) -> npt.NDArray[np.float64]:
        """Return a copy of the weights as they are now. [NUM_WEIGHTS]"""
        return self._index.weights()

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first broken invariant; O(len) and for idle moments."""
        return str(self._index.check_integrity())

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
        return int(self._index.memory_bytes)


def _as_cosines(cosines: npt.ArrayLike) -> npt.NDArray[np.float64]:
    try:
        scores = np.ascontiguousarray(cosines, np.float64)
    except (TypeError, ValueError) as error:
        raise GraftError(f"cosines of hints cannot be read as numbers ({error}): expected a row of them") from None
    if scores.ndim != 1 or not np.all(np.abs(scores) <= 1.001):  # not NaN; keys are of unit length but for rounding
        raise GraftError("cosines of hints: expected a row of numbers from -1 to 1")
    return scores


def _whole(name: str, value: Any, least: int | None = 0) -> int:
    """Return a whole number of at least `least` and at most 2^31 - 1; raises `GraftError` for anything else."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value > NO_LIMIT or (least is not None and value < least):
        bound = f", {least} to {NO_LIMIT}" if least is not None else f" of at most {NO_LIMIT}"
        raise GraftError(f"{name} is {value!r}: expected a whole number{bound}")
    return int(value)
