"""`longgraft verify`: verdict, exit code, and the last line."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import longgraft
import longgraft.audit
import longgraft.demo
import longgraft.rounds
import longgraft.show
from longgraft.kernels.tree_attention import BACKENDS
from longgraft.tree import Acceptance
from tests.saved_model import PROMPT, calm, cheap_rows, invoke, last_json


@pytest.fixture(autouse=True)
def calmly() -> Iterator[None]:
    with calm():
        yield


def test_verify_says_exact(folder: str) -> None:
    common = ("verify", "-m", folder, "-p", PROMPT, "-n", "24")
    result = invoke(*common, "--temperature", "0.8", "--seed", "2")
    values = last_json(result.stdout)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 2
    assert (values["exact"], values["verdict"], values["tokens"], values["seed"]) == (True, "exact", 24, 2)
    assert values["dtype"] == "float64" and values["first_difference"] is None
    # Each reads its prompt itself, so that their times can be compared; and the sentence compares them.
    assert values["plain_stats"]["prefix_rows"] == values["grafted_stats"]["prefix_rows"] == 0
    assert re.search(r"; decoded at [\d.]+ tokens/s, plainly at [\d.]+$", result.stdout.splitlines()[0])


@pytest.mark.skipif("native" not in BACKENDS, reason="exact mode needs the native attention kernel")
def test_verify_in_exact_mode_reports_its_cost(folder: str) -> None:
    result = invoke("verify", "-m", folder, "-p", PROMPT, "-n", "24", "--exact", "--dtype", "bfloat16")
    values = last_json(result.stdout)
    assert values["verdict"] == "exact" and values["exact_mode"]["cost"] > 0


def test_verify_fails_on_a_mismatch(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_accept = longgraft.rounds.accept

    def wrong(result: Any, *rest: Any) -> Acceptance:
        accepted = true_accept(result, *rest)
        shift = len(result.tree) > 1
        return Acceptance(accepted.path, [*accepted.token_ids[:-1], (accepted.token_ids[-1] + shift) % 99])

    monkeypatch.setattr(longgraft.rounds, "accept", wrong)
    table = cheap_rows(tmp_path / "costs.json")
    result = invoke("verify", "-m", folder, "-p", PROMPT, "-n", "24", "--keep-going", "--cost-table", table)
    values = last_json(result.stdout)
    assert result.exit_code == 1 and (values["exact"], values["verdict"]) == (False, "MISMATCH")
    assert values["gap"] is None or values["gap"] > values["bound"]
    assert "MISMATCH: first difference at output token" in result.stdout


def test_verify_reports_mistakes_as_well(folder: str) -> None:
    result = invoke("verify", "-m", folder, "-p", PROMPT, "--temperature", "nan")
    assert (result.exit_code, result.stdout) == (2, "") and "temperature" in result.stderr
