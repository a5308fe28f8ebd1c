"""Two result folders: ratios by prompt, noise marked, other prompts left out."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.eval.policy_compare import compare, verdict
from tests.eval.test_policy_rows import cell, run
from tests.saved_model import invoke


def folder(path: Path, *cells: dict[str, Any]) -> str:
    path.mkdir()
    (path / "cells.jsonl").write_text("".join(json.dumps({"prompt": "p", **one}) + "\n" for one in cells))
    return str(path)


def line(text: str, name: str) -> list[str]:
    found = next(line for line in text.splitlines() if f"| {name} |" in line)
    return [part.strip() for part in found.strip("|").split("|")]


def test_a_ratio_within_noise_is_marked(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", cell(1.0, 2.0, 2.2))
    b = folder(tmp_path / "b", cell(0.97, 2.0, 2.0))
    found = line(compare(a, b), "adaptive")
    assert found[:4] == ["64", "chat", "adaptive", "1"] and found[4] == "1.03x" and found[6] == "9.1%"
    assert found[7] == "**within noise**" and found[-1] == "yes"


def test_a_ratio_beyond_noise_is_told(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", cell(1.0, 2.0, 2.02), {**cell(1.0, 2.0, 2.02), "repeat": 1})
    b = folder(tmp_path / "b", cell(0.5, 2.0, 2.0), {**cell(0.4, 2.0, 2.0), "repeat": 1})
    found = line(compare(a, b), "adaptive")
    assert found[4] == "2.25x [2.00-2.50]" and found[7] == "faster"
    plain = line(compare(a, b), "plain")
    assert plain[5] == "-" and plain[4].startswith("1.00x") and plain[7] == "**within noise**"
    assert line(compare(b, a), "adaptive")[7] == "slower"


def test_a_busier_machine_is_no_slower_method(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", cell(1.0, 2.0, 2.0))
    b = folder(tmp_path / "b", cell(2.0, 4.0, 4.0))
    found = line(compare(a, b), "adaptive")
    assert found[4] == "0.50x" and found[5] == "1.00x" and found[7] == "**within noise**"
    assert line(compare(a, b), "plain")[7] == "slower"


def test_other_prompts_and_other_ways_are_left_out(tmp_path: Path) -> None:
    more = cell()
    more["runs"].insert(1, run("retrieval", 1.0))
    a = folder(tmp_path / "a", more, {**cell(), "seed": 1})
    b = folder(tmp_path / "b", {**cell(), "prompt": "p"}, {**cell(), "seed": 1, "prompt": "other"})
    text = compare(a, b)
    assert "retrieval" not in text and "chat at 64, seed 1" in text and line(text, "adaptive")[3] == "1"
    c = folder(tmp_path / "c", {**cell(), "task": "quote"})
    with pytest.raises(GraftError, match="have no prompt and way to decode in common"):
        compare(a, c)
    with pytest.raises(GraftError, match="there are no finished cells"):
        compare(a, str(tmp_path / "none"))


def test_verdicts() -> None:
    assert verdict([], 0.0) == "-" and verdict([1.5], math.nan) == "**within noise**"
    assert verdict([0.9, 1.3], 0.0) == "**within noise**" and verdict([1.1, 1.3], 0.05) == "faster"
    assert verdict([0.8], 0.1) == "slower" and verdict([0.8], 0.3) == "**within noise**"


def test_the_command(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", cell()), folder(tmp_path / "b", cell())
    result = invoke("bench", "--compare", a, b)
    assert result.exit_code == 0 and "# Comparison" in result.stdout and "**within noise**" in result.stdout
    result = invoke("bench", "--tasks", "chat")
    assert result.exit_code == 2 and "expected --model and --out, or --compare A B" in result.stderr
