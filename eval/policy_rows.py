"""What the cells of a policy benchmark say, as rows of figures: one for each (task, context, way to decode).

Ratios are taken inside a cell, against the mean of its two plain runs, and then the median over cells, with the least
and the greatest beside it; the noise is how far the second plain run lies from the first. Counts are pooled. What each
figure means is said in `METRICS`, which every report shows. Knows no engine and no looks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from longgraft.eval.policy_folder import Cell
from longgraft.eval.policy_tasks import TASKS

Row = dict[str, Any]
AGAIN = "plain again"
STAGES = ("plan", "verify", "accept", "extend")
# What every figure of a report means, in the words a report shows.
METRICS = {
    "tokens/s": "new tokens over the time of all rounds (decode: the prompt's reading left out); median over cells",
    "speed-up": "decode tokens/s over the mean of the plain runs before and after in the same cell; median over cells, "
    "with the least and the greatest behind it",
    "noise": "how far the second plain run of a cell lies from the first; median over cells",
    "end to end": "the same ratio with reading and indexing the prompt counted in, which drafting cannot shorten",
    "cpu": "the same ratio of processor time",
    "frozen": "the same ratio of what the rounds cost by the frozen table, drafting as measured: free of hiccups",
    "length": "acceptance length: new tokens a target pass, bonus token included, over all rounds (plain is 1)",
    "drafted": "the same over those rounds alone in which anything was proposed",
    "nodes, accepted": "proposed tokens that were verified, and those of them that were committed",
    "same": "the same tokens as plain decoding in every cell, or the first other one",
    "right": "share of cells whose text holds the known answers, of tasks that have them",
}


def rows_of(cells: Sequence[Cell]) -> list[Row]:
    """Return one row for each (task, context, way to decode), tasks and ways in the order they were run."""
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["context"], cell["task"]), []).append(cell)
    rows = []
    order = {task: number for number, task in enumerate(TASKS)}
    for context, task in sorted(groups, key=lambda group: (group[0], order.get(group[1], len(order)))):
        members = groups[context, task]
        names = dict.fromkeys(run["name"] for cell in members for run in cell["runs"] if run["name"] != AGAIN)
        rows += [_row(task, context, name, members) for name in names]
    return rows


def _row(task: str, context: int, name: str, cells: Sequence[Cell]) -> Row:
    runs = [(cell, named(cell, name)) for cell in cells]
    done = [(cell, run) for cell, run in runs if run is not None and "skipped" not in run]
    reasons = [run["skipped"] for _, run in runs if run is not None and "skipped" in run]
    row: Row = {"task": task, "context": context, "name": name, "pairs": len(done)}
    row |= {"kind": "peer" if any(run and run["kind"] == "peer" for _, run in runs) else "policy"}
    row |= {"prompt_tokens": round(statistics.mean(cell["prompt_tokens"] for cell in cells))}
    if reasons:
        row["skipped"] = reasons[0]
    if not done:
        return row
    row |= {
        "new_tokens": sum(len(run["token_ids"]) for _, run in done),
        "tokens_per_s": median(rate(run, "decode_s") for _, run in done),
        **spread("speed_up", [ratio(cell, run, "decode_s") for cell, run in done]),
        **spread("end_to_end", [ratio(cell, run, "end_to_end_s") for cell, run in done]),
        "noise": noise_of([cell for cell, _ in done]),
        "speed_up_cpu": median(ratio(cell, run, "cpu_s") for cell, run in done),
        "same_tokens": all(_first_difference(cell, run) is None for cell, run in done),
        "first_difference": min((d for d in (_first_difference(*one) for one in done) if d is not None), default=None),
    }
    if rights := [run["right"] for _, run in done if "right" in run]:
        row["right"] = sum(rights) / len(rights)
    if row["kind"] == "policy":
        row["speed_up_frozen"] = median(ratio(cell, run, "frozen_s") for cell, run in done)
        row |= pooled([run["stats"] for _, run in done])
    return row


def named(cell: Cell, name: str) -> dict[str, Any] | None:
    """Return the run of a cell by its name."""
    return next((run for run in cell["runs"] if run["name"] == name), None)


def rate(run: dict[str, Any] | None, seconds: str) -> float:
    """Return tokens a second of one kind of time; NaN where there is none."""
    if not run or not run.get(seconds) or run[seconds] <= 0:
        return math.nan
    tokens = len(run["token_ids"])
    return (tokens if seconds == "end_to_end_s" else run.get("timed_tokens", tokens)) / run[seconds] or math.nan


def ratio(cell: Cell, run: Any, seconds: str, against: Sequence[str] = ("plain", AGAIN)) -> float:
    """Return the rate of a run over the mean of others of its cell; NaN where one is not known."""
    base = statistics.mean(rate(named(cell, name), seconds) for name in against)
    return rate(run, seconds) / base if base > 0 else math.nan


def noise_of(cells: Sequence[Cell]) -> float:
    """Return how far the second plain run of a cell lies from the first; median over cells."""
    return median(abs(ratio(cell, named(cell, AGAIN), "decode_s", ("plain",)) - 1) for cell in cells)


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median of the numbers that are known, and the least and the greatest."""
    known = [value for value in values if not math.isnan(value)] or [math.nan]
    return {name: statistics.median(known), f"{name}_low": min(known), f"{name}_high": max(known)}


def median(values: Iterable[float]) -> float:
    """Return the median of the numbers that are known, NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _first_difference(cell: Cell, run: dict[str, Any]) -> int | None:
    """Return the number of the first new token, from 0, that is not plain decoding's; None where all are."""
    plain = named(cell, "plain")
    ours, theirs = run["token_ids"], plain["token_ids"] if plain else []
    for number, (one, other) in enumerate(zip(ours, theirs)):
        if one != other:
            return number
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def pooled(stats: Sequence[dict[str, Any]]) -> Row:
    """Return counts and times summed over the runs of one row."""
    rounds = sum(one["rounds"] for one in stats)
    row: Row = {
        "rounds": rounds,
        "acceptance_length": sum(one["new_tokens"] for one in stats) / rounds if rounds else math.nan,
        "acceptance_length_drafted": _drafted(stats),
        "nodes": sum(one["nodes"] for one in stats),
        "accepted": sum(one["accepted"] for one in stats),
        "draft_passes": sum(one.get("draft_passes", 0) for one in stats),
        "ms_per_round": 1e3 * sum(one["decode_s"] for one in stats) / rounds if rounds else math.nan,
    }
    # Draft passes run while the tree is planned: they are told apart, not counted twice.
    seconds = {name: sum(one["seconds_by_stage"].get(name, 0.0) for one in stats) for name in STAGES}
    draft = min(sum(one.get("draft_s", 0.0) for one in stats), seconds["plan"])
    row["seconds_by_stage"] = {"draft": draft} | seconds | {"plan": seconds["plan"] - draft}
    for kind in ("source", "depth"):
        for what in ("nodes", "accepted"):
            row[f"{what}_by_{kind}"] = added(one[f"{what}_by_{kind}"] for one in stats)
    for what in ("nodes", "accepted"):
        tables = [one.get(f"{what}_by_source_depth") or {} for one in stats]
        sources = dict.fromkeys(source for one in tables for source in one)
        row[f"{what}_by_source_depth"] = {s: added(one.get(s, {}) for one in tables) for s in sources}
    return row


def _drafted(stats: Sequence[dict[str, Any]]) -> float:
    """Return new tokens a round over the rounds in which anything was proposed."""
    new = [
        tokens
        for one in stats
        for (nodes, _), tokens in zip(one.get("accepted_by_round", ()), one.get("new_tokens_by_round", ()))
        if nodes
    ]
    return statistics.mean(new) if new else math.nan


def added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return counts added up by key."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update({str(key): count for key, count in one.items()})
    return dict(total)


def overall(rows: Sequence[Row]) -> dict[str, float]:
    """Return each way's geometric mean speed-up over the (task, context) pairs that it was measured on."""
    names = dict.fromkeys(row["name"] for row in rows)
    return {name: geometric([row.get("speed_up", math.nan) for row in rows if row["name"] == name]) for name in names}


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean of the numbers that are known."""
    known = [math.log(value) for value in values if value > 0]
    return math.exp(statistics.mean(known)) if known else math.nan
