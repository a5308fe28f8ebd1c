"""What a dense store would have hinted at every place of known outputs, kept in small files.

Knows kept hidden states (`hidden_states.py`) and the dense store, no index. Hints for place p come from the state that
predicted the token before p, searched among the states two and more before it, as in generation.

    python -m longgraft.eval.hints STATES.npz... --layer 16 --out FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.hidden_states import Thoughts, load
from longgraft.eval.traces import Trace
from longgraft.index.dense_store import DIM, DenseStore
from longgraft.index.features import MAX_HINTS


@dataclass(frozen=True, slots=True, eq=False)
class Hinted:
    """A trace with `top_ids [n, k]` (the model's likeliest next tokens) and hints for each output token, best first.

    `places`, `cosines` [n - prompt_len, MAX_HINTS]; place -1: no hint.
    """

    trace: Trace
    top_ids: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    cosines: npt.NDArray[np.float32]

    def at(self, place: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Return places and cosines of the hints for the token at `place`."""
        row = place - self.trace.prompt_len
        known = self.places[row] >= 0
        return self.places[row][known], self.cosines[row][known].astype(np.float64)


def hints_of(thoughts: Thoughts, layer: int, dim: int = DIM) -> Hinted:
    """Replay the states of one layer (its number in the model) through a store of `dim` dimensions."""
    trace = thoughts.trace
    if layer not in thoughts.layers:
        raise GraftError(f"layer {layer}: the kept states are of layers {thoughts.layers}")
    states = thoughts.states[:, thoughts.layers.index(layer)]
    store, count = DenseStore(dim=dim), len(trace.token_ids) - trace.prompt_len
    places = np.full((count, MAX_HINTS), -1, np.int32)
    cosines = np.zeros((count, MAX_HINTS), np.float32)
    for row in range(count):
        root = trace.prompt_len - 1 + row
        if root < 1:
            continue
        store.extend(states[len(store) : root])
        positions, scores = store.search(states[root - 1], MAX_HINTS)
        places[row, : len(positions)], cosines[row, : len(positions)] = positions + 2, scores
    return Hinted(trace, thoughts.top_ids, places, cosines)


def save_hints(path: Path, hinted: Hinted) -> None:
    """Write hints; the file can also be read as an observed text by `longgraft.eval.calibrate`."""
    trace = hinted.trace
    np.savez_compressed(
        path,
        token_ids=trace.token_ids,
        prompt_len=np.int64(trace.prompt_len),
        family=trace.family,
        group=trace.group,
        top_ids=hinted.top_ids,
        hint_places=hinted.places,
        hint_cosines=hinted.cosines,
    )


def load_hints(path: Path) -> Hinted:
    """Read what `save_hints` wrote; raises `GraftError` for anything else."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            trace = Trace(
                str(kept["family"]), str(kept["group"]), kept["token_ids"].astype(np.int32), int(kept["prompt_len"])
            )
            hinted = Hinted(trace, kept["top_ids"].astype(np.int32), kept["hint_places"], kept["hint_cosines"])
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise GraftError(f"hints in {path} cannot be read: {error}") from None
    shape = (len(trace.token_ids) - trace.prompt_len, MAX_HINTS)
    if hinted.places.shape != shape or hinted.cosines.shape != shape or len(hinted.top_ids) != len(trace.token_ids):
        raise GraftError(f"hints in {path} do not fit its {len(trace.token_ids)} tokens: write them anew")
    return hinted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="longgraft.eval.hints", description=__doc__)
    parser.add_argument("files", nargs="+", help="hidden states as longgraft.eval.dense keeps them (.npz)")
    parser.add_argument("--layer", type=int, required=True, help="number of the layer in the model, from 1")
    parser.add_argument("--dim", type=int, default=DIM, help="dimensions of a key")
    parser.add_argument("--out", type=Path, required=True, help="folder for the hints")
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for name in options.files:
            save_hints(options.out / Path(name).name, hints_of(load(Path(name)), options.layer, options.dim))
    except (GraftError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
