"""The benchmark: one line a cell, nothing redone, other settings refused, the same tokens for every policy."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longgraft.config import GraftError
from longgraft.cost import CostTable
from longgraft.eval import policy_bench, policy_plots
from longgraft.eval.fitting import Prompt
from longgraft.eval.policy_bench import Bench, Recorder, run
from longgraft.eval.policy_folder import Folder, read_cells
from longgraft.eval.policy_settings import BenchSettings
from longgraft.eval.suites import open_tasks
from tests.eval import bench_child
from tests.saved_model import calm, cheap_rows, invoke, save

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cheap_rows(tmp_path_factory.mktemp("costs") / "costs.json")


@pytest.fixture(autouse=True)
def calmly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(policy_plots, "draw", lambda *_: [])  # drawn in test_policy_rows; slow
    with calm():
        yield


def asked(model: str, costs: str | None, **more: Any) -> BenchSettings:
    policies = ("plain", "retrieval", "adaptive")
    wanted = {"policies": policies, "tasks": ("chat", "quote"), "contexts": (400,), "new": 12, "cost_table": costs}
    return BenchSettings(model, **{**wanted, **more})


def timeless(cell: dict[str, Any]) -> list[Any]:
    """Return what of a cell no clock decides."""
    counts = ("nodes", "accepted", "rounds", "accepted_by_round", "new_tokens_by_round", "nodes_by_source")
    runs = [(r["name"], r["token_ids"], *(r.get("stats", {}).get(n) for n in counts)) for r in cell["runs"]]
    return [cell["prompt"], cell["task"], cell["context"], cell["seed"], cell["repeat"], runs]


def prompt_of(bench: Bench, task: str, context: int) -> Prompt:
    found = bench.prompt(open_tasks([task])[task], (task, context, 0))
    assert found is not None
    return found


def test_cells_report_and_resuming(model: str, costs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    said: list[str] = []
    report = run(asked(model, costs, peers=("transformers", "lookup")), str(out), said.append)
    keys = [(cell["task"], cell["context"], cell["seed"], cell["repeat"]) for cell in read_cells(out)]
    assert keys == [("chat", 400, 0, 0), ("quote", 400, 0, 0)] and said[0] == "warming up"
    rows = report["rows"]
    assert [row["name"] for row in rows[:5]] == [
        "plain", "retrieval", "adaptive", "transformers", "transformers lookup",
    ]  # fmt: skip
    assert all(row["same_tokens"] and row["new_tokens"] == 12 for row in rows)
    quoted = next(row for row in rows if (row["task"], row["name"]) == ("quote", "adaptive"))
    assert quoted["nodes"] == sum(quoted["nodes_by_source"].values()) > 0
    # By the frozen table every round costs a second, whatever its rows.
    assert quoted["speed_up_frozen"] == pytest.approx(quoted["acceptance_length"])
    assert quoted["acceptance_length_drafted"] >= quoted["acceptance_length"]
    assert 0 < quoted["end_to_end_low"] <= quoted["end_to_end"] <= quoted["end_to_end_high"]
    assert {"report.md", "report.html", "report.json", "settings.json"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "report.json").read_text())["command"].startswith("longgraft bench --model")

    lines = (out / "cells.jsonl").read_text().splitlines(keepends=True)
    (out / "cells.jsonl").write_text(lines[1] + lines[0][:-9])  # chat's line was being written when the run was killed
    made: list[Bench] = []
    true_init = Bench.__init__
    monkeypatch.setattr(Bench, "__init__", lambda self, *args: made.append(self) or true_init(self, *args))
    run(asked(model, costs, peers=("transformers", "lookup")), str(out))
    after = (out / "cells.jsonl").read_text().splitlines(keepends=True)
    assert len(made) == 1 and len(after) == 2 and after[0] == lines[1]
    assert timeless(json.loads(after[1])) == timeless(json.loads(lines[0]))
    run(asked(model, costs, peers=("transformers", "lookup")), str(out))
    assert len(made) == 1, "nothing was missing, so no model is loaded"


def test_a_folder_of_other_settings_is_refused(model: str, costs: str, tmp_path: Path) -> None:
    first = asked(model, costs, tasks=("chat",), new=2)
    folder = Folder(str(tmp_path), first.identity())
    other = asked(model, costs, tasks=("chat",), new=3)
    Folder(str(tmp_path), other.identity())  # nothing measured yet: a mistake can be mended
    folder = Folder(str(tmp_path), first.identity())
    folder.add({"task": "chat", "context": 400, "seed": 0, "repeat": 0})
    Folder(str(tmp_path), asked(model, costs, contexts=(900, 400), pairs=3, new=2).identity())
    with pytest.raises(GraftError, match=r"cells of other settings \(new\): give another folder"):
        Folder(str(tmp_path), other.identity())
    with pytest.raises(GraftError, match="cannot be used"):
        Folder(cheap_rows(tmp_path / "file"), first.identity())
    (tmp_path / "old" / "cells").mkdir(parents=True)
    with pytest.raises(GraftError, match="cells of an older version"):
        Folder(str(tmp_path / "old"), first.identity())
    folder.file.write_text("{\n" + folder.file.read_text())
    with pytest.raises(GraftError, match=r"line 1: not a cell .*delete the line"):
        folder.cells()


def test_costs_are_measured_once(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = asked(model, None, tasks=("chat",), new=1)
    folder = Folder(str(tmp_path), settings.identity())
    bench = Bench(settings, folder)
    assert bench.cost.frozen and bench.engine.cost is bench.cost
    monkeypatch.setattr(policy_bench, "measure_costs", lambda *_: pytest.fail("measured again"))
    assert Bench(settings, folder).cost.fixed.tolist() == bench.cost.fixed.tolist()


def test_an_interruption_keeps_no_chunk(model: str, costs: str, tmp_path: Path) -> None:
    settings = asked(model, costs)
    bench = Bench(settings, Folder(str(tmp_path), settings.identity()))
    free = bench.engine.pool.num_free
    cells = bench.cells(prompt_of(bench, "chat", 400), 0, [0, 1], 3)
    assert next(cells)["repeat"] == 0
    cells.close()
    assert bench.engine.pool.num_free == free


def test_a_run_that_fails_half_way_reports_what_it_has(
    model: str, costs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_prompt = Bench.prompt

    def prompt(self: Bench, task: Any, group: tuple[str, int, int]) -> Any:
        found = true_prompt(self, task, group)
        assert found is not None
        # Too long for the model, as if memory had run out behind the first cell.
        return replace(found, token_ids=found.token_ids * 9) if group[0] == "quote" else found

    monkeypatch.setattr(Bench, "prompt", prompt)
    with pytest.raises(GraftError, match="the prompt has"):
        run(asked(model, costs, new=2), str(tmp_path))
    assert [cell["task"] for cell in read_cells(tmp_path)] == ["chat"]
    assert "| 400 | chat |" in (tmp_path / "report.md").read_text()


def test_tasks_without_a_prompt_that_fits_are_told(model: str, costs: str, tmp_path: Path) -> None:
    said: list[str] = []
    settings = asked(model, costs, tasks=("specbench/rag",), seeds=(0, 1), new=2, policies=("plain",))
    report = run(settings, str(tmp_path / "a"), said.append)
    assert said[0] == "no prompt that fits, left out: specbench/rag at 400, seed 1"
    assert [row["task"] for row in report["rows"]] == ["specbench/rag"] and report["rows"][0]["prompt_tokens"] < 400
    with pytest.raises(GraftError, match="nothing was measured: no task has a prompt that fits"):
        run(replace(settings, contexts=(64,)), str(tmp_path / "b"))


def test_a_peer_that_fails_is_told_and_the_run_goes_on(
    model: str, costs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, new: int) -> Any:
        raise RuntimeError("no such\nthing")

    monkeypatch.setattr("longgraft.eval.peers.AssistedPeer.decode", fail)
    said: list[str] = []
    report = run(asked(model, costs, tasks=("chat",), new=2, peers=("lookup",)), str(tmp_path), said.append)
    assert said[1] == "transformers lookup will be left out: no such thing"
    assert report["rows"][-1]["skipped"] == "no such thing"


def test_a_drafter_that_reads_states_is_given_them_for_every_fork() -> None:
    class Reader:
        feature_window = 8

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def prefill(self, sequence: Any, first: int, features: torch.Tensor) -> None:
            self.seen.append((sequence, first, features.tolist()))

    reader: Any = Reader()
    recorder = Recorder(reader)
    states = torch.ones(2, 3)
    recorder.prefill("first", 5, states)  # type: ignore[arg-type]
    states.zero_()  # the target's buffer is written again by its next forward
    recorder.repeat("fork")  # type: ignore[arg-type]
    assert recorder.feature_window == 8
    assert reader.seen == [("first", 5, [[1.0] * 3] * 2), ("fork", 5, [[1.0] * 3] * 2)]


def test_policies_with_a_drafter(model: str, costs: str, tmp_path: Path) -> None:
    settings = asked(model, costs, draft=model, tasks=("quote",), policies=("plain", "adaptive"), new=8)
    report = run(settings, str(tmp_path))
    drafted = next(row for row in report["rows"] if row["name"] == "adaptive")
    # The drafter is the target itself, so what it says is right.
    assert drafted["same_tokens"] and drafted["nodes_by_source"]["draft"] > 0 and drafted["accepted"] > 0
    assert drafted["speed_up_frozen"] > 1


def test_costs_of_target_and_drafter_are_measured_once_and_kept(model: str, costs: str, tmp_path: Path) -> None:
    settings = replace(asked(model, costs, draft=model, tasks=("quote",), policies=("plain",), new=4), cost_table=None)
    run(settings, str(tmp_path))
    path = tmp_path / "cost_table.json"
    before = path.read_text()
    drafter = CostTable.load_drafter(path)
    assert drafter is not None and drafter.frozen
    run(replace(settings, pairs=2), str(tmp_path))
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policies": ("plain", "magic")}, "policies: 'magic' is not known"),
        ({"tasks": ("chat", "chat")}, "names one twice"),
        ({"tasks": ()}, "at least one of each"),
        ({"contexts": (0,)}, "contexts: 0; expected 64"),
        ({"contexts": (512, 512)}, "names one twice"),
        ({"new": 257}, "new: 257; expected 1 to 256"),
        ({"pairs": 0}, "pairs: 0"),
        ({"seeds": (-1,)}, "seeds: -1"),
        ({"peers": ("vllm",)}, "peers: 'vllm' is not known"),
    ],
)
def test_settings_are_checked_at_the_door(values: dict[str, Any], message: str) -> None:
    with pytest.raises(GraftError, match=message):
        asked("m", None, **values)


def test_policies_follow_the_drafter() -> None:
    assert BenchSettings("m").policies == ("plain", "retrieval", "adaptive")
    assert "paper" in BenchSettings("m", draft="d").policies
    assert BenchSettings("m").command("a b").endswith("--out 'a b'")


def test_the_command(model: str, costs: str, tmp_path: Path) -> None:
    common = ("bench", "-m", model, "--cost-table", costs, "--out", str(tmp_path / "out"), "--new", "4")
    result = invoke(*common, "--tasks", "quote", "--contexts", "300", "--policies", "plain,retrieval")
    assert result.exit_code == 0, result.stderr
    assert "| context | task | plain tokens/s | retrieval |" in result.stdout and "report.md" in result.stdout
    for arguments, message in (
        (("--contexts", "1k"), "--contexts '1k': expected whole numbers"),
        (("--contexts", "999999"), "a context of 999999 tokens: this model's limit is 2048"),
        (("--traces", str(tmp_path / "none")), "none: cannot be read"),
        (("--policies", "dense", "--contexts", "300"), "needs a drafter"),
        (("--dtype", "int3", "--contexts", "300"), "dtype 'int3': expected"),
    ):
        result = invoke(
            *common[:-4], "--out", str(tmp_path / f"{arguments[0]}{arguments[1][:3]}".replace("/", "")), *arguments
        )
        assert result.exit_code == 2 and message in result.stderr, result.stderr


def table_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a report without what a clock decides."""
    timed = ("tokens_per_s", "speed_up", "noise", "ms_per_round", "seconds_by_stage", "end_to_end")
    rows = json.loads((folder / "report.json").read_text())["rows"]
    frozen = [row.pop("speed_up_frozen") for row in rows if "speed_up_frozen" in row]
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows] + [{"frozen": frozen}]


def test_a_killed_and_resumed_run_gives_the_same_table(model: str, costs: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(bench_child.settings(model, costs), str(whole))
    command = [sys.executable, "-m", "tests.eval.bench_child", model, costs, str(broken)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"cell\n"
        child.kill()
    found = len(read_cells(broken))
    assert 1 <= found < len(read_cells(whole)) and not (broken / "report.md").exists()
    with (broken / "cells.jsonl").open("a") as file:
        file.write('{"task": "chat", "cont')  # as if killed while writing
    run(bench_child.settings(model, costs), str(broken))
    assert table_of(broken) == table_of(whole)
    again = [timeless(cell) for cell in read_cells(broken)]
    assert again == [timeless(cell) for cell in read_cells(whole)] and len(again) == 3
