"""How a benchmark looks: report.json, and report.md and report.html with the same tables. Knows no engine.

A report is a list of sections; Markdown and HTML are two ways to write them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.eval.bench import table
from longgraft.eval.policy_folder import Cell, write_whole
from longgraft.eval.policy_rows import METRICS, Row, added, overall, rows_of

# Below this gain or loss a ratio is always told with the noise of plain beside plain.
SMALL = 0.10
ENOUGH_PAIRS = 7


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with a text, a command or a table below it, whichever are not empty."""

    title: str
    text: str = ""
    command: str = ""
    rows: Sequence[Row] = ()


def write_report(
    folder: Path, cells: Sequence[Cell], about: dict[str, Any], command: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write report.json, report.md, report.html and, where matplotlib is, the plots; returns what report.json holds."""
    from longgraft.eval.policy_html import html
    from longgraft.eval.policy_plots import draw

    rows = rows_of(cells)
    about = about | {name: cells[0][name] for name in ("dtype", "device") if cells}
    about |= {"commits": sorted({str(cell["commit"]) for cell in cells if cell.get("commit")})}
    values = {"command": command, "settings": about, "metrics": METRICS, "rows": rows, "overall": overall(rows)}
    write_whole(folder / "report.json", _strict(values))
    parts = sections(rows, about, command)
    plots: list[Path] = []
    try:
        plots = draw(folder, rows, caption(about, command))
    except GraftError as error:
        say(str(error))
        parts.append(Section("Plots", f"No plots: {error}."))
    note = "".join(f"\n![{path.stem}]({path.name})\n" for path in plots)
    (folder / "report.md").write_text(written(parts) + note, encoding="utf-8")
    (folder / "report.html").write_text(html(parts, plots), encoding="utf-8")
    return values


def _strict(values: Any) -> Any:
    """Return values without NaN, which JSON does not know."""
    if isinstance(values, float) and not math.isfinite(values):
        return None
    if isinstance(values, dict):
        return {key: _strict(one) for key, one in values.items()}
    return [_strict(one) for one in values] if isinstance(values, list) else values


def caption(about: dict[str, Any], command: str) -> list[str]:
    """Return what a reader needs to judge a figure: hardware, model, dtype, command."""
    model = about["model"] + (f", drafter {about['draft']}" if about["draft"] else "")
    device = "" if about["device"] in (None, "cpu") else f"{about['device']}, "
    where = f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, longgraft {about['longgraft']}"
    return [f"{model}; {about['dtype']}; greedy, at most {about['new']} new tokens a run", device + where, command]


def markdown(rows: Sequence[Row], about: dict[str, Any], command: str) -> str:
    """Return the report as Markdown, without plots."""
    return written(sections(rows, about, command))


def written(parts: Sequence[Section]) -> str:
    """Return sections as Markdown; the first heading is the title."""
    lines = []
    for number, part in enumerate(parts):
        lines.append(f"{'##' if number else '#'} {part.title}")
        lines += [part.text] if part.text else []
        lines += [f"```\n{part.command}\n```"] if part.command else []
        lines += [table(list(part.rows)).strip("\n")] if part.rows else []
    return "\n\n".join(lines) + "\n"


def sections(rows: Sequence[Row], about: dict[str, Any], command: str) -> list[Section]:
    """Return the report. Below 10 %, or where noise exceeds it, a ratio is told with plain beside plain."""
    model, where, _ = caption(about, command)
    placed = [row for row in rows if row.get("nodes_by_source_depth")]
    parts = [
        Section("Benchmark", f"{model}.\n{where}.", command),
        Section("Speed-up over plain decoding, reading the prompt left out", rows=_speeds(rows)),
        Section("Every run", rows=[_line(row) for row in rows]),
        Section("What the figures mean", rows=[{"figure": name, "meaning": text} for name, text in METRICS.items()]),
        Section("Milliseconds a round by stage", rows=[_stages(row) for row in rows if row.get("rounds")]),
        Section("Nodes by source", rows=list(_rates(rows, "source"))),
        Section("Nodes by depth", rows=list(_rates(rows, "depth"))),
        Section("Accepted share by source and depth", rows=list(_by_source_and_depth(placed))),
        Section("Left out", rows=[_left_out(row) for row in rows if "skipped" in row]),
        Section("Environment", rows=list(_environment(about))),
    ]
    return [part for part in parts if part.text or part.rows]


def _environment(about: dict[str, Any]) -> Iterable[Row]:
    for name, value in (about.get("environment") or {}).items():
        yield {"what": name, "value": value}
    if about.get("commits"):
        yield {"what": "commits of the cells", "value": ", ".join(about["commits"])}


def verdict(row: Row) -> str:
    """Return a speed-up as text; a small one, and one that noise exceeds, with plain beside plain."""
    speed = row.get("speed_up", math.nan)
    if "tokens_per_s" not in row or math.isnan(speed):
        return "-"
    if row["name"] == "plain":
        return f"noise {row['noise']:.1%}"
    text = f"{speed:.2f}x"
    if f"{row['speed_up_low']:.2f}" != f"{row['speed_up_high']:.2f}":
        text += f" [{row['speed_up_low']:.2f}-{row['speed_up_high']:.2f}]"
    exceeds = row["noise"] > abs(speed - 1)
    if abs(speed - 1) >= SMALL and not exceeds:
        return text
    text += f" (noise {row['noise']:.1%}{', exceeds the difference' if exceeds else ''}"
    return f"{text}{f'; {_pairs(row)}' if row['pairs'] < ENOUGH_PAIRS else ''})"


def _pairs(row: Row) -> str:
    return f"{row['pairs']} pair{'s' if row['pairs'] > 1 else ''}"


def _left_out(row: Row) -> Row:
    return {name: row[name] for name in ("context", "task", "name")} | {"why": row["skipped"].replace("|", "\\|")}


def _speeds(rows: Sequence[Row]) -> list[Row]:
    """Return the first table: a line for each (context, task), a column for each way to decode."""
    names = dict.fromkeys(row["name"] for row in rows)
    lines: dict[tuple[int, str], Row] = {}
    for row in rows:
        line = lines.setdefault((row["context"], row["task"]), {"context": row["context"], "task": row["task"]})
        if row["name"] == "plain":
            line |= {"plain tokens/s": f"{row['tokens_per_s']:.2f}"} | {name: "-" for name in names if name != "plain"}
        else:
            line[row["name"]] = verdict(row)
    means = {name: f"{mean:.2f}x" for name, mean in overall(rows).items() if name != "plain"}
    return [*lines.values(), {"context": "all", "task": "geometric mean", "plain tokens/s": ""} | means]


def figure(row: Row, name: str, form: str) -> str:
    """Return one figure of a row as text, `-` where it is not known."""
    value = row.get(name)
    return "-" if value is None or (isinstance(value, float) and math.isnan(value)) else format(value, form)


def _line(row: Row) -> Row:
    difference = row.get("first_difference")
    same = "-" if "same_tokens" not in row else "yes" if row["same_tokens"] else f"no, token {difference}"
    return {
        "context": row["context"],
        "task": row["task"],
        "prompt": row["prompt_tokens"],
        "name": row["name"],
        "new": figure(row, "new_tokens", "d"),
        "tokens/s": figure(row, "tokens_per_s", ".2f"),
        "speed-up": verdict(row),
        "end to end": figure(row, "end_to_end", ".2f"),
        "cpu": figure(row, "speed_up_cpu", ".2f"),
        "frozen": figure(row, "speed_up_frozen", ".2f"),
        "length": figure(row, "acceptance_length", ".2f"),
        "drafted": figure(row, "acceptance_length_drafted", ".2f"),
        "rounds": figure(row, "rounds", "d"),
        "accepted/nodes": f"{row['accepted']}/{row['nodes']}" if "nodes" in row else "-",
        "same": same,
        "right": figure(row, "right", ".0%"),
    }


def _stages(row: Row) -> Row:
    line: Row = {name: row[name] for name in ("context", "task", "name")} | {"all": f"{row['ms_per_round']:.1f}"}
    per_round = {name: 1e3 * seconds / row["rounds"] for name, seconds in row["seconds_by_stage"].items()}
    return line | {name: f"{value:.2f}" for name, value in per_round.items()}


def _share(accepted: int, nodes: int) -> str:
    return f"{accepted}/{nodes} ({accepted / nodes:.0%})" if nodes else "-"


def _rates(rows: Sequence[Row], kind: str) -> Iterable[Row]:
    """Yield, for each policy, accepted/nodes pooled over everything by source or by depth."""
    pooled = _over_rows(rows, f"nodes_by_{kind}"), _over_rows(rows, f"accepted_by_{kind}")
    keys = dict.fromkeys(key for counts in pooled[0].values() for key in counts)
    if kind == "depth":
        keys = dict.fromkeys(sorted(keys, key=int)[:16])
    for name, nodes in pooled[0].items():
        if sum(nodes.values()):
            yield {"name": name} | {key: _share(pooled[1][name].get(key, 0), nodes.get(key, 0)) for key in keys}


def _over_rows(rows: Sequence[Row], field: str) -> dict[str, dict[str, int]]:
    names = dict.fromkeys(row["name"] for row in rows if field in row)
    return {name: added(row[field] for row in rows if row["name"] == name and field in row) for name in names}


def _by_source_and_depth(placed: Sequence[Row]) -> Iterable[Row]:
    depths = sorted({d for row in placed for one in row["nodes_by_source_depth"].values() for d in one}, key=int)
    for name in dict.fromkeys(row["name"] for row in placed):
        mine = [row for row in placed if row["name"] == name]
        for source in dict.fromkeys(s for row in mine for s in row["nodes_by_source_depth"]):
            nodes = added(row["nodes_by_source_depth"].get(source, {}) for row in mine)
            kept = added(row["accepted_by_source_depth"].get(source, {}) for row in mine)
            yield {"name": name, "source": source} | {d: _share(kept.get(d, 0), nodes.get(d, 0)) for d in depths[:12]}


def summary(report: dict[str, Any], out: str) -> str:
    """Return the first table and where the rest lies, for the terminal."""
    return f"{table(_speeds(report['rows']))}\n\n{out}/report.md and report.html"
