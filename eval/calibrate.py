"""Fit the weights that the learnt ranking starts from, on replayed texts.

At each token of an output everything that was listed for its place is recorded with the one that came (or none);
the conditional log-likelihood of these choices is then maximised by Adagrad, in a few passes in shuffled order. A
replay has no logits, so the tables of the successor row are fitted on texts of which a model's likeliest next tokens
were kept (`--observed`, .npz files as `longgraft.eval.dense` writes them). The tables of hints are fitted last, on
texts with a dense store's hints (`--hinted`, .npz files as `longgraft.eval.hints` writes them; none: they stay zero),
while all others are held: without hints the ranking is the same whatever they were fitted on. Cross-validation leaves
whole repositories out.

    python -m longgraft.eval.calibrate FILES... --tokenizer M --out F [--folds 5] [--observed FILES.npz...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.hints import Hinted, load_hints
from longgraft.eval.replay import OURS, Setting, replay_setting, vocab_size_of
from longgraft.eval.replay_table import rows_of, table
from longgraft.eval.tally import Tally, calibration
from longgraft.eval.traces import POOLED, Trace, kinds_of, read_traces
from longgraft.index.features import BASES, NUM_WEIGHTS, TABLES
from longgraft.index.native import native_module
from longgraft.index.suffix_automaton import MIN_PROBABILITY
from longgraft.index.weights import Weights, format_tables, to_tables

FloatArray = npt.NDArray[np.float64]
Records = npt.NDArray[np.int16]
Kinds = npt.NDArray[np.uint8]
PASSES = 4
RATE = 0.1
RIDGE = 1e-6
HINT_TABLES = ("hint", "alike")
HINT_PASSES, HINT_RATE, HINT_RIDGE = 8, 0.05, 1e-3  # few texts: a stronger ridge
SHRINKS = tuple(np.arange(0, 0.26, 0.01))


def _native() -> Any:
    module = native_module()
    if module is None:
        raise GraftError("fitting needs the native index: install a C++ compiler and reinstall longgraft")
    return module


def collect(traces: Sequence[Trace], kinds: Kinds | None) -> list[Records]:
    """Return, per trace, what was listed at each token of its output and which of it came."""
    native, records = _native(), []
    for trace in traces:
        index = native.LearntIndex(np.zeros(NUM_WEIGHTS), kinds, 0.0, 0.0)
        index.extend(trace.token_ids[: trace.prompt_len], False, None, vocab_size_of(traces))
        index.begin(trace.prompt_len)
        records.append(index.record(trace.token_ids[trace.prompt_len :], None))
    return records


def collect_observed(paths: Sequence[str], kinds: Kinds | None) -> list[Records]:
    """Return the same for texts whose likeliest next tokens are known: keys token_ids, prompt_len, top_ids [n, k].

    A token's row is what the model thought follows it the last time it was read, as in generation.
    """
    native, records = _native(), []
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as kept:
                ids, top, start = kept["token_ids"].astype(np.int32), kept["top_ids"], int(kept["prompt_len"])
        except (OSError, KeyError, ValueError) as error:
            raise GraftError(f"observed text {path}: {error}") from None
        vocab = 1 + int(max(ids.max(), top.max()))
        rows = np.full((vocab, top.shape[1]), -1, np.int32)
        index = native.LearntIndex(np.zeros(NUM_WEIGHTS), kinds, 0.0, 0.0)
        index.extend(ids[:start], False, None, vocab)
        index.begin(start)
        for place in range(start, len(ids)):
            records.append(index.record(ids[place : place + 1], rows))
            rows[ids[place - 1]] = top[place - 1]
    return records


def collect_hinted(hinted: Hinted, kinds: Kinds | None) -> Records:
    """Return what was listed at each token of one output with its hints, and which of it came."""
    ids, top, start = hinted.trace.token_ids, hinted.top_ids, hinted.trace.prompt_len
    vocab = 1 + int(max(ids.max(), top.max()))
    rows = np.full((vocab, top.shape[1]), -1, np.int32)
    index = _native().LearntIndex(np.zeros(NUM_WEIGHTS), kinds, 0.0, 0.0)
    index.extend(ids[:start], False, None, vocab)
    index.begin(start)
    records = []
    for place in range(start, len(ids)):
        index.hint(*hinted.at(place))
        records.append(index.record(ids[place : place + 1], rows))
        rows[ids[place - 1]] = top[place - 1]
    return np.concatenate(records)


def fit_hints(weights: FloatArray, records: Sequence[Records]) -> FloatArray:
    """Return weights [NUM_WEIGHTS] with the tables of hints fitted to `records`, all others as they were."""
    held = np.ones(NUM_WEIGHTS, np.uint8)
    for name in HINT_TABLES:
        held[BASES[name] : BASES[name] + TABLES[name]] = 0
    start = np.where(held, weights, 0.0)
    learner = _native().Fit(start, HINT_RATE, HINT_RIDGE)
    learner.hold(held)
    joined = np.concatenate(records)
    for seed in range(HINT_PASSES):
        learner.learn(joined, seed)
    return np.asarray(learner.weights())


def fit(records: Sequence[Records]) -> FloatArray:
    """Return the weights under which what came was likeliest, [NUM_WEIGHTS]."""
    if not records:
        raise GraftError("nothing to fit: no output tokens")
    joined = np.concatenate(records)
    learner = _native().Fit(np.zeros(NUM_WEIGHTS), RATE, RIDGE)
    for seed in range(PASSES):
        learner.learn(joined, seed)
    return np.asarray(learner.weights())


def folds_of(traces: Sequence[Trace], folds: int) -> list[list[int]]:
    """Split the numbers of the traces into folds of whole groups (repositories)."""
    groups = sorted({trace.group for trace in traces})
    fold_of = dict(zip(np.random.default_rng(0).permutation(groups).tolist(), np.arange(len(groups)) % folds))
    return [[i for i, trace in enumerate(traces) if fold_of[trace.group] == fold] for fold in range(folds)]


def held_out(
    traces: Sequence[Trace], records: Sequence[Records], more: Sequence[Records], folds: int
) -> Iterator[tuple[FloatArray, list[Trace]]]:
    """Yield weights fitted without each fold, and that fold."""
    for fold in folds_of(traces, folds):
        left_out = set(fold)
        rest = [record for i, record in enumerate(records) if i not in left_out]
        yield fit([*rest, *more]), [traces[i] for i in fold]


def cross_validate(
    parts: Sequence[tuple[FloatArray, list[Trace]]], kinds: Kinds | None, budget: int, shrink: float
) -> dict[str, Tally]:
    """Replay each fold with the weights fitted without it; returns a tally per family and the pooled one."""
    total: dict[str, Tally] = {}
    for weights, traces in parts:
        start = Weights(weights, shrink=shrink)
        setting = Setting(OURS, budget, vocab_size_of(traces), start, MIN_PROBABILITY, kinds)
        for family, tally in replay_setting(setting, traces).items():
            total.setdefault(family, Tally()).add(tally)
    return total


def best_shrink(tally: Tally) -> float:
    """Return the shrink (see `Weights`) under which the path probabilities of a tally come closest to what came.

    Expects a replay without shrink; squared error over its bins, weighted by their nodes.
    """
    rows = [row for row in calibration(tally.bins) if row["nodes"] >= 100]
    p, seen, nodes = (np.array([row[key] for row in rows]) for key in ("predicted", "observed", "nodes"))
    errors = [float((np.minimum(nodes, 1e4) * (p * (1 - 4 * s * p * (1 - p)) - seen) ** 2).sum()) for s in SHRINKS]
    return float(SHRINKS[int(np.argmin(errors))])


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longgraft.eval.calibrate", description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", required=True, help="folder or hub id")
    parser.add_argument("--out", required=True, help="weights to write (JSON)")
    parser.add_argument("--observed", nargs="*", default=[], help="texts with a model's likeliest next tokens (.npz)")
    parser.add_argument("--hinted", nargs="*", default=[], help="texts with hints of a dense store (.npz)")
    parser.add_argument("--folds", type=int, default=0, help="also cross-validate over repositories")
    parser.add_argument("--budget", default="16,32,60", help="nodes a step of the cross-validation")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Fit, write, and return what was measured."""
    traces = read_traces(options.files, options.tokenizer)
    kinds = kinds_of(options.tokenizer, 1 << 20)
    records, more = collect(traces, kinds), collect_observed(options.observed, kinds)
    weights = fit([*records, *more])
    if options.hinted:
        weights = fit_hints(weights, [collect_hinted(load_hints(Path(path)), kinds) for path in options.hinted])
    Path(options.out).write_text(format_tables(to_tables(weights)), "utf-8")
    result: dict[str, Any] = {"traces": len(traces), "observed": len(options.observed), "rows": []}
    if options.folds > 1:
        parts = [(weights, part) for weights, part in held_out(traces, records, more, options.folds) if part]
        bare = cross_validate(parts, kinds, 32, 0.0)[POOLED]
        shrink = result["shrink"] = best_shrink(bare)
        for budget in map(int, options.budget.split(",")):
            tallies = cross_validate(parts, kinds, budget, shrink)
            result["rows"] += rows_of(OURS, budget, tallies)
            result[f"calibration_{budget}"] = calibration(tallies[POOLED].bins)
        print(table(result["rows"]))
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    try:
        result = run(_arguments(arguments))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
