"""Teacher-forced replay: how much of a known output would a drafter have proposed, per verified node, how fast?

Needs no model, only a tokenizer. At each step the drafter knows all tokens so far and drafts a tree; the longest
path that equals the true continuation is accepted and one bonus token is added. Acceptance length = output tokens /
steps over all steps (bonus included, root not counted). Drafting time of a step = `extend` by the tokens of the step
before + `draft`; reading the prompt is not in it. It is time of the thread's processor, which other programs on the
machine disturb less than the clock on the wall. Every request starts from nothing. Baselines: `baselines.py`.

    python -m longgraft.eval.replay FILES... --tokenizer M --budget 16,32,60 --methods longgraft,arctic,pld,sam
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.baseline_draft import Draft, Drafter, lists_of
from longgraft.eval.baselines import BASELINES, open_baseline
from longgraft.eval.replay_table import diagram, rows_of, table
from longgraft.eval.tally import Tally, accepted_path, calibration
from longgraft.eval.traces import POOLED, Trace, kinds_of, read_traces
from longgraft.index.context_index import ContextIndex
from longgraft.index.suffix_automaton import MIN_PROBABILITY, SuffixAutomaton
from longgraft.index.weights import Weights, load_weights
from longgraft.tree import Continuation

OURS = "longgraft"
QUICK = "longgraft-quick"  # the quick ranking, by hazards of the automaton's states
MOST_NODES = 4096  # far above any forward that pays; keeps a mistyped budget from reserving all memory


@dataclass(frozen=True, slots=True)
class Setting:
    """What is replayed: a method, nodes a step, and how longgraft's own index is opened."""

    method: str
    budget: int
    vocab_size: int
    weights: Weights
    threshold: float = MIN_PROBABILITY
    token_kinds: npt.NDArray[np.uint8] | None = None


def open_index(setting: Setting) -> ContextIndex:
    """Open longgraft's index: the one place that knows its options."""
    return ContextIndex(
        setting.vocab_size, weights=setting.weights, threshold=setting.threshold, token_kinds=setting.token_kinds
    )


class IndexDrafter:
    """longgraft's index as a drafter: what comes after the first `extend` (the prompt) is also learnt from."""

    def __init__(self, index: ContextIndex) -> None:
        self.index = index
        self.learns = False

    def reset(self) -> None:
        """Forget the text and what was learnt."""
        self.index.reset()
        self.learns = False

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]."""
        self.index.extend(token_ids, learn=self.learns)
        self.learns = True

    def draft(self, budget: int) -> Continuation | None:
        """Propose a tree whose scores are log-probabilities."""
        return self.index.draft(budget)


class QuickDrafter:
    """The suffix automaton's quick ranking as a drafter."""

    def __init__(self, automaton: SuffixAutomaton, threshold: float = MIN_PROBABILITY) -> None:
        self.automaton = automaton
        self.threshold = threshold
        self.learns = False

    def reset(self) -> None:
        """Forget the text and what was learnt."""
        self.automaton.reset()
        self.learns = False

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]."""
        self.automaton.extend(token_ids, learn=self.learns)
        self.learns = True

    def draft(self, budget: int) -> Draft:
        """Propose a tree."""
        nodes = self.automaton.draft(budget, threshold=self.threshold)
        return Draft(nodes.token_ids.tolist(), nodes.parents.tolist())


def open_drafter(setting: Setting) -> Drafter:
    """Open the drafter of a setting; `GraftError` for an unknown method or a missing package."""
    if setting.method == OURS:
        return IndexDrafter(open_index(setting))
    if setting.method == QUICK:
        return QuickDrafter(SuffixAutomaton(setting.vocab_size), setting.threshold)
    return open_baseline(setting.method)


def replay(drafter: Drafter, trace: Trace, budget: int) -> Tally:
    """Replay one trace through `drafter` (reset first)."""
    tally = Tally()
    drafter.reset()
    drafter.extend(trace.token_ids[: trace.prompt_len])
    place, end = trace.prompt_len, len(trace.token_ids)
    truth = trace.token_ids.tolist()
    committed = trace.token_ids[:0]
    while place < end:
        began = time.thread_time()
        if len(committed):
            drafter.extend(committed)
        found = drafter.draft(budget) if budget else None
        tally.seconds.append(time.thread_time() - began)
        token_ids, parents = lists_of(found)
        if len(token_ids) > budget:
            raise GraftError(f"{type(drafter).__name__} drafted {len(token_ids)} nodes: expected {budget} at most")
        path = accepted_path(token_ids, parents, truth[place : place + budget])
        tally.nodes += len(token_ids)
        if isinstance(found, Continuation):
            tally.count_bins(found.scores, path)
        advance = min(len(path) + 1, end - place)
        committed = trace.token_ids[place : place + advance]
        tally.steps += 1
        tally.tokens += advance
        tally.accepted += len(path)
        place += advance
    return tally


def replay_setting(setting: Setting, traces: Sequence[Trace]) -> dict[str, Tally]:
    """Replay traces one by one; returns a tally per family and one over all, `pooled`.

    Collection of cyclic garbage waits meanwhile, as in `timeit`: nothing here makes any.
    """
    drafter = open_drafter(setting)
    tallies: dict[str, Tally] = {}
    collects = gc.isenabled()
    gc.disable()
    try:
        for trace in traces:
            tally = replay(drafter, trace, setting.budget)
            tallies.setdefault(trace.family, Tally()).add(tally)
            tallies.setdefault(POOLED, Tally()).add(tally)
    finally:
        if collects:
            gc.enable()
    return tallies


def vocab_size_of(traces: Sequence[Trace]) -> int:
    """Return the smallest vocabulary that holds all tokens."""
    return 1 + max(int(trace.token_ids.max()) for trace in traces)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers


def _replay_part(part: tuple[Setting, Sequence[Trace]]) -> dict[str, Tally]:
    return replay_setting(*part)


def replay_settings(
    settings: Sequence[Setting], traces: Sequence[Trace], jobs: int
) -> Iterator[tuple[Setting, dict[str, Tally]]]:
    """Replay every setting, on `jobs` cores at most; yields them in order as they are done."""
    jobs = min(jobs, os.cpu_count() or 1, len(traces))
    if jobs <= 1:
        for setting in settings:
            yield setting, replay_setting(setting, traces)
        return
    by_size = sorted(traces, key=lambda trace: -len(trace.token_ids))
    slices = [by_size[first::jobs] for first in range(jobs)]
    parts = [(setting, part) for setting in settings for part in slices]
    with multiprocessing.get_context("spawn").Pool(jobs, _ignore_interrupts) as pool:
        results = pool.imap(_replay_part, parts)
        for setting in settings:
            tallies: dict[str, Tally] = {}
            for _ in slices:
                for family, tally in next(results).items():
                    tallies.setdefault(family, Tally()).add(tally)
            yield setting, tallies


def _budgets(text: str) -> list[int]:
    budgets = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if not all(0 <= budget <= MOST_NODES for budget in budgets):
        raise GraftError(f"budget {text!r}: expected whole numbers from 0 to {MOST_NODES}, separated by commas")
    return list(dict.fromkeys(budgets))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longgraft.eval.replay", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", help="JSON lines: prompt, output, family, source")
    parser.add_argument("--tokenizer", required=True, help="folder or hub id")
    parser.add_argument("--budget", default="16,32,60", help="nodes a step, root not counted")
    parser.add_argument("--methods", default=OURS, help=f"of {OURS}, {QUICK}, {', '.join(BASELINES)}")
    parser.add_argument("--jobs", type=int, default=1, help="cores to use; more disturb the times")
    parser.add_argument("--threshold", type=float, default=MIN_PROBABILITY, help="least path probability")
    parser.add_argument("--weights", help="weights of the ranking (default: the packaged ones)")
    parser.add_argument("--frozen", action="store_true", help="learn nothing while replaying")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs: expected 1 or more")
    return options


def _settings(options: argparse.Namespace, weights: Weights, traces: Sequence[Trace]) -> list[Setting]:
    vocab_size = vocab_size_of(traces) if traces else 1
    kinds = kinds_of(options.tokenizer, vocab_size) if traces else None
    methods = list(dict.fromkeys(name.strip() for name in options.methods.split(",")))
    return [
        Setting(method, budget, vocab_size, weights, options.threshold, kinds)
        for method in methods
        for budget in _budgets(options.budget)
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Replay what the command line asks for, print the tables, and return the figures."""
    weights = Weights(load_weights(options.weights), **({"rate": 0.0} if options.frozen else {}))
    for setting in _settings(options, weights, []):
        open_drafter(setting).draft(1)  # a wrong name, package or threshold shows before anything is read
    traces = read_traces(options.files, options.tokenizer)
    settings = _settings(options, weights, traces)
    rows: list[dict[str, Any]] = []
    reliability: list[dict[str, Any]] = []
    for setting, tallies in replay_settings(settings, traces, options.jobs):
        rows += rows_of(setting.method, setting.budget, tallies)
        reliability += [{"budget": setting.budget, **row} for row in calibration(tallies[POOLED].bins)]
        print(f"{setting.method}, {setting.budget} nodes: done", file=sys.stderr)
    print(table(rows))
    if reliability:
        print(diagram(reliability))
    return {
        "traces": len(traces),
        "prompt_tokens": sum(trace.prompt_len for trace in traces),
        "output_tokens": sum(len(trace.token_ids) - trace.prompt_len for trace in traces),
        "rows": rows,
        "calibration": reliability,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line: 0, 2 (a mistake, in one sentence) or 130 (interrupted)."""
    options = _options(arguments)
    try:
        result = run(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
