"""Walking folders: ignore files as git reads them, links, odd files, order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longgraft.config import GraftError
from longgraft.index.corpus_files import roots_of, walk
from tests.index.corpus_cases import write


def listed(root: Path, reason: str = "", leave_out: Path | None = None) -> list[str]:
    """Return the names, relative to a root, of what is found or left out for a reason."""
    found = walk(roots_of([root]), leave_out or root / "no such folder")
    return [str(one.path.relative_to(root)) for one in found if one.reason == reason]


TREE = [
    "a.py", "b.log", "keep.log", "build/x.py", "src/build/y.py", "src/a.log", "src/keep.log", "src/deep/a.tmp",
    "src/deep/b.txt", "docs/only/this.md", "docs/only/that.md", "docs/other.md", "node_modules/m/index.js", "top.txt",
    "src/top.txt", "äöü.py", "sp ace.py",
]  # fmt: skip
IGNORE = {
    ".gitignore": "*.log\n!keep.log\nbuild/\n/top.txt\nnode_modules\n# comment\n\n\\#odd\n!\n",
    "src/.gitignore": "!a.log\nkeep.log\n/deep/*.tmp\n",
    "docs/.gitignore": "only/*\n!only/this.md\n",
}


def test_ignore_files_are_read_as_git_reads_them(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(TREE, "x") | IGNORE)
    assert set(listed(tmp_path)) == {
        ".gitignore", "a.py", "keep.log", "src/.gitignore", "src/a.log", "src/deep/b.txt", "src/top.txt",
        "docs/.gitignore", "docs/only/this.md", "docs/other.md", "äöü.py", "sp ace.py",
    }  # fmt: skip
    assert "node_modules" in listed(tmp_path, "ignored") and "build" in listed(tmp_path, "ignored")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_it_is_what_git_lists(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(TREE, "x") | IGNORE | {"src/build/.gitignore": "!y.py\n"})
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, capture_output=True)
    command = ["git", "-C", str(tmp_path), "ls-files", "-z", "--others", "--exclude-standard"]
    listing = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
    assert sorted(listed(tmp_path)) == sorted(filter(None, listing))
    inside = subprocess.run([*command, "src"], check=True, capture_output=True).stdout.decode().split("\0")
    assert sorted(f"src/{name}" for name in listed(tmp_path / "src")) == sorted(filter(None, inside))


def test_rules_above_hold_inside_a_repository_only(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*.py\n", "sub/a.py": "x", "sub/b.txt": "x"})
    assert listed(tmp_path / "sub") == ["a.py", "b.txt"]
    (tmp_path / ".git").mkdir()
    assert listed(tmp_path / "sub") == ["b.txt"]


def test_our_own_ignore_file_wins(tmp_path: Path) -> None:
    write(
        tmp_path, {".gitignore": "*.log\n", ".longgraftignore": "!a.log\n*.py\n", "a.log": "", "b.log": "", "c.py": ""}
    )
    assert listed(tmp_path) == [".gitignore", ".longgraftignore", "a.log"]


def test_a_file_that_is_named_is_taken(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*\n", "a.py": "x"})
    (tmp_path / "link").symlink_to(tmp_path / "a.py")
    for name in ("a.py", "link"):
        (found,) = walk(roots_of([tmp_path / name]), tmp_path / "none")
        assert (found.path.name, found.reason) == (name, "")


def test_links_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"a/b/c.txt": "x"})
    (tmp_path / "a/b/loop").symlink_to(tmp_path / "a")
    (tmp_path / "a/self").symlink_to(tmp_path / "a/self")
    (tmp_path / "a/dangling").symlink_to(tmp_path / "nowhere")
    assert listed(tmp_path) == ["a/b/c.txt"]
    assert sorted(listed(tmp_path, "symbolic link")) == ["a/b/loop", "a/dangling", "a/self"]
    (tmp_path / "root").symlink_to(tmp_path / "a")
    assert listed(tmp_path / "root") == ["b/c.txt"]


def test_odd_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "x", ".git/config": "x", ".hg/x": "x", "own/manifest.json": "x"})
    os.mkfifo(tmp_path / "pipe")
    assert listed(tmp_path, leave_out=tmp_path / "own") == ["a.txt"]
    assert listed(tmp_path, "not a regular file") == ["pipe"]


def test_names_that_are_no_text_are_found(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    (tmp_path / "line\nfeed.txt").write_text("x")
    assert listed(tmp_path) == [os.fsdecode(b"caf\xe9.txt"), "line\nfeed.txt"]


def test_overlapping_roots_give_each_file_once_and_in_order(tmp_path: Path) -> None:
    write(tmp_path, {"b/x": "", "a/y": "", "a/b/z": ""})
    roots = roots_of([tmp_path / "b", tmp_path, tmp_path / "a" / "y", tmp_path])
    names = [str(one.path.relative_to(tmp_path)) for one in walk(roots, tmp_path / "none")]
    assert names == ["a/y", "a/b/z", "b/x"]


def test_paths_are_made_plain(tmp_path: Path) -> None:
    write(tmp_path, {".git/x": "", "a/.gitignore": "*.py\n", "b/x.py": ""})
    roots = roots_of([tmp_path / "a" / ".." / "b", tmp_path / "b" / "."])
    assert roots == (str(tmp_path / "b"),)
    assert [one.reason for one in walk(roots, tmp_path / "none")] == [""]


def test_ignore_files_that_are_no_files_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "", "b/c.py": "", ".longgraftignore/x": ""})
    os.mkfifo(tmp_path / "b" / ".gitignore")
    assert listed(tmp_path) == ["a.py", ".longgraftignore/x", "b/c.py"]


def test_without_pathspec_ignore_files_are_an_error_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pathspec", None)
    write(tmp_path, {"a.py": ""})
    assert listed(tmp_path) == ["a.py"]
    write(tmp_path, {".gitignore": "*.log\n"})
    with pytest.raises(GraftError, match="need the package pathspec"):
        listed(tmp_path)


def test_deep_folders_are_no_recursion(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(120):
        folder = folder / "d"
    folder.mkdir(parents=True)
    (folder / "x").write_text("x")
    assert len(listed(tmp_path)) == 1


def test_roots_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="is not there"):
        roots_of([tmp_path / "x"])
    assert roots_of([str(tmp_path), tmp_path]) == (str(tmp_path),)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may read everything")
def test_folders_that_may_not_be_read_are_counted(tmp_path: Path) -> None:
    write(tmp_path, {"closed/x": "", "a": ""})
    (tmp_path / "closed").chmod(0)
    try:
        assert listed(tmp_path, "unreadable") == ["closed"]
    finally:
        (tmp_path / "closed").chmod(0o700)
