"""Clients that people have, each as its own process against a real server: the same text as plain decoding. Slow.

Clients that do not agree on a release of the openai package need interpreters of their own:
`LONGGRAFT_RECIPES_PYTHON` lists them, with the system's separator of paths; this interpreter is always tried.
`LONGGRAFT_RECIPES_NODE` is a folder in which `npm install openai` was run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longgraft.server.keys import Keys
from longgraft.server.run import Server
from tests.server import live
from tests.server.live import CHAT, chat_ids, plain

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parent / "recipes"
NEEDS = {
    "openai_python": ("openai",),
    "langchain_chat": ("langchain_openai",),
    "llama_index_chat": ("llama_index.llms.openai_like",),
    "litellm_chat": ("litellm",),
}
PYTHONS = [sys.executable, *filter(None, os.environ.get("LONGGRAFT_RECIPES_PYTHON", "").split(os.pathsep))]
NODE = os.environ.get("LONGGRAFT_RECIPES_NODE", "")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with live.serving(keys=Keys([("team", "recipe-key")])) as opened:
        yield opened


def has(python: str, modules: tuple[str, ...]) -> bool:
    code = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(n.split('.')[0]) for n in sys.argv[1:]))"
    return Path(python).exists() and subprocess.run([python, "-c", code, *modules], check=False).returncode == 0


def run(server: Server, command: list[str], folder: Path) -> dict[str, Any]:
    """Run a recipe and return what it prints last."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*", "OPENAI_API_KEY": "unused"}
    arguments = [*command, f"{server.url}/v1", "recipe-key"]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=300, cwd=folder, env={**os.environ, **quiet}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(found: dict[str, Any]) -> None:
    chat = plain(chat_ids(CHAT), max_new_tokens=12)
    assert found["chat"] and set(found["chat"]) == {chat.text}
    assert set(found["completion"]) <= {plain("The quick brown fox", max_new_tokens=12).text}
    assert set(found["tokens"]) <= {12}


@pytest.mark.parametrize("python", PYTHONS, ids=range(len(PYTHONS)))
@pytest.mark.parametrize("recipe", NEEDS)
def test_python_clients(server: Server, recipe: str, python: str, tmp_path: Path) -> None:
    if not has(python, NEEDS[recipe]):
        pytest.skip(f"{NEEDS[recipe][0]} is not installed in {python}")
    check(run(server, [python, str(RECIPES / f"{recipe}.py")], tmp_path))


@pytest.mark.skipif(not NODE or shutil.which("node") is None, reason="no node, or no folder with its openai package")
def test_the_node_client(server: Server) -> None:
    check(run(server, ["node", str(RECIPES / "openai_node.mjs")], Path(NODE)))
