"""How a policy benchmark looks: report.json, report.md with its tables, and the plots beside them. Knows no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.eval.bench import table
from longgraft.eval.policy_rows import Cell, Row, added, overall, rows_of
from longgraft.eval.policy_settings import write_whole

# Below this gain or loss a ratio is always told with the noise of plain beside plain.
SMALL = 0.10
ENOUGH_PAIRS = 7


def write_report(
    folder: Path, cells: Sequence[Cell], about: dict[str, Any], command: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write report.json, report.md and, where matplotlib is, the plots; returns what report.json holds."""
    from longgraft.eval.policy_plots import draw

    rows = rows_of(cells)
    about = about | {name: cells[0][name] for name in ("dtype", "device") if cells}
    values = {"command": command, "settings": about, "rows": rows, "overall": overall(rows)}
    write_whole(folder / "report.json", _strict(values))
    try:
        plots = draw(folder, rows, caption(about, command))
        note = "".join(f"\n![{path.stem}]({path.name})\n" for path in plots)
    except GraftError as error:
        say(str(error))
        note = f"\nNo plots: {error}.\n"
    (folder / "report.md").write_text(markdown(rows, about, command) + note, encoding="utf-8")
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
    """Return the report."""
    model, where, _ = caption(about, command)
    parts = [
        "# Policies",
        f"{model}.\n{where}.\n\n```\n{command}\n```",
        "Speed-up: decode tokens/s over the mean of the plain runs before and after, the prompt's reading left out; "
        "median over pairs. A ratio within 10 %, or one that noise exceeds, is told with plain beside plain.",
        "## Speed-up over plain decoding",
        table(_speeds(rows)),
        "## Every run",
        table([_line(row) for row in rows]),
        "`cpu`: the same ratio of processor time. `frozen`: of what the rounds cost by the frozen table, drafting as "
        "measured. `length`: new tokens a target pass. `same`: the same tokens as plain decoding, or the first other.",
        "## Milliseconds a round by stage",
        table([_stages(row) for row in rows if row.get("rounds")]),
        "## Nodes by source",
        table(list(_rates(rows, "source"))),
        "## Nodes by depth",
        table(list(_rates(rows, "depth"))),
    ]
    if any(row.get("nodes_by_source_depth") for row in rows):
        parts += ["## Accepted share by source and depth", table(list(_by_source_and_depth(rows)))]
    if skipped := [row for row in rows if "skipped" in row]:
        parts += ["## Left out", table([_left_out(row) for row in skipped])]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def verdict(row: Row) -> str:
    """Return a speed-up as text; a small one, and one that noise exceeds, with plain beside plain."""
    speed = row.get("speed_up", math.nan)
    if "tokens_per_s" not in row or math.isnan(speed):
        return "-"
    if row["name"] == "plain":
        return f"noise {row['noise']:.1%}"
    text = f"{speed:.2f}x"
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


def _line(row: Row) -> Row:
    def number(name: str, form: str) -> str:
        value = row.get(name)
        return "-" if value is None or (isinstance(value, float) and math.isnan(value)) else format(value, form)

    difference = row.get("first_difference")
    same = "-" if "same_tokens" not in row else "yes" if row["same_tokens"] else f"no, token {difference}"
    return {
        "context": row["context"],
        "task": row["task"],
        "prompt": row["prompt_tokens"],
        "name": row["name"],
        "new": number("new_tokens", "d"),
        "tokens/s": number("tokens_per_s", ".2f"),
        "speed-up": verdict(row),
        "cpu": number("speed_up_cpu", ".2f"),
        "frozen": number("speed_up_frozen", ".2f"),
        "length": number("acceptance_length", ".2f"),
        "rounds": number("rounds", "d"),
        "accepted/nodes": f"{row['accepted']}/{row['nodes']}" if "nodes" in row else "-",
        "same": same,
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


def _by_source_and_depth(rows: Sequence[Row]) -> Iterable[Row]:
    names = dict.fromkeys(row["name"] for row in rows if row.get("nodes_by_source_depth"))
    depths = sorted({d for row in rows for one in row.get("nodes_by_source_depth", {}).values() for d in one}, key=int)
    for name in names:
        mine = [row for row in rows if row["name"] == name and row.get("nodes_by_source_depth")]
        for source in dict.fromkeys(s for row in mine for s in row["nodes_by_source_depth"]):
            nodes = added(row["nodes_by_source_depth"].get(source, {}) for row in mine)
            kept = added(row["accepted_by_source_depth"].get(source, {}) for row in mine)
            yield {"name": name, "source": source} | {d: _share(kept.get(d, 0), nodes.get(d, 0)) for d in depths[:12]}


def summary(report: dict[str, Any], out: str) -> str:
    """Return the first table and where the rest lies, for the terminal."""
    return f"{table(_speeds(report['rows']))}\n\n{out}/report.md"
