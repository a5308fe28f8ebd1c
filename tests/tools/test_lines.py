"""Diffs are what git takes."""

import subprocess
from pathlib import Path

import pytest

from longgraft.tools.lines import lines_of, unified_diff

OLD = "one\ntwo\x0cstill two\nthree\n"
PAIRS = [
    (OLD, "one\n2\nthree\n"),
    (OLD, ""),
    (OLD, OLD + "four"),
    (OLD.removesuffix("\n"), OLD),
    (OLD.replace("\n", "\r\n"), "one\r\nthree\r\nfour\r\n"),
    ("a\u2028b\n" * 3, "a\u2028c\n" * 3),
]


def test_only_a_line_feed_ends_a_line() -> None:
    assert lines_of("a\x0cb\n\n\u2028c\x85\r\nd") == ["a\x0cb\n", "\n", "\u2028c\x85\r\n", "d"]
    assert lines_of("") == []


def test_no_change_is_no_diff() -> None:
    assert unified_diff("f.txt", OLD, OLD) == ""


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_git_applies_the_diff(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(old.encode())
    diff = unified_diff("/f.txt", old, new)
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    done = subprocess.run(command, cwd=tmp_path, input=diff.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == new.encode()
