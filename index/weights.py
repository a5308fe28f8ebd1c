"""What the learnt ranking starts from: one number per entry of its additive weight tables.

Knows no text. The one idea: the log-odds of everything that may come next are sums of table entries, so a few
thousand numbers, fitted once on real texts by `longgraft.eval.calibrate`, say how much a match of four tokens, a
place at the source pointer or a known substitution is worth; each request then goes on learning from its own
tokens. Which tables there are, and their order, is defined in `features.py` and mirrored by the native header.
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
from longgraft.index.features import NUM_WEIGHTS, TABLES

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights to start from and how fast they learn.

    `values [NUM_WEIGHTS]`. `rate`: step of the gradient ascent on each committed token's log-likelihood (0.05: of
    0.005 to 0.1 the best on replayed texts; 0 learns nothing). `shrink`: a path of probability p is reported as
    p * (1 - 4 * shrink * p * (1 - p)), because the likeliest of many estimates are too high; fitted with the weights.
    """

    values: FloatArray = field(default_factory=lambda: load_weights())
    rate: float = 0.05
    shrink: float = 0.08

    def __post_init__(self) -> None:
        if self.values.shape != (NUM_WEIGHTS,) or self.values.dtype != np.float64:
            raise GraftError(f"weights are {self.values.dtype} {self.values.shape}: expected float64 ({NUM_WEIGHTS},)")
        if not np.all(np.isfinite(self.values)):
            raise GraftError("weights: expected finite numbers")
        if not (0 <= self.rate < 1 and 0 <= self.shrink <= 0.25):
            raise GraftError(f"rate {self.rate}, shrink {self.shrink}: expected 0 to below 1, and 0 to 0.25")


def from_tables(tables: dict[str, Any]) -> FloatArray:
    """Join weight tables (the content of `weights.json`) in their order, [NUM_WEIGHTS]."""
    parts = []
    for name, size in TABLES.items():
        part = np.asarray(tables[name], np.float64).reshape(-1)
        if len(part) != size:
            raise ValueError(f"table {name} has {len(part)} weights instead of {size}")
        parts.append(part)
    return np.concatenate(parts)


def to_tables(weights: FloatArray) -> dict[str, list[float]]:
    """Split weights into named tables, rounded to what matters."""
    starts = np.cumsum([0, *TABLES.values()])
    return {
        name: np.round(weights[start : start + size], 3).tolist() for (name, size), start in zip(TABLES.items(), starts)
    }


def format_tables(tables: dict[str, list[float]]) -> str:
    """Return weight tables as JSON text, one table a line."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(part)}" for name, part in tables.items()) + "\n}\n"


def load_weights(path: str | Path | None = None) -> FloatArray:
    """Read the weight tables at `path` (None: those in the package), [NUM_WEIGHTS]."""
    source = resources.files("longgraft.index").joinpath("weights.json") if path is None else Path(path)
    name = path or "weights.json"
    try:
        return from_tables(json.loads(source.read_text("utf-8")))
    except OSError as error:
        raise GraftError(f"weights {name}: {error.strerror}") from None
    except KeyError as error:
        raise GraftError(f"weights {name} lack the table {error}") from None
    except (TypeError, ValueError) as error:
        raise GraftError(f"weights {name} do not fit the ranking: {error}") from None
