"""For every token, what the target last thought would follow it: the paper's successor table.

Knows no model: whoever has logits feeds it rows. It always has something to say, at any node, for one look-up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError

IntArray = npt.NDArray[np.int32]
EMPTY = -1  # token id 0 is an ordinary token


class SuccessorTable:
    """`rows [vocab_size, width]`, likeliest first, -1 = empty; allocated when the first row arrives."""

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        if vocab_size < 1 or width < 1:
            raise GraftError(f"successor table of {vocab_size} x {width}: expected at least 1 x 1")
        self.vocab_size = vocab_size
        self.width = width
        self.rows: IntArray | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes held: 4 * vocab_size * width once there is a row."""
        return 0 if self.rows is None else self.rows.nbytes

    def extend(self, token_ids: npt.ArrayLike, top_ids: npt.ArrayLike) -> None:
        """Overwrite the rows of `token_ids [n]` by `top_ids [n, k]`; of equal tokens the last one counts.

        Only the first `width` columns are kept, missing ones are empty. Raises `GraftError` for ids outside
        the vocabulary, before anything is changed.
        """
        tokens, top = np.asarray(token_ids), np.asarray(top_ids)
        if tokens.ndim != 1 or top.ndim != 2 or len(tokens) != len(top):
            raise GraftError(f"successor rows {top.shape} for tokens {tokens.shape}: expected [n, k] for [n]")
        if len(tokens) == 0:
            return
        top = top[:, : self.width]
        self._check(tokens, 0)
        self._check(top, EMPTY)
        if self.rows is None:
            self.rows = np.full((self.vocab_size, self.width), EMPTY, np.int32)
        self.rows[tokens, : top.shape[1]] = top
        self.rows[tokens, top.shape[1] :] = EMPTY

    def _check(self, ids: npt.NDArray[np.generic], lowest: int) -> None:
        if ids.dtype.kind not in "iu":
            raise GraftError(f"successor table: token ids are {ids.dtype}: expected integers")
        if ids.size and (ids.min() < lowest or ids.max() >= self.vocab_size):
            raise GraftError(
                f"successor table: token ids from {ids.min()} to {ids.max()}: "
                f"expected {lowest} to {self.vocab_size - 1}"
            )

    def reset(self) -> None:
        """Empty all rows and free them."""
        self.rows = None
