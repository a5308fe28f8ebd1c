"""Teacher-forced replay: how much of a known output would the index have proposed?

Needs no model, only a tokenizer. At each step the index sees all tokens so far and drafts a tree; the longest
path that equals the true continuation is accepted and one bonus token is added. Acceptance length = output
tokens / steps (bonus included, root not counted). Prompts are never cut; of an output the first 1,500 tokens
count. Trace files hold one JSON object a line: `prompt`, `output`, `family`, `source` (owner/repository@...).

    python -m longgraft.eval.replay FILES... --tokenizer M --budget 16,32,60
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.context_index import ContextIndex
from longgraft.index.rank import Ranking, load_priors
from longgraft.index.suffix_automaton import MIN_PROBABILITY
from longgraft.tree import Continuation

MAX_OUTPUT = 1500
PROBABILITY_EDGES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Trace:
    """One known output: `token_ids [n]`, of which the first `prompt_len` are the prompt."""

    family: str
    group: str
    token_ids: npt.NDArray[np.int32]
    prompt_len: int


def read_traces(paths: Iterable[str], tokenizer_name: str) -> list[Trace]:
    """Read and tokenise trace files; raises `GraftError` for what cannot be read."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    traces = []
    for path in paths:
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except OSError as error:
            raise GraftError(f"trace file {path}: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                prompt = tokenizer(record["prompt"], add_special_tokens=False, verbose=False)["input_ids"]
                output = tokenizer(record["output"], add_special_tokens=False, verbose=False)["input_ids"]
            except (KeyError, ValueError) as error:
                raise GraftError(f"trace file {path}, line {number}: not a trace ({error})") from None
            group = str(record.get("source", record.get("id", ""))).split("@")[0]
            token_ids = np.array(prompt + output[:MAX_OUTPUT], np.int32)
            traces.append(Trace(str(record.get("family", "all")), group, token_ids, len(prompt)))
    if not traces:
        raise GraftError("no traces: the files are empty")
    return traces


@dataclass
class Tally:
    """Counts of one or more replays. `bins [bins, 3]`: nodes, sum of predicted, accepted, by probability."""

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    accepted: int = 0
    seconds: list[float] = field(default_factory=list)
    bins: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(PROBABILITY_EDGES) + 1, 3)))

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.accepted += other.accepted
        self.seconds += other.seconds
        self.bins += other.bins

    def summary(self) -> dict[str, float]:
        """Return the figures that are reported."""
        p50, p99 = np.percentile(np.array(self.seconds or [0.0]) * 1e6, [50, 99])
        return {
            "acceptance_length": round(self.tokens / max(self.steps, 1), 3),
            "accepted_per_node": round(self.accepted / max(self.nodes, 1), 3),
            "nodes_per_step": round(self.nodes / max(self.steps, 1), 1),
            "draft_us_p50": round(float(p50), 1),
            "draft_us_p99": round(float(p99), 1),
        }


def accepted_path(found: Continuation, truth: Sequence[int]) -> list[int]:
    """Return the nodes along which the tree agrees with what really came."""
    path: list[int] = []
    at = -1
    for node, (token, parent) in enumerate(zip(found.token_ids.tolist(), found.parents.tolist())):
        if parent == at and len(path) < len(truth) and token == truth[len(path)]:
            path.append(node)
            at = node
    return path


def replay(index: ContextIndex, trace: Trace, budget: int) -> Tally:
    """Replay one trace through `index` (reset first)."""
    tally = Tally()
    index.reset()
    index.extend(trace.token_ids[: trace.prompt_len])
    place, end = trace.prompt_len, len(trace.token_ids)
    truth = trace.token_ids.tolist()
    while place < end:
        began = time.perf_counter()
        found = index.draft(budget)
        tally.seconds.append(time.perf_counter() - began)
        path = [] if found is None else accepted_path(found, truth[place : place + budget])
        if found is not None:
            _count_bins(tally.bins, found, path)
            tally.nodes += len(found.token_ids)
        advance = min(len(path) + 1, end - place)
        index.extend(trace.token_ids[place : place + advance], learn=True)
        tally.steps += 1
        tally.tokens += advance
        tally.accepted += len(path)
        place += advance
    return tally


def _count_bins(bins: npt.NDArray[np.float64], found: Continuation, path: list[int]) -> None:
    probabilities = np.exp(found.scores.astype(np.float64))
    which = np.searchsorted(PROBABILITY_EDGES, probabilities, side="right")
    hit = np.zeros(len(which))
    hit[path] = 1.0
    for column, weights in enumerate((None, probabilities, hit)):
        bins[:, column] += np.bincount(which, weights, len(bins))


def calibration(bins: npt.NDArray[np.float64]) -> list[dict[str, float]]:
    """Return, per bin of predicted path probability: nodes, mean predicted and observed acceptance."""
    lows = (0.0, *PROBABILITY_EDGES)
    return [
        {"from": low, "nodes": int(n), "predicted": round(p / n, 4), "observed": round(hit / n, 4)}
        for low, (n, p, hit) in zip(lows, bins.tolist())
        if n
    ]


def replay_all(traces: Sequence[Trace], budget: int, ranking: Ranking, threshold: float) -> dict[str, Tally]:
    """Replay traces one by one; returns a tally per family and one over all, `pooled`."""
    vocab_size = 1 + max(int(trace.token_ids.max()) for trace in traces)
    index = ContextIndex(vocab_size, ranking=ranking, threshold=threshold)
    tallies: dict[str, Tally] = {}
    for trace in traces:
        tally = replay(index, trace, budget)
        tallies.setdefault(trace.family, Tally()).add(tally)
        tallies.setdefault("pooled", Tally()).add(tally)
    return tallies


def report(budget: int, tallies: dict[str, Tally]) -> dict[str, Any]:
    """Print one line a family and return the same as data, with the calibration of all nodes."""
    families = {name: tally.summary() for name, tally in sorted(tallies.items())}
    for name, figures in families.items():
        print(f"B={budget:<4} {name:22}" + "  ".join(f"{key} {value}" for key, value in figures.items()))
    bins = calibration(tallies["pooled"].bins)
    for row in bins:
        print(f"B={budget:<4} p >= {row['from']:<6} {row['nodes']:>9} nodes  {row['predicted']} -> {row['observed']}")
    return {"budget": budget, "families": families, "calibration": bins}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="longgraft.eval.replay", description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", required=True, help="folder or hub id")
    parser.add_argument("--budget", default="16,32,60", help="nodes a step, root not counted")
    parser.add_argument("--threshold", type=float, default=MIN_PROBABILITY, help="least path probability")
    parser.add_argument("--hazards", help="hazard table (default: the packaged one)")
    parser.add_argument("--frozen", action="store_true", help="learn nothing while replaying")
    options = parser.parse_args(arguments)
    try:
        ranking = Ranking(load_priors(options.hazards), learns=not options.frozen)
        traces = read_traces(options.files, options.tokenizer)
        budgets = [int(budget) for budget in options.budget.split(",")]
        results = [report(b, replay_all(traces, b, ranking, options.threshold)) for b in budgets]
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"traces": len(traces), "budgets": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
