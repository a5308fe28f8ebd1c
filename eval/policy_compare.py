"""Two result folders side by side: the ratio B / A of each (task, context, way to decode), and whether it is noise.

Cells are matched by prompt (task, context, seed, and the prompt's own digest); a ratio is taken between every repeat of
A and every one of B behind one prompt. **Within noise**: 1 lies between the least and the greatest of several ratios,
or the median is no further from 1 than plain decoding lay from itself in either folder. Knows cells alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.eval.policy_folder import Cell, read_cells
from longgraft.eval.policy_report import Section, written
from longgraft.eval.policy_rows import AGAIN, Row, median, named, noise_of, rate, ratio

MEANING = (
    "decode: tokens/s of B over those of A, reading left out. over plain: the same of the speed-ups over each folder's "
    "own plain decoding, which a busier machine changes less. In brackets the least and the greatest over repeats and "
    "seeds. noise: the greater of how far plain decoding lay from itself in A and in B. verdict: of `over plain`, for "
    "plain decoding itself and for other projects of `decode`."
)


@dataclass(frozen=True, slots=True)
class Side:
    """One folder: its name and its cells by (context, task, seed)."""

    name: str
    prompts: dict[tuple[int, str, int], list[Cell]]


def compare(first: str, second: str) -> str:
    """Return the comparison of two result folders as Markdown; raises `GraftError` where nothing can be compared."""
    a, b = _side(first), _side(second)
    groups: dict[tuple[int, str, str], list[tuple[list[Cell], list[Cell]]]] = {}
    other = []
    for key in [key for key in a.prompts if key in b.prompts]:
        pair = a.prompts[key], b.prompts[key]
        if pair[0][0].get("prompt") != pair[1][0].get("prompt"):
            other.append(f"{key[1]} at {key[0]}, seed {key[2]}")
            continue
        names = [{run["name"] for run in cells[0]["runs"]} for cells in pair]
        for name in [run["name"] for run in pair[0][0]["runs"] if run["name"] in names[1] and run["name"] != AGAIN]:
            groups.setdefault((*key[:2], name), []).append(pair)
    rows = [row for group, pairs in groups.items() if (row := _row(group, pairs))]
    if not rows:
        raise GraftError(f"{first} and {second} have no prompt and way to decode in common")
    parts = [Section("Comparison", f"A: {a.name}\nB: {b.name}"), Section("Ratios", MEANING, rows=rows)]
    if other:
        parts.append(Section("Other prompts in A than in B, left out", "; ".join(other)))
    return written(parts)


def _side(folder: str) -> Side:
    cells = read_cells(Path(folder))
    if not cells:
        raise GraftError(f"{folder}: there are no finished cells; expected a folder that `longgraft bench` wrote")
    prompts: dict[tuple[int, str, int], list[Cell]] = {}
    for cell in cells:
        prompts.setdefault((cell["context"], cell["task"], cell["seed"]), []).append(cell)
    return Side(folder, prompts)


def _row(group: tuple[int, str, str], pairs: Sequence[tuple[list[Cell], list[Cell]]]) -> Row | None:
    context, task, name = group
    decode, over_plain, noises = [], [], []
    for ours, theirs in pairs:
        for one in ours:
            for two in theirs:
                runs = named(one, name), named(two, name)
                decode.append(_over(rate(runs[1], "decode_s"), rate(runs[0], "decode_s")))
                over_plain.append(_over(ratio(two, runs[1], "decode_s"), ratio(one, runs[0], "decode_s")))
        noises.append([noise_of(cells) for cells in (ours, theirs)])
    decode, over_plain = _known(decode), _known(over_plain)
    if not decode:
        return None
    noise = max(_known([median(pair[side] for pair in noises) for side in (0, 1)]), default=math.nan)
    alone = name == "plain" or named(pairs[0][0][0], name)["kind"] == "peer"  # type: ignore[index]
    judged = decode if alone else over_plain
    lengths = [_length([cells for pair in pairs for cells in pair[side]], name) for side in (0, 1)]
    return {
        "context": context, "task": task, "name": name, "prompts": len(pairs),
        "decode B/A": _told(decode), "over plain B/A": "-" if name == "plain" else _told(over_plain),
        "noise": f"{noise:.1%}", "verdict": verdict(judged, noise),
        "length A": lengths[0], "length B": lengths[1], "same tokens": _same(pairs, name),
    }  # fmt: skip


def verdict(ratios: Sequence[float], noise: float) -> str:
    """Return `faster` or `slower` for B, `**within noise**` where the difference may be chance."""
    middle = median(ratios)
    if math.isnan(middle):
        return "-"
    straddles = len(ratios) > 1 and min(ratios) <= 1 <= max(ratios)
    if straddles or math.isnan(noise) or abs(middle - 1) <= noise:
        return "**within noise**"
    return "faster" if middle > 1 else "slower"


def _over(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _told(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    spread = f" [{min(ratios):.2f}-{max(ratios):.2f}]" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}x{spread}"


def _length(cells: Sequence[Cell], name: str) -> str:
    runs: list[dict[str, Any]] = [run for cell in cells if (run := named(cell, name)) and "stats" in run]
    rounds = sum(run["stats"]["rounds"] for run in runs)
    return f"{sum(run['stats']['new_tokens'] for run in runs) / rounds:.2f}" if rounds else "-"


def _same(pairs: Sequence[tuple[list[Cell], list[Cell]]], name: str) -> str:
    texts = [[(named(cells[0], name) or {}).get("token_ids") for cells in pair] for pair in pairs]
    count = sum(one == two for one, two in texts)
    return "yes" if count == len(texts) else f"{count} of {len(texts)}"
