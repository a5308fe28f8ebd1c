"""What the cells of a policy benchmark say, as rows of figures: one for each (task, context, way to decode).

Ratios are taken inside a cell, against the mean of its two plain runs, and then the median over cells; the noise is how
far the second plain run lies from the first. Counts are pooled. Knows no engine and no looks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from longgraft.eval.policy_tasks import TASKS

Cell = dict[str, Any]
Row = dict[str, Any]
AGAIN = "plain again"
STAGES = ("plan", "verify", "accept", "extend")


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
    runs = [(cell, _named(cell, name)) for cell in cells]
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
        "tokens_per_s": median(_rate(run, "decode_s") for _, run in done),
        "speed_up": median(_ratio(cell, run, "decode_s") for cell, run in done),
        "noise": median(abs(_ratio(cell, _named(cell, AGAIN), "decode_s", ("plain",)) - 1) for cell, _ in done),
        "speed_up_cpu": median(_ratio(cell, run, "cpu_s") for cell, run in done),
        "same_tokens": all(_first_difference(cell, run) is None for cell, run in done),
        "first_difference": min((d for d in (_first_difference(*one) for one in done) if d is not None), default=None),
    }
    if row["kind"] == "policy":
        row["speed_up_frozen"] = median(_ratio(cell, run, "frozen_s") for cell, run in done)
        row |= _pooled([run["stats"] for _, run in done])
    return row


def _named(cell: Cell, name: str) -> dict[str, Any] | None:
    return next((run for run in cell["runs"] if run["name"] == name), None)


def _rate(run: dict[str, Any] | None, seconds: str) -> float:
    """Return tokens a second of one kind of time; NaN where there is none."""
    if not run or not run.get(seconds) or run[seconds] <= 0:
        return math.nan
    return int(run.get("timed_tokens", len(run["token_ids"]))) / float(run[seconds]) or math.nan


def _ratio(cell: Cell, run: Any, seconds: str, against: Sequence[str] = ("plain", AGAIN)) -> float:
    base = statistics.mean(_rate(_named(cell, name), seconds) for name in against)
    return _rate(run, seconds) / base if base > 0 else math.nan


def median(values: Iterable[float]) -> float:
    """Return the median of the numbers that are known, NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _first_difference(cell: Cell, run: dict[str, Any]) -> int | None:
    """Return the number of the first new token, from 0, that is not plain decoding's; None where all are."""
    plain = _named(cell, "plain")
    ours, theirs = run["token_ids"], plain["token_ids"] if plain else []
    for number, (one, other) in enumerate(zip(ours, theirs)):
        if one != other:
            return number
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _pooled(stats: Sequence[dict[str, Any]]) -> Row:
    """Return counts and times summed over the runs of one row."""
    rounds = sum(one["rounds"] for one in stats)
    row: Row = {
        "rounds": rounds,
        "acceptance_length": sum(one["new_tokens"] for one in stats) / rounds if rounds else math.nan,
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
