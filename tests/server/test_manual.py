"""The manual's commands and code run as they stand, on a tiny model in place of the one that is named."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from longgraft.server.fields import Extras
from longgraft.server.run import Server
from tests.saved_model import invoke
from tests.server import live
from tests.server.live import http

MANUAL = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
CODE = re.findall(r"^```(\w*)\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
COMMANDS = [line for kind, text in CODE if kind == "bash" for line in text.splitlines()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with live.serving(names=("coder",), shelf=tmp_path_factory.mktemp("shelf"), new_tokens=8) as opened:
        yield opened


def test_the_python_code_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code = "".join(text for kind, text in CODE if kind == "python")
    code = code.replace("http://127.0.0.1:8000", server.url).replace(
        "max_completion_tokens=200", "max_completion_tokens=12"
    )
    exec(compile(code, "docs/server.md", "exec"), names := {})
    assert names["answer"].choices[0].longgraft["sources"] and capsys.readouterr().out.count("\n") >= 3


def test_the_requests_are_answered(server: Server) -> None:
    asked = [shlex.split(line) for line in COMMANDS if line.startswith("curl")]
    assert len(asked) == 4
    with http(server) as sender:
        for _, *words in asked:
            response = _curled(sender, words, server.url)
            assert response.status_code == 200, response.text


def _curled(sender: httpx.Client, words: list[str], url: str) -> httpx.Response:
    options = dict(itertools.pairwise(words))
    place = next(word for word in words if word.startswith("http")).replace("http://127.0.0.1:8000", url)
    kind, _, value = options.get("-H", "Accept: */*").partition(": ")
    body = options.get("-d")
    method = options.get("-X", "GET" if body is None else "POST")
    assert body is None or json.loads(body)
    return sender.request(method, place, content=body, headers={kind: value})


def test_the_options_exist() -> None:
    shown = invoke("serve", "--help").output
    for option in set(re.findall(r"`(--[a-z-]+)", MANUAL)) | {"--model", "--name", "--port"}:
        assert option in shown, option
    (command,) = [line for line in COMMANDS if line.startswith("longgraft serve")]
    assert all(option in shown for option in shlex.split(command) if option.startswith("--"))


def test_the_endpoints_and_fields_exist(server: Server) -> None:
    with http(server) as sender:
        document: dict[str, Any] = sender.get("/openapi.json").json()
    named = set(re.findall(r"(?<=[` ])(/[a-z0-9_./]+[a-z0-9])", re.sub(r"http://\S+", "", MANUAL)))
    known = {re.sub(r"/\{name\}", "", path) for path in document["paths"]} | {"/openapi.json"}
    assert known <= named | {"/v1/models"}, known - named
    table = MANUAL.split("## Fields of ours")[1].split("```")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(Extras.model_fields)
