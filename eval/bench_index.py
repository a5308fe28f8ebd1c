"""The index beside other indices: building, memory, and one step of a round; ends with one JSON line.

Knows the faces of the indices, not their insides. Per text and size: build (tokens/s, best of a few), bytes per token,
then a step from Python as a round takes it: extend by one token and draft a 32-node tree (p50, p99 in us). Times are of
the thread's processor (all indices here run on one thread), so that other programs disturb them less.
longgraft: without and with learning from each token. Baselines in the same run: arctic-inference where it is installed
(tree mode, with its limits and without), the dict of n-grams behind prompt lookup (pld), and pysuffixarray's suffix
array, built up to 32K tokens.

    python -m longgraft.eval.bench_index [TRACES...] [--tokenizer M] [--sizes 1024,32768,131072,1048576]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.baseline_draft import Drafter
from longgraft.eval.baseline_peers import Arctic
from longgraft.eval.baselines import open_baseline
from longgraft.eval.bench_texts import HARD, REAL, bytes_of, text_of
from longgraft.eval.replay import IndexDrafter, QuickDrafter, Setting, open_index
from longgraft.eval.traces import open_tokenizer
from longgraft.index.native import native_module
from longgraft.index.rank import Ranking
from longgraft.index.suffix_automaton import SuffixAutomaton
from longgraft.index.weights import Weights

IntArray = npt.NDArray[np.int32]
SIZES = "1024,32768,131072,1048576"
BASELINES = ("arctic-tree", "arctic-max", "pld")
SUFFIX_ARRAY = "pysuffixarray"
SUFFIX_ARRAY_SIZE = 32768  # pure Python: minutes above
BEST_OF = ((1 << 15, 5), (1 << 17, 3))  # builds up to a size; one above


@dataclass(frozen=True, slots=True)
class Line:
    """One index on one text: `tokens` indexed; figures that it does not have are None."""

    text: str
    tokens: int
    method: str
    build_tokens_per_s: float
    bytes_per_token: float | None = None
    nodes_per_step: float | None = None
    step_us_p50: float | None = None
    step_us_p99: float | None = None


class FrozenDrafter(IndexDrafter):
    """longgraft's index that only follows the text: what a token teaches is not taken in."""

    def extend(self, token_ids: IntArray) -> None:
        """Take in committed tokens [n]."""
        self.index.extend(token_ids, learn=False)


def openers(vocab_size: int, baselines: Sequence[str]) -> dict[str, Callable[[], Drafter]]:
    """Return how to open each index that is measured."""
    setting = Setting("longgraft", 0, vocab_size, Weights())
    return {
        "longgraft-quick": lambda: QuickDrafter(SuffixAutomaton(vocab_size, ranking=Ranking(learns=False))),
        "longgraft": lambda: FrozenDrafter(open_index(setting)),
        "longgraft, learning": lambda: IndexDrafter(open_index(setting)),
        **{name: partial(open_baseline, name) for name in baselines},
    }


def installed() -> list[str]:
    """Return the baselines that can be opened here; says once which cannot."""
    found, missing = [], {}
    for name in BASELINES:
        try:
            open_baseline(name)
            found.append(name)
        except GraftError as error:
            missing[str(error)] = True
    for reason in missing:
        print(f"left out: {reason}", file=sys.stderr)
    return found


def bytes_held(drafter: Drafter, tokens: IntArray) -> float | None:
    """Return bytes per token: what a native index says of itself, or what Python allocates for the rest."""
    if isinstance(drafter, IndexDrafter):
        return drafter.index.text.memory_bytes / len(tokens) if drafter.index.text.is_native else None
    if isinstance(drafter, QuickDrafter):
        return drafter.automaton.memory_bytes / len(tokens) if drafter.automaton.is_native else None
    if isinstance(drafter, Arctic):
        held = drafter.memory_bytes
        return None if held is None else held / len(tokens)
    drafter.reset()
    tracemalloc.start()
    drafter.extend(tokens)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / len(tokens)


def time_build(open_it: Callable[[], Drafter], tokens: IntArray) -> tuple[Drafter, float]:
    """Build from nothing; returns the index and the least time in seconds."""
    repeats = next((times for size, times in BEST_OF if len(tokens) <= size), 1)
    least = float("inf")
    for _ in range(repeats):
        drafter = open_it()
        began = time.thread_time()
        drafter.extend(tokens)
        least = min(least, time.thread_time() - began)
    return drafter, least


def time_steps(drafter: Drafter, tokens: IntArray, budget: int) -> tuple[npt.NDArray[np.float64], float]:
    """Take one token after the other and draft; returns times in us [n] and nodes per step."""
    seconds, nodes = [], 0
    for place in range(len(tokens)):
        began = time.thread_time()
        drafter.extend(tokens[place : place + 1])
        found = drafter.draft(budget)
        seconds.append(time.thread_time() - began)
        nodes += 0 if found is None else len(found.token_ids)
    return np.array(seconds) * 1e6, nodes / max(len(tokens), 1)


def time_suffix_array(tokens: IntArray) -> float | None:
    """Return the seconds that pysuffixarray needs for its suffix array; None where it is not installed."""
    try:
        from pysuffixarray.core import SuffixArray
    except ImportError:
        return None
    ranks = np.unique(tokens, return_inverse=True)[1]
    text = "".join(chr(37 + rank) for rank in ranks.tolist())  # 36 is its end mark
    began = time.thread_time()
    SuffixArray(text)
    return time.thread_time() - began


def measure(kind: str, tokens: IntArray, steps: int, budget: int, baselines: Sequence[str]) -> list[Line]:
    """Measure every index on all of `tokens` but the last `steps`, which are then taken one by one."""
    head, tail = tokens[: len(tokens) - steps], tokens[len(tokens) - steps :]
    lines = []
    for method, open_it in openers(int(tokens.max()) + 1, baselines).items():
        drafter, seconds = time_build(open_it, head)
        own = isinstance(drafter, IndexDrafter | Arctic)
        held = bytes_held(drafter, head) if own else None
        times, nodes = time_steps(drafter, tail, budget)
        held = held if own else bytes_held(drafter, head)
        p50, p99 = np.percentile(times, [50, 99])
        rate = len(head) / seconds
        lines.append(Line(kind, len(head), method, rate, held, round(nodes, 1), round(p50, 2), round(p99, 2)))
    if len(head) <= SUFFIX_ARRAY_SIZE:
        took = time_suffix_array(head)
        if took is not None:
            lines.append(Line(kind, len(head), SUFFIX_ARRAY, len(head) / took))
    return lines


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(lines: Sequence[Line]) -> str:
    """Lay lines out for reading."""
    heads = f"{'M tok/s':>8} {'B/token':>8} {'nodes':>6} {'p50 us':>8} {'p99 us':>9}"
    text = [f"{'text':10} {'tokens':>8} {'method':20} {heads}"]
    for line in lines:
        text.append(
            f"{line.text:10} {line.tokens:>8} {line.method:20} {line.build_tokens_per_s / 1e6:>8.3f} "
            f"{_figure(line.bytes_per_token, 0):>8} {_figure(line.nodes_per_step, 1):>6} "
            f"{_figure(line.step_us_p50, 1):>8} {_figure(line.step_us_p99, 1):>9}"
        )
    return "\n".join(text)


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge a figure."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "python": platform.python_version(),
        "native": native_module() is not None,
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longgraft.eval.bench_index", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="*", help="trace files: text before that of the standard library")
    parser.add_argument("--tokenizer", help="folder or hub id (default: UTF-8 bytes)")
    parser.add_argument("--sizes", default=SIZES, help="tokens indexed")
    parser.add_argument("--texts", default=",".join((*REAL, *HARD)), help="kinds of text")
    parser.add_argument("--steps", type=int, default=1000, help="steps timed at each size")
    parser.add_argument("--budget", type=int, default=32, help="nodes of a drafted tree")
    options = parser.parse_args(argv)
    if options.steps < 1 or not 0 < options.budget <= 4096:
        parser.error("--steps: expected 1 or more; --budget: expected 1 to 4096")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in options.sizes.split(",")):
        parser.error("--sizes: expected whole numbers above 0, separated by commas")
    return options


def run(options: argparse.Namespace) -> list[Line]:
    """Measure every text at every size that there is enough of it for."""
    encode = open_tokenizer(options.tokenizer) if options.tokenizer else bytes_of
    sizes = sorted({int(size) for size in options.sizes.split(",")})
    lines: list[Line] = []
    baselines = installed()
    print(table([]), flush=True)
    for kind in dict.fromkeys(name.strip() for name in options.texts.split(",")):
        tokens = text_of(kind, sizes[-1] + options.steps, encode, options.files)
        for size in sizes:
            if len(tokens) < size + options.steps:
                print(f"{kind}: {len(tokens)} tokens of it, {size} left out", file=sys.stderr)
                continue
            more = measure(kind, tokens[: size + options.steps], options.steps, options.budget, baselines)
            print("\n".join(table(more).split("\n")[1:]), flush=True)
            lines += more
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line: 0, 2 (a mistake, in one sentence) or 130 (interrupted)."""
    options = _arguments(argv)
    try:
        lines = run(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(json.dumps({"bench": "index", **machine(), "rows": [asdict(line) for line in lines]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
