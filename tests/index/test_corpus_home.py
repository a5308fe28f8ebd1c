"""Names, folders and removal of corpora."""

from __future__ import annotations

from pathlib import Path

import pytest

from longgraft.config import GraftError
from longgraft.index import corpus_home
from longgraft.index.corpus import open_corpus
from longgraft.index.corpus_build import build_corpus
from longgraft.index.corpus_home import folder_of, home, names, remove
from tests.index.corpus_cases import Characters, ids, write


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGGRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_names_live_at_home_and_paths_where_they_say(own_home: Path, tmp_path: Path) -> None:
    assert folder_of("docs") == own_home / "corpora" / "docs"
    assert folder_of("./docs") == Path.cwd() / "docs"
    assert folder_of("~/docs") == Path.home() / "docs"
    assert folder_of(tmp_path / "x") == tmp_path / "x" == folder_of(str(tmp_path / "x"))
    assert folder_of(Path("docs")) == Path.cwd() / "docs"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a b", "a\0b", "x" * 101, "-x", "ä"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(GraftError, match="corpus name"):
        folder_of(name)


def test_home_is_the_platforms_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LONGGRAFT_HOME")
    for name in ("XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for platform, wanted in (
        ("linux", tmp_path / "XDG_DATA_HOME" / "longgraft"),
        ("win32", tmp_path / "LOCALAPPDATA" / "longgraft"),
        ("darwin", Path.home() / "Library" / "Application Support" / "longgraft"),
    ):
        monkeypatch.setattr(corpus_home.sys, "platform", platform)
        assert home() == wanted


def test_list_and_remove(tmp_path: Path) -> None:
    files = write(tmp_path / "files", {"a.txt": "alpha"})
    assert names() == []
    for name in ("b", "a"):
        build_corpus(name, [files], Characters())
    (home() / "corpora" / "no corpus").mkdir()
    assert names() == ["a", "b"]
    with open_corpus("a") as corpus:
        remove("a")
        assert names() == ["b"] and not folder_of("a").exists()
        assert corpus.lookup(ids("alpha")).count == 1 and not corpus.is_current()
        assert len(corpus.documents) == 1
    for name in ("a", "never"):
        with pytest.raises(GraftError, match=f"there is no corpus '{name}'"):
            remove(name)
    assert (files / "a.txt").read_text() == "alpha"


def test_removing_spares_what_is_not_ours(tmp_path: Path) -> None:
    files = write(tmp_path / "files", {"a.txt": "alpha"})
    folder = tmp_path / "corpus"
    build_corpus(folder, [files], Characters())
    (folder / "notes.txt").write_text("mine")
    (folder / "manifest.json").write_text("broken")
    remove(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(GraftError, match="there is no corpus"):
        remove(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    files = write(tmp_path / "files", {"a.txt": "alpha"})
    with pytest.raises(GraftError, match="cannot be written"):
        build_corpus(files / "a.txt" / "x", [files], Characters())
