"""Plots of a policy benchmark. Owns matplotlib, an optional dependency, and imports it when it draws. Knows only rows.

frontier: what a policy gains a round against what a round costs it; where a line through the origin is steeper, more
tokens come a second. speed_up: bars by task, a panel for each context.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.eval.policy_rows import Row

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#999999", "#F0E442", "#7F3C8D")
MARKERS = "osD^vPX<>h"
SPEED_UPS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


def draw(folder: Path, rows: Sequence[Row], caption: Sequence[str]) -> list[Path]:
    """Write the plots as PNG and return their paths; raises `GraftError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise GraftError("the plots need matplotlib: pip install 'longgraft[bench]' and run the same command") from None
    done = [row for row in rows if row.get("speed_up") and not math.isnan(row["speed_up"])]
    if not done:
        return []
    made = []
    for name, fill in (("frontier", _frontier), ("speed_up", _speed_up)):
        figure = Figure(layout="constrained")
        fill(figure, done)
        figure.supxlabel("\n".join(wrapped for line in caption for wrapped in textwrap.wrap(line, 130)), fontsize=6)
        figure.savefig(folder / f"{name}.png", dpi=150)
        made.append(folder / f"{name}.png")
    return made


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a marker for each way to decode, in the order given."""
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, name in enumerate(names)
    }


def _frontier(figure: Any, rows: Sequence[Row]) -> None:
    """Acceptance length over a round's time in plain rounds, one series a policy, a point for each task and context."""
    plain = {(r["task"], r["context"]): r["ms_per_round"] for r in rows if r["name"] == "plain"}
    mine = [r for r in rows if r["kind"] == "policy" and plain.get((r["task"], r["context"]))]
    figure.set_size_inches(8, 6)
    axes = figure.subplots()
    points: dict[str, list[tuple[float, float]]] = {}
    for row in mine:
        cost = row["ms_per_round"] / plain[row["task"], row["context"]]
        points.setdefault(row["name"], []).append((cost, row["acceptance_length"]))
    for name, look in looks(list(points)).items():
        axes.scatter(*zip(*points[name]), label=name, alpha=0.85, s=28, zorder=3, **look)
    every = [point for series in points.values() for point in series]
    widest, highest = (1.1 * max(point[axis] for point in every) for axis in (0, 1))
    for speed in SPEED_UPS:
        end = min(widest, highest / speed)
        axes.plot([0, end], [0, end * speed], color="#bbbbbb", linewidth=0.7, zorder=1)
        axes.annotate(f"{speed:g}x", (end, end * speed), fontsize=7, color="#777777", ha="right", va="top")
    axes.set(xlabel="time of a round / time of a plain round", ylabel="acceptance length, tokens a round")
    axes.set(xlim=(0, widest), ylim=(0, highest), title="What a round gains and costs; grey: equal speed-up")
    axes.legend(fontsize=8)


def _speed_up(figure: Any, rows: Sequence[Row]) -> None:
    """Bars of the speed-up over plain decoding by task, with the noise of plain beside plain; a panel a context."""
    contexts = sorted({row["context"] for row in rows})
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows if row["name"] != "plain"))
    figure.set_size_inches(9, 1 + 2.6 * len(contexts))
    panels = figure.subplots(len(contexts), 1, squeeze=False, sharex=True)[:, 0]
    width = 0.8 / max(len(names), 1)
    for axes, context in zip(panels, contexts):
        found = {(r["task"], r["name"]): r for r in rows if r["context"] == context}
        for i, (name, look) in enumerate(looks(["plain", *names]).items()):
            shown = [(t, found[task, name]) for t, task in enumerate(tasks) if (task, name) in found and i]
            places = [t - 0.4 + (i - 0.5) * width for t, _ in shown]
            heights = [row["speed_up"] for _, row in shown]
            errors = [0.0 if math.isnan(row["noise"]) else row["noise"] * row["speed_up"] for _, row in shown]
            if shown:
                axes.bar(places, heights, width, yerr=errors, label=name, color=look["color"], ecolor="#555555")
        axes.axhline(1.0, color="#000000", linewidth=0.8)
        axes.set(title=f"{context} prompt tokens", ylabel="speed-up", xticks=range(len(tasks)), xticklabels=tasks)
        if sum(map(len, tasks)) > 80:  # characters that fit side by side
            axes.tick_params(axis="x", labelrotation=30)
    if names:
        panels[0].legend(fontsize=7, ncols=min(len(names), 5))
