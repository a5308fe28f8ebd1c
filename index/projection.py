"""From hidden states to short unit keys whose inner products say how alike two places are.

Knows no text and no model. The one idea: a few dimensions of a hidden state are hundreds of times larger than the
rest and the same everywhere, so states are centred and scaled per dimension on the first ones seen before anything
is projected; without that all places look alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError

FloatArray = npt.NDArray[np.float32]
SMALLEST_SCALE = 1e-3  # of the largest one: a dimension that hardly moves is no evidence
BLOCK_ROWS = 16  # matrix products of one size only, so that a key does not depend on how many came with it
MOST_ROWS = 4096  # that are copied at a time
SEED = 20_251_129  # of the random directions: any fixed number serves


def as_states(states: npt.ArrayLike, hidden: int | None = None) -> FloatArray:
    """Return states as float32 [n, hidden]; raises `GraftError` for other shapes, types or numbers not finite."""
    try:
        array = np.asarray(states)
    except (TypeError, ValueError) as error:
        raise GraftError(f"hidden states cannot be read as an array ({error}): expected numpy [n, hidden]") from None
    if array.dtype.kind not in "fiu":
        raise GraftError(f"hidden states are {array.dtype}: expected floating-point numbers")
    if array.ndim != 2 or array.shape[1] == 0:
        raise GraftError(f"hidden states have shape {array.shape}: expected [n, hidden]")
    if hidden is not None and array.shape[1] != hidden:
        raise GraftError(f"hidden states have {array.shape[1]} dimensions: expected {hidden}, as the first ones")
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(array).all():
        raise GraftError("hidden states hold numbers that are not finite (or beyond float32): expected finite ones")
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """`mean [hidden]` is taken off, `matrix [hidden, dim]` (scales included) applied, the result made a unit vector."""

    mean: FloatArray
    matrix: FloatArray

    def __post_init__(self) -> None:
        if self.mean.ndim != 1 or self.matrix.ndim != 2 or self.matrix.shape[0] != len(self.mean):
            shapes = f"mean {self.mean.shape} and matrix {self.matrix.shape}"
            raise GraftError(f"projection of {shapes}: expected [hidden] and [hidden, dim]")

    @property
    def hidden(self) -> int:
        """Dimensions of a state."""
        return len(self.mean)

    @property
    def dim(self) -> int:
        """Dimensions of a key."""
        return self.matrix.shape[1]

    @classmethod
    def fit(cls, states: npt.ArrayLike, dim: int) -> Projection:
        """Centre and scale as `states [n, hidden]` say, then random directions (fixed seed). O(n * hidden)"""
        array = as_states(states)
        if len(array) == 0 or dim < 1:
            raise GraftError(f"projection of {len(array)} states to {dim} dimensions: expected at least 1 and 1")
        mean, scale = array.mean(axis=0), array.std(axis=0)
        scale = np.maximum(scale, SMALLEST_SCALE * max(float(scale.max()), 1e-30))
        directions = np.random.default_rng(SEED).standard_normal((array.shape[1], dim), np.float32)
        return cls(mean, directions / scale[:, None])

    def keys(self, states: FloatArray) -> FloatArray:
        """Return unit vectors [n, dim] of states [n, hidden]; a state that equals the mean gives zeros."""
        keys = np.empty((len(states), self.dim), np.float32)
        for start in range(0, len(states), MOST_ROWS):
            rows = states[start : start + MOST_ROWS] - self.mean
            keys[start : start + MOST_ROWS] = _in_blocks(rows, self.matrix)
        lengths = np.linalg.norm(keys, axis=1, keepdims=True)
        return np.divide(keys, lengths, out=np.zeros_like(keys), where=lengths > 0)


def _in_blocks(rows: FloatArray, matrix: FloatArray) -> FloatArray:
    padded = np.zeros((-(-len(rows) // BLOCK_ROWS), BLOCK_ROWS, rows.shape[1]), np.float32)
    padded.reshape(-1, rows.shape[1])[: len(rows)] = rows
    return (padded @ matrix).reshape(-1, matrix.shape[1])[: len(rows)]
