"""Every command of docs/evaluation.md runs, on a tiny model and with less of everything."""

import re
import shlex
from pathlib import Path

import pytest

from longgraft.eval import policy_plots
from tests.eval.lm_tasks import save_ending
from tests.saved_model import calm, cheap_rows, invoke

DOCS = Path(__file__).parent.parent / "docs" / "evaluation.md"
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("longgraft ")
]
LESS = {"--contexts": "440", "--seeds": "0", "--pairs": "1", "--limit": "1"}


def smaller(command: str, model: str, folder: Path) -> list[str]:
    words = shlex.split(command)[1:]
    for number, word in enumerate(words):
        if word in LESS:
            words[number + 1] = LESS[word]
    root = DOCS.parent.parent
    # Outside a checkout our sample stands for a history.
    history = f"git:{root}" if (root / ".git").exists() else "git"
    words = [word.replace("git:.", history) for word in words]
    words = [
        str(folder / word) if word.startswith("results/") else model if word == "MODEL" else word for word in words
    ]
    return words if "--compare" in words else [*words, "--cost-table", cheap_rows(folder / "costs.json")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ending(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_bench_commands_run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_plots, "draw", lambda *_: [])
    commands = [command for command in COMMANDS if command.startswith("longgraft bench")]
    assert len(commands) == 3
    with calm():
        for command in commands:
            words = smaller(command, model, tmp_path)
            result = invoke(*words, *([] if "--compare" in words else ["--new", "3"]))
            assert result.exit_code == 0, f"{command}: {result.stderr}"
    assert "within noise" in result.stdout
    assert {"report.md", "report.html", "report.json", "cells.jsonl"} <= {
        path.name for path in (tmp_path / "results" / "today").iterdir()
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_harness_commands_run(model: str, tmp_path: Path) -> None:
    for name in ("lm_eval", "nltk", "wonderwords"):
        pytest.importorskip(name)
    (command,) = [command for command in COMMANDS if command.startswith("longgraft eval")]
    words = smaller(command, model, tmp_path)
    # Into less, RULER's tasks put nothing; ruler_vt tries for ever where its example alone has too many bytes.
    words[words.index("--contexts") + 1] = "1024"
    words[words.index("--tasks") + 1] = "niah_single_1"
    with calm():
        result = invoke(*words)
    assert result.exit_code == 0 and "scores of both: equal" in result.stdout, result.stderr
    assert "| niah_single_1 | 1024 | adaptive | 1 |" in result.stdout


def test_the_page_is_short_and_names_no_command_that_is_not_run() -> None:
    assert len(DOCS.read_text().splitlines()) <= 100 and len(COMMANDS) == 4
