"""Fit the hazards that the quick ranking starts from, on replayed texts.

Each token of an output is one trial for every entry listed before it came. Trials and hits per cell are all
that is needed; match cells are then fitted additively in log-odds (a few hundred numbers instead of some
thousand cells, many of them rare), by Newton's method on a ridge-penalised binomial likelihood. Successor cells
need logits, which a replay does not have: cells without trials keep the value of `--base`.

    python -m longgraft.eval.calibrate_hazards FILES... --tokenizer M --out F [--folds 5]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.replay import QuickDrafter, replay
from longgraft.eval.tally import Tally
from longgraft.eval.traces import Trace, read_traces
from longgraft.index import rank
from longgraft.index.suffix_automaton import SuffixAutomaton

FloatArray = npt.NDArray[np.float64]
RIDGE = 1.0
MAX_ROUNDS = 50
# A rare cell of the successor row or of recent tokens leans on its old value with this many trials.
OLD_TRIALS = 20.0


def collect(traces: Iterable[Trace]) -> tuple[FloatArray, FloatArray]:
    """Return trials and hits per cell over the outputs of `traces`. [NUM_CELLS] each"""
    trials, hits = np.zeros(rank.NUM_CELLS), np.zeros(rank.NUM_CELLS)
    counting = rank.Ranking(np.full(rank.NUM_CELLS, 0.5), prior_weight=1.0, decay=1.0)
    automaton = SuffixAutomaton(ranking=counting)
    for trace in traces:
        automaton.reset()
        automaton.extend(trace.token_ids[: trace.prompt_len])
        automaton.extend(trace.token_ids[trace.prompt_len :], learn=True)
        more_trials, more_hits = automaton.learnt()
        trials += more_trials
        hits += more_hits
    return trials, hits


def design() -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return which weights each match cell adds up, [cells, 1 + terms], and where each term's weights begin."""
    cells = np.arange(rank.NUM_MATCH_CELLS)
    grid = np.unravel_index(cells, rank.MATCH_SHAPE)
    columns, starts = [np.zeros_like(cells)], [1]
    for axes in rank.MATCH_TERMS:
        shape = tuple(rank.MATCH_SHAPE[axis] for axis in axes)
        columns.append(starts[-1] + np.ravel_multi_index(tuple(grid[axis] for axis in axes), shape))
        starts.append(starts[-1] + int(np.prod(shape)))
    return np.stack(columns, 1), starts


def fit_log_odds(features: FloatArray, trials: FloatArray, hits: FloatArray) -> FloatArray:
    """Maximise the penalised binomial likelihood; the first weight is the bias and is not penalised."""
    weights = np.zeros(features.shape[1])
    ridge = np.full(len(weights), RIDGE)
    ridge[0] = 1e-6
    for _ in range(MAX_ROUNDS):
        p = 1.0 / (1.0 + np.exp(-features @ weights))
        slope = features.T @ (hits - trials * p) - ridge * weights
        curve = (features * (trials * p * (1.0 - p))[:, None]).T @ features + np.diag(ridge)
        step = np.linalg.solve(curve, slope)
        weights += step
        if float(np.abs(step).max()) < 1e-6:
            return weights
    raise GraftError(f"hazards did not converge in {MAX_ROUNDS} rounds: too few or too uniform traces")


def fit(trials: FloatArray, hits: FloatArray, base: dict[str, Any]) -> dict[str, Any]:
    """Return the hazard table fitted to these counts; `base`: the table to lean on where there are none."""
    columns, starts = design()
    seen = np.flatnonzero(trials[: rank.NUM_MATCH_CELLS] > 0)
    features = np.zeros((len(seen), starts[-1]))
    features[np.arange(len(seen))[:, None], columns[seen]] = 1.0
    weights = fit_log_odds(features, trials[seen], hits[seen])
    match = {
        "x".join(map(str, axes)): np.round(weights[begin:end], 3).tolist()
        for axes, begin, end in zip(rank.MATCH_TERMS, starts, starts[1:])
    }
    tail = slice(rank.SUCCESSOR_BASE, rank.NUM_CELLS)
    old = rank.priors_from(base)[tail]
    rest = np.round((hits[tail] + OLD_TRIALS * old) / (trials[tail] + OLD_TRIALS), 5)
    split = rank.RECENT_BASE - rank.SUCCESSOR_BASE
    successor = rest[:split].reshape(rank.MAX_SUCCESSORS, rank.NUM_CONTEXTS).tolist()
    return {
        "bias": round(float(weights[0]), 3),
        "match": match,
        "successor": successor,
        "recent": rest[split:].tolist(),
    }


def log_loss(priors: FloatArray, trials: FloatArray, hits: FloatArray) -> float:
    """Return the total negative log-likelihood of these counts under frozen hazards, in nats."""
    return float(-(hits * np.log(priors) + (trials - hits) * np.log1p(-priors)).sum())


def cross_validate(traces: Sequence[Trace], base: dict[str, Any], folds: int, budget: int) -> dict[str, float]:
    """Fit without and replay on each fold of whole groups (repositories); returns the pooled figures."""
    groups = sorted({trace.group for trace in traces})
    fold_of = dict(zip(np.random.default_rng(0).permutation(groups).tolist(), np.arange(len(groups)) % folds))
    parts = [[trace for trace in traces if fold_of[trace.group] == fold] for fold in range(folds)]
    counts = [collect(part) for part in parts]
    total, loss, tokens = Tally(), 0.0, 0
    for fold, part in enumerate(parts):
        rest = [counts[other] for other in range(folds) if other != fold]
        table = fit(sum(t for t, _ in rest), sum(h for _, h in rest), base)  # type: ignore[arg-type]
        priors = rank.priors_from(table)
        loss += log_loss(priors, *counts[fold])
        drafter = QuickDrafter(SuffixAutomaton(ranking=rank.Ranking(priors)))
        for trace in part:
            total.add(replay(drafter, trace, budget))
    tokens = total.tokens
    return {"budget": budget, "nats_per_token": round(loss / max(tokens, 1), 4), **total.summary()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="longgraft.eval.calibrate_hazards", description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", required=True, help="folder or hub id")
    parser.add_argument("--out", required=True, help="hazard table to write (JSON)")
    parser.add_argument("--base", help="hazard table to lean on (default: the packaged one)")
    parser.add_argument("--folds", type=int, default=0, help="also cross-validate over repositories")
    parser.add_argument("--budget", type=int, default=16, help="nodes a step of the cross-validation")
    options = parser.parse_args(arguments)
    try:
        base = rank.read_table(options.base)
        traces = read_traces(options.files, options.tokenizer)
        trials, hits = collect(traces)
        table = fit(trials, hits, base)
        result: dict[str, Any] = {"traces": len(traces), "trials": int(trials.sum())}
        if options.folds > 1:
            result["cross_validated"] = cross_validate(traces, base, options.folds, options.budget)
        Path(options.out).write_text(rank.format_table(table), "utf-8")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
