"""What hints of a dense store add to accepted tokens beside the learnt ranking, with all else equal.

Knows replay and kept hints (`hints.py`), not the engine. Each text is replayed in the rounds of the index without
hints; at every root the trees with and without hints are compared with what came. The tables of hints are fitted on
all other documents (texts that begin alike are one), so nothing is judged by what it was fitted on. Intervals are
bootstraps over roots, and over documents, of which there are few. `strangers`: hints of a root half the text away,
which must gain nothing.

    python -m longgraft.eval.hint_gain HINTS.npz... --tokenizer M
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.calibrate import collect_hinted, fit_hints
from longgraft.eval.dense_gain import documents, interval
from longgraft.eval.hints import Hinted, load_hints
from longgraft.eval.tally import accepted_path
from longgraft.eval.traces import POOLED, kinds_of
from longgraft.index.learnt_index import LearntIndex
from longgraft.index.successor_table import SuccessorTable
from longgraft.index.weights import Weights

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ARMS = ("plain", "hints", "strangers")
ROUND_BUDGET = 32  # of the rounds that decide where roots are
SAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Setting:
    """How texts are replayed: weights to start from, kinds of token text, nodes a round."""

    weights: Weights
    kinds: npt.NDArray[np.uint8] | None
    budgets: tuple[int, ...]


def replay_hinted(
    hinted: Hinted, setting: Setting, arm: str, roots: Sequence[int] | None = None
) -> dict[int, IntArray]:
    """Return, for the place after each root, accepted tokens [budgets]; `roots`: those places, else own rounds'."""
    trace, top_ids = hinted.trace, hinted.top_ids
    tokens, place, end = trace.token_ids, trace.prompt_len, len(trace.token_ids)
    vocab_size = 1 + int(max(tokens.max(), top_ids.max()))
    index = LearntIndex(vocab_size, weights=setting.weights, token_kinds=setting.kinds)
    table = SuccessorTable(vocab_size, top_ids.shape[1])
    index.extend(tokens[:place])
    index.begin(place)
    accepted: dict[int, IntArray] = {}
    stops = None if roots is None else [*roots[1:], end]
    while place < end:
        if arm != "plain":
            index.hint(*_hints(hinted, place, arm))
        found = [_accepted(index, table, budget, tokens[place:]) for budget in setting.budgets]
        accepted[place] = np.array(found)
        step = stops[len(accepted) - 1] - place if stops else min(found[0] + 1, end - place)
        index.extend(tokens[place : place + step], True, table.rows)
        table.extend(tokens[place - 1 : place + step - 1], top_ids[place - 1 : place + step - 1])
        place += step
    return accepted


def _hints(hinted: Hinted, place: int, arm: str) -> tuple[npt.NDArray[np.int32], FloatArray]:
    if arm == "strangers":
        start, count = hinted.trace.prompt_len, len(hinted.places)
        other = start + (place - start + count // 2) % count
        places, cosines = hinted.at(other)
        return places[places < place], cosines[places < place]
    return hinted.at(place)


def _accepted(index: LearntIndex, table: SuccessorTable, budget: int, truth: npt.NDArray[np.int32]) -> int:
    nodes = index.draft(budget, successors=table.rows)
    return len(accepted_path(nodes.token_ids.tolist(), nodes.parents.tolist(), truth[:budget].tolist()))


def compare(texts: Sequence[Hinted], starts: Sequence[Weights], setting: Setting) -> dict[str, list[IntArray]]:
    """Return, per arm and text, accepted tokens [roots, budgets]. `starts`: weights of each text but for hints."""
    document = documents([text.trace for text in texts])
    records = [collect_hinted(text, setting.kinds) for text in texts]
    result: dict[str, list[IntArray]] = {arm: [] for arm in ARMS}
    for number, (text, start) in enumerate(zip(texts, starts)):
        others = [record for record, d in zip(records, document) if d != document[number]]
        fitted = Weights(fit_hints(start.values, others), start.rate, start.shrink)
        roots = list(replay_hinted(text, Setting(fitted, setting.kinds, (ROUND_BUDGET,)), "plain"))
        for arm in ARMS:
            found = replay_hinted(text, Setting(fitted, setting.kinds, setting.budgets), arm, roots)
            result[arm].append(np.stack(list(found.values())))
    return result


def interval_over(parts: Sequence[IntArray], names: Sequence[int]) -> list[float]:
    """Return mean and 95 % bootstrap interval of values [roots] of several texts, drawn by whole documents `names`."""
    whole = [np.concatenate([p for p, n in zip(parts, names) if n == name]) for name in sorted(set(names))]
    sums, counts = np.array([part.sum() for part in whole]), np.array([len(part) for part in whole])
    picks = np.random.default_rng(0).integers(0, len(whole), (SAMPLES, len(whole)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    return [round(float(x), 3) for x in (sums.sum() / counts.sum(), *np.percentile(means, [2.5, 97.5]))]


def rows_of(
    texts: Sequence[Hinted], accepted: dict[str, list[IntArray]], budgets: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each family (and pooled) and budget: acceptance length without hints, gains with intervals."""
    document = documents([text.trace for text in texts])
    rows = []
    for family in [*sorted({text.trace.family for text in texts}), POOLED]:
        chosen = [i for i, text in enumerate(texts) if family in (text.trace.family, POOLED)]
        for column, budget in enumerate(budgets):
            plain = [accepted["plain"][i][:, column] for i in chosen]
            row: dict[str, Any] = {"family": family, "budget": budget, "roots": sum(map(len, plain))}
            row["plain"] = round(1 + float(np.concatenate(plain).mean()), 3)
            for arm in ARMS[1:]:
                gains = [accepted[arm][i][:, column] - before for i, before in zip(chosen, plain)]
                row[arm] = interval(np.concatenate(gains))
                row[f"{arm}_by_document"] = interval_over(gains, [document[i] for i in chosen])
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="longgraft.eval.hint_gain", description=__doc__)
    parser.add_argument("files", nargs="+", help="hints as longgraft.eval.hints writes them (.npz)")
    parser.add_argument("--tokenizer", required=True, help="folder or hub id")
    parser.add_argument("--budget", default="16,32,60", help="nodes a round")
    options = parser.parse_args(arguments)
    try:
        budgets = tuple(map(int, options.budget.split(",")))
        texts = [load_hints(Path(path)) for path in options.files]
        if len(set(documents([text.trace for text in texts]))) < 2:
            raise GraftError("hints of one document: there is nothing else to fit on")
        setting = Setting(Weights(), kinds_of(options.tokenizer, 1 << 20), budgets)
        accepted = compare(texts, [setting.weights] * len(texts), setting)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows_of(texts, accepted, budgets):
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
