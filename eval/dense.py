"""Does the dense store find what exact matching cannot, and what does a hit cost?

A model is teacher-forced over known outputs and its hidden states are kept (`hidden_states.py`). At every output
position the store is asked with the state that predicted the root, as the engine would ask it. Reported per layer:

- *starts*: places where the next 2 (4) tokens are a copy of earlier text, but of no place that the root's own token
  comes before, so that no exact match can propose them; the share found among the best 1, 4, 8, 16 hits;
- *ranking*: where the longest exact match is short and its continuations differ, how often the most alike, the newest
  and the most frequent one is right;
- *hits*: how often the token after a hit is right, by rank, by cosine and by length of the exact match beside it;
- microseconds of a search and of adding a key;
- *gain*: accepted tokens with and without hits in the tree, for one layer (`dense_gain.py`).

    python -m longgraft.eval.dense FILES... --model M --states FOLDER --families doc_qa,agent,repo_completion
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.dense_gain import Root, gains, replay_roots
from longgraft.eval.hidden_states import Thoughts, thoughts_on
from longgraft.eval.replay import Trace, read_traces
from longgraft.index.dense_store import DIM, DenseStore

NUM_HITS = 16
SHARES = (1, 4, 8, 16)
COPY_LENGTHS = (2, 4)
LONGEST_MATCH = 5  # lengths from here on are one class
COSINE_EDGES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """What the store said at each root: `positions`, `cosines` [roots, NUM_HITS], -1 where there are fewer."""

    roots: IntArray
    positions: IntArray
    cosines: npt.NDArray[np.float32]


@dataclass
class Findings:
    """Sums over traces, of one layer."""

    starts: dict[tuple[str, int], IntArray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(5, np.int64)))
    ranking: dict[int, IntArray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(4, np.int64)))
    by_rank: dict[tuple[int, int], IntArray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(2, np.int64)))
    by_cosine: dict[tuple[int, int], IntArray] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(2, np.int64))
    )
    search_seconds: list[float] = field(default_factory=list)
    add_seconds: list[float] = field(default_factory=list)


def ask(states: npt.NDArray[np.float16], trace: Trace, dim: int, found: Findings) -> tuple[Hits, DenseStore]:
    """Replay the states `[n, hidden]` of one layer through a store, with a search at every output position."""
    store = DenseStore(dim=dim)
    store.extend(states[: trace.prompt_len - 1])
    roots = np.arange(trace.prompt_len - 1, len(trace.token_ids) - 1)
    positions = np.full((len(roots), NUM_HITS), -1, np.int64)
    cosines = np.full((len(roots), NUM_HITS), -1, np.float32)
    for row, root in enumerate(roots.tolist()):
        began = time.perf_counter()
        hits, scores = store.search(states[root - 1], NUM_HITS)
        asked = time.perf_counter()
        positions[row, : len(hits)], cosines[row, : len(hits)] = hits, scores
        store.extend(states[root : root + 1])
        found.search_seconds.append(asked - began)
        found.add_seconds.append(time.perf_counter() - asked)
    return Hits(roots, positions, cosines), store


def unmatched_starts(trace: Trace, length: int) -> IntArray:
    """Return the roots whose next `length` tokens are a copy, but none that the root's token comes before."""
    tokens = trace.token_ids.tolist()
    before: dict[tuple[int, ...], set[int]] = {}
    roots = []
    for root in range(1, len(tokens) - length):
        place = root - length + 1  # of the youngest copy that lies wholly in the past
        if place >= 1:
            before.setdefault(tuple(tokens[place : root + 1]), set()).add(tokens[place - 1])
        earlier = before.get(tuple(tokens[root + 1 : root + 1 + length]))
        if root >= trace.prompt_len - 1 and earlier and tokens[root] not in earlier:
            roots.append(root)
    return np.array(roots, np.int64)


def copies_at(
    token_ids: npt.NDArray[np.int32], roots: IntArray, positions: IntArray, length: int
) -> npt.NDArray[np.bool_]:
    """Return whether the `length` tokens after each hit are those after its root. [roots, hits]"""
    right = positions >= 0
    for offset in range(length):
        places = positions + 2 + offset
        wanted = token_ids[np.minimum(roots + 1 + offset, len(token_ids) - 1)]
        right &= (places <= roots[:, None]) & (token_ids[np.minimum(places, len(token_ids) - 1)] == wanted[:, None])
    return right


def longest_matches(trace: Trace) -> list[tuple[int, list[int]]]:
    """Return, for every root, the length of its longest match (`LONGEST_MATCH` at most) and the places after it."""
    tokens = trace.token_ids.tolist()
    after: dict[tuple[int, ...], list[int]] = {}
    found: list[tuple[int, list[int]]] = []
    for root in range(len(tokens) - 1):
        grams = [tuple(tokens[root + 1 - n : root + 1]) for n in range(1, min(LONGEST_MATCH, root + 1) + 1)]
        if root >= trace.prompt_len - 1:
            match = next(((len(gram), after[gram]) for gram in reversed(grams) if gram in after), (0, []))
            found.append((match[0], list(match[1])))
        for gram in grams:
            after.setdefault(gram, []).append(root + 1)
    return found


def measure(thoughts: Thoughts, layer: int, dim: int, found: Findings) -> None:
    """Add what one trace shows about one layer (place `layer` in its states)."""
    trace, states = thoughts.trace, thoughts.states[:, layer]
    hits, store = ask(states, trace, dim, found)
    tokens = trace.token_ids
    for length in COPY_LENGTHS:
        roots = unmatched_starts(trace, length)
        right = copies_at(tokens, roots, hits.positions[roots - hits.roots[0]], length)
        found.starts[trace.family, length] += [len(roots), *(int(right[:, :k].any(axis=1).sum()) for k in SHARES)]
    matches = longest_matches(trace)
    right = copies_at(tokens, hits.roots, hits.positions, 1)
    for row, (match, _) in enumerate(matches):
        for rank in range(NUM_HITS):
            if hits.positions[row, rank] >= 0:
                bucket = int(np.searchsorted(COSINE_EDGES, hits.cosines[row, rank], side="right"))
                found.by_rank[match, rank] += [1, right[row, rank]]
                found.by_cosine[match, bucket] += [1, right[row, rank]]
    for root, (match, places) in zip(hits.roots.tolist(), matches):
        if 1 <= match < LONGEST_MATCH:
            found.ranking[match] += ranked(
                tokens, root, np.array(places), store.scores(states[root - 1], np.array(places) - 2)
            )


def ranked(tokens: npt.NDArray[np.int32], root: int, places: IntArray, cosines: npt.NDArray[np.float32]) -> IntArray:
    """Return [1, newest, most frequent, most alike] is right; zeros unless continuations differ and one is right."""
    following, truth = tokens[places], tokens[root + 1]
    if len(np.unique(following)) == 1 or not np.any(following == truth):
        return np.zeros(4, np.int64)
    distinct, counts = np.unique(following[::-1], return_counts=True)
    guesses = (following[-1], distinct[counts.argmax()], following[len(places) - 1 - cosines[::-1].argmax()])
    return np.array([1, *(guess == truth for guess in guesses)], np.int64)


def summary(found: Findings) -> dict[str, Any]:
    """Return the figures of one layer as data."""
    starts = {f"{family} {length}": _shares(sums) for (family, length), sums in sorted(found.starts.items())}
    for length in COPY_LENGTHS:
        sums = sum((v for (_, n), v in found.starts.items() if n == length), np.zeros(5, np.int64))
        starts[f"pooled {length}"] = _shares(sums)
    names = ("places", "newest", "most_frequent", "most_alike")
    ranking = {match: dict(zip(names, _parts(sums))) for match, sums in sorted(found.ranking.items())}
    micro = 1e6 * np.array([np.median(found.search_seconds or [0]), np.median(found.add_seconds or [0])])
    return {
        "starts": starts,
        "ranking": ranking,
        "by_rank": _table(found.by_rank, [str(rank + 1) for rank in range(NUM_HITS)]),
        "by_cosine": _table(found.by_cosine, [f">={low}" for low in (-1, *COSINE_EDGES)]),
        "search_us_p50": round(float(micro[0]), 1),
        "add_us_p50": round(float(micro[1]), 1),
    }


def _parts(sums: IntArray) -> list[float]:
    return [int(sums[0]), *(round(float(part), 3) for part in sums[1:] / max(int(sums[0]), 1))]


def _shares(sums: IntArray) -> dict[str, float]:
    return dict(zip(("starts", *(f"top_{k}" for k in SHARES)), _parts(sums)))


def _table(cells: dict[tuple[int, int], IntArray], names: list[str]) -> dict[str, dict[str, list[float]]]:
    rows: dict[str, dict[str, list[float]]] = {}
    for (match, column), sums in sorted(cells.items()):
        rows.setdefault(f"match {match}", {})[names[column]] = _parts(sums)
    return rows


def selected(traces: Sequence[Trace], families: Sequence[str], longest: int, count: int) -> list[Trace]:
    """Return the `count` shortest traces of each family that have at most `longest` tokens, in reading order."""
    kept: list[Trace] = []
    for family in families:
        fitting = [t for t in traces if t.family == family and t.prompt_len > 1 and len(t.token_ids) <= longest]
        kept += sorted(fitting, key=lambda trace: len(trace.token_ids))[:count]
    if not kept:
        raise GraftError(f"no trace of {', '.join(families)} with at most {longest} tokens")
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="longgraft.eval.dense", description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--model", required=True, help="folder or hub id; its tokenizer is used too")
    parser.add_argument("--states", required=True, type=Path, help="folder that keeps the hidden states")
    parser.add_argument("--families", default="doc_qa,agent,repo_completion")
    parser.add_argument("--records", type=int, default=8, help="traces of each family, the shortest first")
    parser.add_argument("--longest", type=int, default=12_000, help="tokens of prompt and output together")
    parser.add_argument(
        "--layers", default="", help="counted from 1 (default: at 1/3, 1/2, 2/3 of the depth, the last)"
    )
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument(
        "--gain-layer", type=int, help="layer whose hits are put into trees (default: the last but one)"
    )
    parser.add_argument("--budget", default="16,32,60", help="nodes a round, root not counted")
    options = parser.parse_args(arguments)
    try:
        result = run(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for layer, figures in result["layers"].items():
        print(f"layer {layer}: search {figures['search_us_p50']} us, add {figures['add_us_p50']} us")
        for part in ("starts", "ranking", "by_rank", "by_cosine"):
            for name, row in figures[part].items():
                print(f"  {part:10} {name:24}" + "  ".join(f"{key} {value}" for key, value in row.items()))
    for row in result["gains"]:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(json.dumps(result))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Read, measure and compare as the command line says; raises `GraftError` for what cannot be done."""
    layers = [int(layer) for layer in options.layers.split(",") if layer]
    budgets = [int(budget) for budget in options.budget.split(",")]
    if min(budgets) < 1:
        raise GraftError(f"budget {options.budget}: expected numbers from 1")
    traces = read_traces(options.files, options.model)
    traces = selected(traces, options.families.split(","), options.longest, options.records)
    findings: dict[int, Findings] = defaultdict(Findings)
    roots: list[list[Root]] = []
    for number, thoughts in thoughts_on(traces, options.model, layers, options.states):
        print(
            f"{number + 1}/{len(traces)} {thoughts.trace.family} {len(thoughts.trace.token_ids)} tokens",
            file=sys.stderr,
        )
        for place, layer in enumerate(thoughts.layers):
            measure(thoughts, place, options.dim, findings[layer])
        chosen = options.gain_layer or thoughts.layers[-2:][0]
        if chosen not in thoughts.layers:
            raise GraftError(f"--gain-layer {chosen}: states were kept of layers {thoughts.layers}")
        roots.append(replay_roots(thoughts, thoughts.layers.index(chosen), options.dim, max(budgets)))
    return {
        "traces": len(traces),
        "dim": options.dim,
        "layers": {layer: summary(found) for layer, found in findings.items()},
        "gains": gains(traces, roots, budgets),
    }


if __name__ == "__main__":
    sys.exit(main())
