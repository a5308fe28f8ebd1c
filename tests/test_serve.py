"""`longgraft serve`: options, keys and mistakes; a real process from start to signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.serve import needed
from tests.saved_model import calm, cheap_rows, invoke, save, silent

pytest.importorskip("fastapi")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with calm(), silent():
        yield


def test_help_says_what_there_is() -> None:
    shown = invoke("serve", "--help")
    assert shown.exit_code == 0
    for option in ("--model", "--draft", "--corpus", "--host", "--port", "--api-key", "--keys", "--max-requests"):
        assert option in shown.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "99999"], "port 99999"),
        (["--keys", "/nowhere/keys"], "keys cannot be read"),
        (["--policy", "magic"], "policy"),
        (["--max-requests", "0"], "max_requests"),
        (["--corpus", "a/same", "--corpus", "b/same"], "different names"),
        (["--port", "0"], "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], said: str) -> None:
    done = invoke("serve", "--model", "/nowhere/at/all", *options)
    assert done.exit_code == 2 and said in done.output and "Traceback" not in done.output


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(GraftError, match=r"pip install 'longgraft\[server\]'"), needed():
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
    with pytest.raises(ModuleNotFoundError), needed():
        raise ModuleNotFoundError("No module named 'other'", name="other")


@pytest.mark.slow
def test_a_process_from_start_to_signal(tmp_path: Path) -> None:
    options = ["--model", save(tmp_path / "tiny"), "--port", "0", "--api-key", "secret", "--name", "tiny"]
    options += ["--cost-table", cheap_rows(tmp_path / "costs.json"), "--drain-seconds", "5"]
    environment = {**os.environ, "LONGGRAFT_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "longgraft", "serve", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:"), line + process.stderr.read()
        url = line.split()[-1]
        asked = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({"prompt": "the cat", "max_tokens": 4}).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer secret"},
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
        assert "Traceback" not in process.stderr.read()
