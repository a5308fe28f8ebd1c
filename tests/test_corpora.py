"""`longgraft index`: every command on a small real tokenizer, what it prints and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import longgraft.index.corpus_watch
from longgraft.config import GraftError
from longgraft.index.corpus import open_corpus
from longgraft.index.corpus_build import refresh_corpus
from tests import small_tokenizers
from tests.index.corpus_cases import write
from tests.saved_model import calm, invoke, last_json

FILES = {
    "fox.txt": "The quick brown fox\njumps over the lazy dog, and the lazy dog sleeps.\n",
    "scale.py": "def scale(values, factor):\n    return [value * factor for value in values]\n",
    "copy.py": "def scale(values, factor):\n    return [value * factor for value in values]\n",
    "data.bin": "\0\1",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizers.byte_level().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def home(tmp_path: Path) -> Iterator[Path]:
    with calm():
        os.environ["LONGGRAFT_HOME"] = str(tmp_path / "home")
        os.environ["COLUMNS"] = "150"
        yield tmp_path / "home"


@pytest.fixture
def built(tmp_path: Path, tokenizer: str) -> Path:
    """Build the corpus `docs` and return the folder of its files."""
    files = write(tmp_path / "files", FILES)
    result = invoke("index", "build", "docs", str(files), "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(r"docs: 2 texts added, 0 dropped; now \d+ tokens of 3 files \(1 copies\); .*\n", result.stdout)
    assert "skipped: 1 binary" in result.stdout
    return files


def refused(*arguments: str) -> str:
    result = invoke("index", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("longgraft: ") and result.stderr.count("\n") == 1
    return result.stderr


def values(*arguments: str) -> dict[str, Any]:
    result = invoke("index", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    return last_json(result.stdout)


def test_build_tells_a_script(tmp_path: Path, tokenizer: str) -> None:
    files = write(tmp_path / "files", FILES)
    found = values("build", "docs", str(files / "fox.txt"), str(files), "-t", tokenizer, "--max-file-bytes", "70")
    assert (found["added"], found["files"], found["copies"], found["is_new"]) == (1, 1, 0, True) or found["skipped"]
    assert found["skipped"]["binary"] == 1 and found["last_build"]["tokens"] == found["tokens"]


def test_update_adds_what_is_new(built: Path) -> None:
    assert invoke("index", "update", "docs").stdout.startswith("docs is up to date: ")
    write(built, {"new.txt": "something new"})
    found = values("update", "docs")
    assert (found["added"], found["dropped"], found["files"]) == (1, 0, 4)


def test_stats_for_people_and_scripts(built: Path, tokenizer: str) -> None:
    found = values("stats", "docs", "--check")
    with open_corpus("docs") as corpus:
        assert found["tokens"] == corpus.num_tokens and found["bytes"] == corpus.num_bytes
    assert (found["files"], found["copies"], found["documents"], found["segments"]) == (3, 1, 2, 1)
    assert found["tokenizer"] == tokenizer and found["roots"] == [str(built)] and found["skipped"] == {"binary": 1}
    shown = invoke("index", "stats", "docs").stdout
    for word in (str(built), tokenizer, "1 binary", "bytes a token", "tokens/s", "3 (1 of them copies"):
        assert word in shown


def test_a_corrupted_corpus_is_found_by_check(built: Path, home: Path) -> None:
    (path,) = (home / "corpora" / "docs").glob("*.segment")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert "is corrupted (bytes 0 to 4095): build the corpus again" in refused("stats", "docs", "--check")


def test_search_shows_file_line_and_surroundings(built: Path) -> None:
    result = invoke("index", "search", "docs", "--text", "nothing like jumps over the")
    assert f"{built}/fox.txt:2\n" in result.stdout
    assert "jumps over the lazy dog" in result.stdout
    assert re.search(r"the last \d+ of \d+ tokens stand in 1 place$", result.stderr)
    found = values("search", "docs", "--text", " for value in values", "--limit", "1")
    (place,) = found["places"]
    assert (Path(place["path"]).name, place["line"], found["count"]) == ("copy.py", 2, 1)
    text = place["before"] + place["match"] + place["after"]
    assert place["match"].endswith(" for value in values") and text in FILES["copy.py"]


def test_search_by_tokens(built: Path, tokenizer: str) -> None:
    ids = small_tokenizers.byte_level().encode(" lazy dog", add_special_tokens=False)
    found = values("search", "docs", "--tokens", ", ".join(map(str, ids)))
    assert found["match_len"] == found["tokens"] == len(ids) and found["count"] == 2
    assert [place["line"] for place in found["places"]] == [2, 2]
    result = invoke("index", "search", "docs", "--tokens", "329 328 327 2000")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "nothing found\n")


def test_search_without_the_tokenizer_shows_ids(built: Path, tokenizer: str, tmp_path: Path) -> None:
    ids = small_tokenizers.byte_level().encode(" lazy dog", add_special_tokens=False)
    arguments = ("index", "search", "docs", "--tokens", " ".join(map(str, ids)), "--tokenizer", str(tmp_path / "gone"))
    result = invoke(*arguments)
    assert result.exit_code == 0 and " ".join(map(str, ids)) in result.stdout
    assert "token ids only: tokenizer" in result.stderr


def test_search_refuses_what_it_cannot_look_for(built: Path, tmp_path: Path) -> None:
    assert "needs one of --text and --tokens" in refused("search", "docs")
    assert "needs one of --text and --tokens" in refused("search", "docs", "--text", "a", "--tokens", "1")
    assert "expected whole numbers" in refused("search", "docs", "--tokens", "1, x")
    assert "--limit is 0" in refused("search", "docs", "--tokens", "1", "--limit", "0")
    other = tmp_path / "other"
    small_tokenizers.sentencepiece().save_pretrained(other)
    assert "another tokenizer" in refused("search", "docs", "--text", "a", "--tokenizer", str(other))
    assert "another tokenizer" in refused("update", "docs", "--tokenizer", str(other))


def test_terminals_are_not_steered_by_files(tmp_path: Path, tokenizer: str) -> None:
    name = os.fsdecode(b"caf\xe9\x1b[31m.txt")
    write(tmp_path / "files", {name: "plain [b]x[/b] \x1b[2J \x9b here"})
    assert invoke("index", "build", "odd", str(tmp_path / "files"), "-t", tokenizer).exit_code == 0
    result = invoke("index", "search", "odd", "--text", "plain ")
    assert result.exit_code == 0 and not {"\x1b", "\x9b"} & set(result.stdout)
    assert "[b]x[/b]" in result.stdout
    assert values("search", "odd", "--text", "plain ")["count"] == 1


def test_list_and_rm(built: Path, home: Path) -> None:
    shown = invoke("index", "list").stdout
    assert "docs" in shown and "tokenizer" in shown
    assert [one["name"] for one in values("list")["corpora"]] == ["docs"]
    (home / "corpora" / "docs" / "manifest.json").write_text("broken")
    assert "is corrupted" in values("list")["corpora"][0]["error"]
    assert "is corrupted" in " ".join(invoke("index", "list").stdout.split())
    result = invoke("index", "rm", "docs")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "removed docs\n")
    assert values("list") == {"corpora": []}
    assert "there is no corpus 'docs'" in refused("rm", "docs")
    assert "no corpora yet" in invoke("index", "list").stderr
    assert sorted(path.name for path in built.iterdir()) == sorted(FILES)


def test_watch_tells_of_changes_and_errors(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(name: str, tokenizer: Any, report: Any) -> None:
        report(refresh_corpus(name, tokenizer))
        write(built, {"new.txt": "something new"})
        report(refresh_corpus(name, tokenizer))
        report(GraftError("the disk\nis full"))
        raise KeyboardInterrupt

    monkeypatch.setattr(longgraft.index.corpus_watch, "watch_corpus", watch)
    result = invoke("index", "watch", "docs")
    assert result.exit_code == 130
    assert result.stdout.count("\n") == 1 and result.stdout.startswith("docs: 1 texts added")
    assert result.stderr == "watching the files of docs; Ctrl-C ends it\nlonggraft: the disk is full\n"


def test_a_path_serves_as_a_name(tmp_path: Path, tokenizer: str) -> None:
    files = write(tmp_path / "files", FILES)
    place = str(tmp_path / "here" / "corpus")
    assert invoke("index", "build", place, str(files), "-t", tokenizer).exit_code == 0
    assert values("stats", place)["folder"] == place


def test_mistakes_are_one_sentence(tmp_path: Path, tokenizer: str) -> None:
    files = str(write(tmp_path / "files", FILES))
    assert "is not there" in refused("build", "docs", str(tmp_path / "absent"), "-t", tokenizer)
    assert "corpus name 'a b'" in refused("build", "a b", files, "-t", tokenizer)
    assert "could not be loaded" in refused("build", "docs", files, "-t", str(tmp_path / "absent"))
    assert "max_file_bytes is 0" in refused("build", "docs", files, "-t", tokenizer, "--max-file-bytes", "0")
    for command in ("update", "watch", "stats", "rm"):
        assert "there is no corpus 'none'" in refused(command, "none")
    assert "there is no corpus 'none'" in refused("search", "none", "--text", "x")


def test_a_relative_tokenizer_is_found_from_anywhere(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path / "files", FILES)
    monkeypatch.chdir(Path(tokenizer).parent)
    assert invoke("index", "build", "docs", str(files), "-t", Path(tokenizer).name).exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert values("update", "docs")["is_new"] is False


def test_help_is_quick_and_names_every_command() -> None:
    code = "import sys, longgraft.cli as c; c.app(['index', '-h'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.splitlines()[-1].split()) & {"torch", "transformers", "numpy", "pathspec", "bs4"}
    for command in ("build", "update", "watch", "stats", "search", "list", "rm"):
        assert re.search(rf"^ +{command} ", done.stdout, re.MULTILINE)


def test_threads_may_search_one_corpus(built: Path) -> None:
    ids = small_tokenizers.byte_level().encode(" lazy dog", add_special_tokens=False)
    with open_corpus("docs") as corpus:
        wanted = corpus.lookup(ids).ends.tolist()
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: found.extend(corpus.lookup(ids).ends.tolist() for _ in range(200)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [wanted] * 800
