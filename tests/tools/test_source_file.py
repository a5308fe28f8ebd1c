"""A file comes back in its own encoding, line ends and permissions, or stays as it is."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.tools.source_file import read_source, with_line_ends, write_source


def rewritten(path: Path, old: str, new: str) -> bytes:
    source = read_source(str(path))
    write_source(source, source.restored(source.text.replace(old, new)))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"one\ntwo\n", b"1\ntwo\n"),
        (b"one\r\ntwo\r\n", b"1\r\ntwo\r\n"),
        (b"one\r\ntwo", b"1\r\ntwo"),
        (b"\xef\xbb\xbfone\n\xc3\xa9\n", b"\xef\xbb\xbf1\n\xc3\xa9\n"),
        ("one\né\n".encode("utf-16"), "1\né\n".encode("utf-16")),
        (b"# coding: latin-1\none \xe9\n", b"# coding: latin-1\n1 \xe9\n"),
        (b"caf\xe9 one\n", b"caf\xe9 1\n"),
        (b"one\r\ntwo\nthree\r\n", b"1\r\ntwo\nthree\r\n"),
    ],
)
def test_encodings_and_line_ends_stay(before: bytes, after: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(before)
    assert rewritten(path, "one", "1") == after
    assert [one.name for one in tmp_path.iterdir()] == ["f.txt"]


def test_the_end_of_the_last_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    for before, text, after in ((b"a\nb", "a\nc\n", b"a\nc"), (b"a\n", "c", b"c\n"), (b"a\n", "", b"")):
        path.write_bytes(before)
        source = read_source(str(path))
        assert source.restored(text).encode() == after


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "f.sh", tmp_path / "link"
    path.write_text("one\n")
    path.chmod(0o754)
    link.symlink_to(path)
    assert rewritten(link, "one", "1") == b"1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o754 and link.is_symlink() and path.read_text() == "1\n"


def test_a_change_meanwhile_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_text("one\n")
    source = read_source(str(path))
    path.write_text("another\n")
    with pytest.raises(GraftError, match="was changed meanwhile: nothing was written"):
        write_source(source, "1\n")
    assert path.read_text() == "another\n" and len(list(tmp_path.iterdir())) == 1
    path.unlink()
    with pytest.raises(GraftError, match="cannot be written"):
        write_source(source, "1\n")


def test_a_crash_while_writing_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.txt"
    path.write_text("one\n")
    source = read_source(str(path))

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GraftError, match=r"cannot be written \(No space left"):
        write_source(source, "1\n")
    assert path.read_text() == "one\n" and len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_written_back_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(b"\xff\xfea\0\x00\xd8")  # UTF-16 with half a pair
    with pytest.raises(GraftError, match="could not be written back as it is; convert it"):
        read_source(str(path))
    path.write_bytes(b"\0\1")
    with pytest.raises(GraftError, match="binary; expected a text"):
        read_source(str(path))
    with pytest.raises(GraftError, match="not a regular file"):
        read_source(str(tmp_path))
    with pytest.raises(GraftError, match="cannot be read"):
        read_source(str(tmp_path / "gone"))
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(GraftError, match="the character '→', which cp1252 has not"):
        write_source(read_source(str(path)), "→\n")
    assert path.read_bytes() == b"caf\xe9\n"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_text("one\n")
    path.chmod(0o444)
    with pytest.raises(GraftError, match="may not be written"):
        write_source(read_source(str(path)), "1\n")


LINE = st.tuples(st.text("ab\r", max_size=3).map(lambda text: text.replace("\r", "")), st.sampled_from(["\n", "\r\n"]))


@given(st.lists(LINE, max_size=8), st.text("ab", max_size=2))
def test_lines_that_stay_keep_their_ends(lines: list[tuple[str, str]], last: str) -> None:
    old = "".join(map("".join, lines)) + last
    assert with_line_ends(old, old.replace("\r\n", "\n")) == old


def test_new_lines_end_as_those_before() -> None:
    assert with_line_ends("a\r\nb\n", "a\nnew\nb\nnew\n") == "a\r\nnew\r\nb\nnew\n"
    assert with_line_ends("a\r\nb\n", "new\nb") == "new\r\nb"
    assert with_line_ends("", "a\nb\n") == "a\nb\n"


def test_carriage_returns_alone_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(b"one\rtwo\r")
    with pytest.raises(GraftError, match="convert it to UTF-8 with LF first"):
        read_source(str(path))
