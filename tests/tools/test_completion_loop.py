"""Completing place after place: one line of JSON in, one out; nothing ends it, and the corpus follows the files."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longgraft import Engine, SamplingParams
from longgraft.index.corpus import open_corpus
from longgraft.index.corpus_build import build_corpus
from longgraft.tools.completing import Budget
from longgraft.tools.completion_loop import completions, followed
from tests.index.corpus_cases import write
from tests.saved_model import invoke
from tests.tools.scripted import quickly

APP = "from lib.shapes import area\n\n\ndef report(shape):\n    \n\nprint(report(3))\n"
PARAMS = SamplingParams(max_new_tokens=6, seed=1, temperature=0.0)
MOST_SECONDS = 60


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("pathspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "project", {"app.py": APP, "lib/shapes.py": "def area(shape):\n    return shape\n"})


def answers(engine: Engine, root: Path, *asked: Any) -> list[dict[str, Any]]:
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in asked]
    with quickly():
        return list(completions(lines, engine, root, None, PARAMS, Budget()))


def test_each_place_is_answered_as_alone(engine: Engine, folder: str, root: Path) -> None:
    place = {"file": "app.py", "line": 5}
    first, blank, again = answers(engine, root, {"id": 7, **place}, b"  \n", {**place, "column": None}, place)[:3]
    command = ("complete", "-m", folder, "-r", str(root), "-f", "app.py", "-l", "5", "-n", "6", "--seed", "1", "--json")
    with quickly():
        alone = json.loads(invoke(*command).stdout)
    assert first["id"] == 7 and first["related"] == alone["related"] == ["lib/shapes.py"]
    assert first["token_ids"] == blank["token_ids"] == again["token_ids"] == alone["token_ids"]
    assert first["note"] and "id" not in again


def test_what_an_object_says_counts(engine: Engine, root: Path) -> None:
    place = {"file": "app.py", "line": 5}
    plain, long, typed = answers(
        engine, root, place, {**place, "max_new_tokens": 9}, {**place, "text": APP.replace("report", "said")}
    )
    assert len(plain["token_ids"]) == 6 and len(long["token_ids"]) == 9
    assert typed["prompt_tokens"] != plain["prompt_tokens"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (b"{", "is no JSON"),
        (b"\xff\xfe\n", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        ({"file": "a\0b", "line": 1}, "cannot be a file of the repository"),
        ({"file": "a" * 5000, "line": 1}, "cannot be a file of the repository"),
        ([1], "is a list: expected an object with file, line"),
        ({"file": "app.py"}, "line is missing"),
        ({"file": "app.py", "line": "5"}, "line is '5': expected a value of type int"),
        ({"file": "app.py", "line": True}, "line is True: expected a value of type int"),
        ({"file": "app.py", "line": 5, "lines": 2}, "lines is not known: expected some of file, line"),
        ({"file": "app.py", "line": 99}, "line is 99"),
        ({"file": "../other.py", "line": 1}, "is not in the repository"),
        ({"file": "none.py", "line": 1}, "none.py"),
        ({"file": "app.py", "line": 5, "max_new_tokens": -1}, "max_new_tokens"),
    ],
)
def test_a_bad_line_is_answered_and_ends_nothing(engine: Engine, root: Path, asked: Any, said: str) -> None:
    bad, good = answers(engine, root, asked, {"file": "app.py", "line": 5})
    assert set(bad) == {"error"} and said in bad["error"]
    assert len(good["token_ids"]) == 6


def test_the_corpus_follows_the_files(engine: Engine, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("watchfiles")
    folder = root.parent / "corpus"
    build_corpus(folder, [root], engine.tokenizer, tokenizer_name="tiny")
    told: list[str] = []

    def names() -> set[str]:
        with open_corpus(folder) as opened:
            return {Path(one.path).name for one in opened.documents}

    with followed(folder, engine.tokenizer, told.append):
        (root / "new.py").write_text("def border(shape):\n    return 4 * shape\n")
        wait(lambda: "new.py" in names())
    assert names() == {"app.py", "shapes.py", "new.py"} and told == []


def wait(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + MOST_SECONDS
    while not is_so():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.05)


def test_where_it_cannot_be_followed_that_is_said(engine: Engine, root: Path) -> None:
    told: list[str] = []
    with followed(root / "no corpus", engine.tokenizer, told.append):
        wait(lambda: bool(told))
    assert "the repository's corpus stays as it is" in told[0]
    with followed(None, engine.tokenizer, told.append):
        assert len(told) == 1


def test_from_the_command_line(folder: str, root: Path) -> None:
    asked = b"".join(
        json.dumps(one).encode() + b"\n" for one in ({"id": "a", "file": "app.py", "line": 5}, {"id": "b"})
    )
    with quickly():
        result = invoke("complete", "-m", folder, "-r", str(root), "--loop", "-n", "4", stdin=asked.decode())
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and [one["id"] for one in found] == ["a", "b"]
    assert len(found[0]["token_ids"]) == 4 and found[1]["error"] == "file is missing: expected file and line"


def test_places_come_from_one_side() -> None:
    both = invoke("complete", "-m", "M", "-r", ".", "--loop", "-l", "5")
    assert both.exit_code == 2 and "leave out --file, --line, --column and --stdin" in both.stderr
    neither = invoke("complete", "-m", "M", "-r", ".", "-f", "app.py")
    assert neither.exit_code == 2 and "--file and --line are needed" in neither.stderr
