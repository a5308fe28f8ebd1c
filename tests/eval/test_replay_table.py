"""Rows and tables of a replay."""

from __future__ import annotations

from longgraft.eval.replay_table import diagram, rows_of, table
from longgraft.eval.tally import Tally


def test_rows_and_table() -> None:
    tallies = {
        "pooled": Tally(3, 12, 30, 9, [1e-6] * 3),
        "edits": Tally(1, 8, 10, 7, [1e-6]),
        "chat": Tally(2, 4, 20, 2, [1e-6] * 2),
    }
    rows = rows_of("pld", 16, tallies) + rows_of("pld", 32, tallies) + rows_of("sam", 16, tallies)
    assert [row["family"] for row in rows[:3]] == ["chat", "edits", "pooled"]
    assert rows[2]["acceptance_length"] == 4.0 and rows[2]["accepted_per_node"] == 0.3
    lines = table(rows).splitlines()
    assert lines[1] == "B = 16" and lines[2].split()[:4] == ["method", "chat", "edits", "pooled"]
    assert lines[3].split() == ["pld", "2.00", "8.00", "4.00", "5.00", "0.300", "1.0", "1.0"]
    assert lines[4].split()[0] == "sam"
    assert lines[6] == "B = 32" and lines[8].split()[0] == "pld" and len(lines) == 9


def test_diagram_marks_what_is_off() -> None:
    row = {"budget": 16, "from": 0.9, "nodes": 2000, "predicted": 0.95, "observed": 0.8, "standard_error": 0.009}
    assert diagram([{**row, "off": True}]).endswith("0.9500 -> 0.8000 +- 0.0090 *")
    assert diagram([{**row, "off": False}]).endswith("+- 0.0090")
