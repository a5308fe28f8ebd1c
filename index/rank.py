"""How likely is each thing that may come next: where the bins lie, and the hazard that each cell starts with.

Knows no automaton and no tokens; both automata (native and Python) read their tables from here, so that the
bins are defined once. One idea: possible next tokens are listed in a fixed order, and a cell's *hazard* is
P(this is the next token | none listed before it is), so that p_i = q_i * prod over j < i of (1 - q_j) is
normalised by construction and the rest is the probability of "none of these".

Cells of a match: length (tokens that matched) x share (its count / counts not listed yet in its level) x
total (those counts) x order (how many were listed before) x age (tokens since its last occurrence). Their
priors are additive in log-odds over the pairs in `MATCH_TERMS`: a few hundred numbers, `hazards.json`, fitted
by `longgraft.eval.calibrate_hazards` on replayed real texts (287 edits, documents, repositories, chats; Qwen2.5-Coder
tokens; 1.2 million trials). Successor rows have a cell per rank x length of the match beside them (hand-smoothed
from some 2,000 tokens of Qwen2.5-Coder-0.5B: a start, to be learnt from), recent tokens one per rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError

# Bin = number of edges <= value.
LENGTH_EDGES = (2, 3, 4, 5, 7, 9, 13, 21, 32)
SHARE_EDGES = (0.05, 0.15, 0.35, 0.6, 0.9, 0.9999)
TOTAL_EDGES = (2, 3, 5, 17)
AGE_EDGES = (64, 512, 4096)
CONTEXT_EDGES = (1, 4)
NUM_ORDERS = 3

# Caps of a list; the native header has the same ones (tests compare).
MAX_LEVELS = 8
MAX_CHILDREN = 32
MAX_MATCHES = 16
MAX_SUCCESSORS = 8
MAX_RECENT = 16
RECENT_SCAN = 128
RECENT_DISTINCT = 32
WALK_CAP = 64

MATCH_SHAPE = (
    len(LENGTH_EDGES) + 1,
    len(SHARE_EDGES) + 1,
    len(TOTAL_EDGES) + 1,
    NUM_ORDERS,
    len(AGE_EDGES) + 1,
)
NUM_MATCH_CELLS = int(np.prod(MATCH_SHAPE))
NUM_CONTEXTS = len(CONTEXT_EDGES) + 1
SUCCESSOR_BASE = NUM_MATCH_CELLS
RECENT_BASE = SUCCESSOR_BASE + MAX_SUCCESSORS * NUM_CONTEXTS
NUM_CELLS = RECENT_BASE + MAX_RECENT

# Axes (of MATCH_SHAPE) of each additive term.
MATCH_TERMS = ((0, 3), (1, 2), (0, 1), (0, 2), (0, 4), (3, 4), (1, 3), (2, 3), (1, 4))
LOWEST, HIGHEST = 1e-4, 0.9995  # no cell is ever sure

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Hazards to start from and how fast they learn.

    `priors [NUM_CELLS]`; a prior counts for `prior_weight` trials; at each new trial of a cell its earlier
    ones keep the share `decay`. Weight and decay: chosen on the fitting traces by log-loss, flat around here.
    `learns` False: the hazards stay the priors.
    """

    priors: FloatArray = field(default_factory=lambda: load_priors())
    prior_weight: float = 30.0
    decay: float = 0.995
    learns: bool = True

    def __post_init__(self) -> None:
        if self.priors.shape != (NUM_CELLS,) or self.priors.dtype != np.float64:
            raise GraftError(
                f"hazard priors are {self.priors.dtype} {self.priors.shape}: expected float64 ({NUM_CELLS},)"
            )
        if not (np.all(self.priors > 0) and np.all(self.priors < 1)):
            raise GraftError("hazard priors: expected values above 0 and below 1")
        if not (self.prior_weight > 0 and 0 < self.decay <= 1):
            raise GraftError(
                f"prior_weight {self.prior_weight}, decay {self.decay}: expected above 0, and above 0 to 1"
            )

    def tables(self) -> tuple[Any, ...]:
        """Return what the native index is made of: bin edges, orders, priors, weight, decay."""
        lengths, totals, ages, contexts = (
            np.array(edges, np.int32) for edges in (LENGTH_EDGES, TOTAL_EDGES, AGE_EDGES, CONTEXT_EDGES)
        )
        shares = np.array(SHARE_EDGES, np.float64)
        return lengths, shares, totals, ages, contexts, NUM_ORDERS, self.priors, self.prior_weight, self.decay


def match_log_odds(data: dict[str, Any]) -> FloatArray:
    """Add up the terms of a table: log-odds per match cell, [NUM_MATCH_CELLS]."""
    total = np.full(MATCH_SHAPE, float(data["bias"]))
    for axes in MATCH_TERMS:
        term = np.asarray(data["match"]["x".join(map(str, axes))], np.float64)
        shape = [MATCH_SHAPE[axis] if axis in axes else 1 for axis in range(len(MATCH_SHAPE))]
        total = total + term.reshape(shape)
    return total.reshape(-1)


def priors_from(data: dict[str, Any]) -> FloatArray:
    """Expand a hazard table (the content of `hazards.json`) into one prior per cell, [NUM_CELLS]."""
    match = 1.0 / (1.0 + np.exp(-match_log_odds(data)))
    successor = np.asarray(data["successor"], np.float64).reshape(-1)
    recent = np.asarray(data["recent"], np.float64)
    return np.clip(np.concatenate([match, successor, recent]), LOWEST, HIGHEST)


def read_table(path: str | Path | None = None) -> dict[str, Any]:
    """Read the hazard table at `path` (None: the one in the package)."""
    source = resources.files("longgraft.index").joinpath("hazards.json") if path is None else Path(path)
    try:
        table = json.loads(source.read_text("utf-8"))
    except OSError as error:
        raise GraftError(f"hazard table {path}: {error.strerror}") from None
    except ValueError as error:
        raise GraftError(f"hazard table {path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise GraftError(f"hazard table {path}: expected a JSON object")
    return table


def format_table(table: dict[str, Any]) -> str:
    """Return a hazard table as JSON text, one term a line."""
    terms = ",\n".join(f"  {json.dumps(axes)}: {json.dumps(weights)}" for axes, weights in table["match"].items())
    rest = "".join(f",\n {json.dumps(key)}: {json.dumps(table[key])}" for key in ("successor", "recent"))
    return f'{{"bias": {table["bias"]},\n "match": {{\n{terms}\n }}{rest}}}\n'


def load_priors(path: str | Path | None = None) -> FloatArray:
    """Read the hazard table at `path` (None: the one in the package) into priors, [NUM_CELLS]."""
    try:
        return priors_from(read_table(path))
    except (KeyError, TypeError) as error:
        raise GraftError(f"hazard table {path} lacks {error}") from None
    except ValueError as error:
        raise GraftError(f"hazard table {path or 'hazards.json'} does not fit the bins: {error}") from None
