"""`scripts/gpu_check.py`: failures stay where they are, and a dry run walks every stage."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longgraft.eval.gpu_cases import Case, problem, text_of, truth
from longgraft.eval.gpu_stage import Stage
from longgraft.eval.gpu_stages import stages
from longgraft.kernels.reference import attend

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_and_stages_know_the_same_names(script: Any) -> None:
    assert set(script.LIMITS) == {"build", *stages()}
    assert script.BUDGET < 360


def test_stages_are_chosen_by_name(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script._options(["--only", "index,noise"]).stages == ["noise", "index"]
    assert "build" not in script._options(["--skip", "build"]).stages
    with pytest.raises(SystemExit):
        script._options(["--skip", "sleep"])
    assert "unknown stage sleep: expected some of build, ceilings" in capsys.readouterr().err


def test_a_stage_that_fails_hangs_or_has_no_time_ends_alone(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([(1, "it broke"), (124, "so far"), (0, "")])
    monkeypatch.setattr(script, "_run", lambda *_: next(answers))
    out = tmp_path / "out.json"
    assert script.main(["--only", "ceilings,noise,index", "--out", str(out)]) == 1
    found = json.loads(out.read_text())["stages"]
    assert [stage["ok"] for stage in found] == [False, False, False]
    assert "it broke" in found[0]["checks"][0]["detail"] and "so far" in found[1]["checks"][0]["detail"]
    assert script.main(["--only", "noise", "--budget", "1", "--out", str(out)]) == 1
    text = capsys.readouterr().out
    assert "noise: FAILED (noise)" in text and "no time left" in text and "index: FAILED (nothing came back)" in text


def test_what_hangs_is_ended(script: Any) -> None:
    options = script._options([])
    code, text = script._run(
        [sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(60)"], options, 2
    )
    assert code == 124 and "so far" in text
    assert script._run([sys.executable, "-c", "raise SystemExit('no')"], options, 20) == (1, "no\n")


def test_an_error_is_a_line_of_its_stage() -> None:
    stage = Stage(torch.device("cpu"), True)
    with stage.contained("one"):
        raise ValueError("of its own kind")
    with stage.contained("two"):
        raise ValueError("triton cannot be imported")
    assert [check["ok"] for check in stage.checks] == [False, None]
    assert stage.checks[0]["detail"] == "ValueError: of its own kind"


@pytest.mark.parametrize(
    "case", [Case(rows=9, prefix=600, kv_heads=1, dim=16), Case(rows=2, prefix=0, kv_heads=1, dim=16)]
)
def test_problems_have_answers(case: Case) -> None:
    made = problem(case, torch.float32, torch.device("cpu"))
    true, allowed = truth(made.inputs)
    assert 0 < allowed < 1e-4 and float((attend(made.inputs).double() - true).abs().max()) <= allowed
    assert made.prefix.bound >= case.prefix and made.pool[0].isnan().any()


def test_prompts_repeat_themselves() -> None:
    text = text_of(1000, 300)
    assert len(text) == 300 and sum(a == b for a, b in zip(text, text[60:])) > 200


@pytest.mark.slow
def test_a_dry_run_walks_every_stage(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), "--budget", "900"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {stage["stage"]: stage for stage in json.loads(out.read_text())["stages"]}
    assert set(found) == {"build", *stages()}
    for name, stage in found.items():
        assert stage["checks"] or stage["figures"], name
    assert sum(check["ok"] is True for check in found["lossless"]["checks"]) >= 8
    assert done.stdout.rstrip().splitlines()[-1].startswith("  ")


@pytest.mark.gpu
def test_everything_holds_on_this_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out.json")]
    assert subprocess.run(command, timeout=400, check=False).returncode == 0
