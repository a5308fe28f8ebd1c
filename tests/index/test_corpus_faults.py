"""Killed writers, full disks, readers during updates, changed bytes: the old version, the new, or why not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.index import corpus_segment, corpus_twin, corpus_write
from longgraft.index.corpus import open_corpus
from longgraft.index.corpus_build import build_corpus, refresh_corpus
from longgraft.index.corpus_home import locked
from tests.index.corpus_cases import Characters, each_kind, ids, write

CHILD = Path(__file__).with_name("corpus_child.py")
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def start(root: Path, task: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(CHILD.parents[2])}
    command = [sys.executable, str(CHILD), str(root), task]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def result(root: Path, task: str) -> tuple[dict[str, Any], str]:
    with start(root, task) as child:
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    return json.loads(out), err


@posix
def test_a_build_killed_at_any_point_leaves_nothing_or_all(tmp_path: Path) -> None:
    found, _ = result(tmp_path, "kill build")
    assert len(found["left"]) > 10 and set(found["left"]) == {"none", "new"}
    assert found["left"] == sorted(found["left"], reverse=True) and found["code"] == [0]
    assert set(found["after"]) == {"new"}


@posix
def test_an_update_killed_at_any_point_leaves_the_old_version_or_the_new(tmp_path: Path) -> None:
    found, _ = result(tmp_path, "kill update")
    assert len(found["left"]) > 12 and set(found["left"]) == {"old", "new"}
    assert found["left"] == sorted(found["left"], reverse=True) and found["code"] == [0]
    assert set(found["after"]) == {"new"}


@posix
def test_files_that_may_not_grow_leave_the_old_version(tmp_path: Path) -> None:
    found, said = result(tmp_path, "limit")
    assert found == {"codes": [3, 3, 3, 3], "states": ["old"], "names": [4]}
    lines = said.splitlines()
    assert len(lines) == 4 and all("could not be written (File too large): free some space" in one for one in lines)


@posix
def test_two_processes_read_while_one_updates(tmp_path: Path) -> None:
    assert result(tmp_path, "read")[0] == {"codes": [0, 0]}


@posix
def test_a_second_writer_waits_or_is_told_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    write(tmp_path / "files", {"a.txt": "alpha"})
    with start(tmp_path, "hold") as child:
        assert child.stdout is not None and child.stdout.readline() == "locked\n"
        try:
            with pytest.raises(GraftError, match="is being written by another process: wait"):
                build_corpus(tmp_path / "corpus", [tmp_path / "files"], Characters(), patience=0.1)
        finally:
            child.kill()
    assert build_corpus(tmp_path / "corpus", [tmp_path / "files"], Characters(), patience=5).is_new
    with locked(tmp_path / "corpus"), pytest.raises(GraftError, match="another process"):
        refresh_corpus(tmp_path / "corpus", Characters(), patience=0)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    write(tmp_path / "files", {"a.txt": "alpha", "b.txt": "beta"})
    build_corpus(tmp_path / "saved", [tmp_path / "files"], Characters())
    write(tmp_path / "files", {"b.txt": "BETA"})
    corpus = tmp_path / "corpus"
    for moment in range(1, 100):
        shutil.rmtree(corpus, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", corpus)
        with monkeypatch.context() as patch:
            count = fail_at(patch, moment, error)
            try:
                refresh_corpus(corpus, Characters())
            except GraftError as failure:
                assert "could not be written" in str(failure) and os.strerror(error) in str(failure)
                with open_corpus(corpus) as opened:
                    assert opened.check_integrity() == "" and opened.lookup(ids("beta"), 4).count == 1
                assert len(list(corpus.iterdir())) == 4
        if count() < moment:
            break
    assert 10 < moment < 99
    with open_corpus(corpus) as opened:
        assert opened.lookup(ids("BETA"), 4).count == 1


def fail_at(patch: pytest.MonkeyPatch, moment: int, error: int) -> Callable[[], int]:
    """Let the moment-th write, sync or rename fail; return how many there were so far."""
    calls = [0]

    def failing(true: Any) -> Any:
        def call(*arguments: Any) -> None:
            calls[0] += 1
            if calls[0] == moment:
                raise OSError(error, os.strerror(error))
            true(*arguments)

        return call

    for name in ("write", "sync", "rename"):
        patch.setattr(corpus_write, name, failing(getattr(corpus_write, name)))
    return lambda: calls[0]


@pytest.mark.skipif(not (hasattr(os, "geteuid") and os.geteuid() == 0), reason="mounting needs root")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        write(tmp_path / "files", {"a.txt": "alpha"})
        build_corpus(disk / "corpus", [tmp_path / "files"], Characters())
        write(tmp_path / "files", {"b.txt": "beta" * 10_000})
        with pytest.raises(GraftError, match="No space left on device"):
            refresh_corpus(disk / "corpus", Characters())
        with pytest.raises(GraftError, match="No space left on device"):
            build_corpus(disk / "corpus", [tmp_path / "files"], Characters())
        with open_corpus(disk / "corpus") as corpus:
            assert corpus.check_integrity() == "" and corpus.lookup(ids("alpha")).count == 1
        assert len(list((disk / "corpus").iterdir())) == 4
        write(tmp_path / "files", {"b.txt": "beta"})
        assert refresh_corpus(disk / "corpus", Characters()).num_added == 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


TEXTS = {f"{i}.txt": f"text {i}\nthe quick brown fox {i * i}\n" * 40 for i in range(12)}
CONTEXTS = [ids(text) for text in ("the quick brown fox 49\n", "text 1", "zz", "fox 1", "\n", "text 11\nthe quick")]


def answers(folder: Path) -> list[Any]:
    """Ask everything there is to ask of a corpus."""
    found: list[Any] = []
    with open_corpus(folder, tokenizer_hash=None) as corpus:
        for context in CONTEXTS:
            hits = corpus.lookup(context)
            found.append((hits.match_len, hits.count, hits.ends.tolist()))
            for end in hits.ends.tolist():
                passage = corpus.passage(end, 20, 20)
                assert all(0 <= token < 256 for token in passage.token_ids.tolist())
                found.append((passage.token_ids.tolist(), passage.document, passage.offset))
                found.append(corpus.origin(passage.document, passage.offset))
            found.append(corpus.following(hits.ends, 9).tolist())
        found.append(corpus.documents)
    return found


@each_kind
def test_changed_bytes_are_found_or_change_nothing(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_segment, "native", lambda: kind)
    write(tmp_path / "files", TEXTS)
    folder = tmp_path / "corpus"
    build_corpus(folder, [tmp_path / "files"], Characters())
    wanted = answers(folder)
    files = [path for path in sorted(folder.iterdir()) if path.stat().st_size]
    rng = np.random.default_rng(5)
    num_found = 0
    for trial in range(100 if kind is corpus_twin else 240):
        path = files[trial % len(files)]
        data = bytearray(path.read_bytes())
        good = bytes(data)
        for place in rng.integers(0, len(data), 1 + trial % 4):
            data[int(place)] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        try:
            assert answers(folder) == wanted
        except GraftError:
            num_found += 1
        path.write_bytes(good)
    assert num_found > 45
    assert answers(folder) == wanted


def test_every_changed_byte_is_found_by_a_full_check(tmp_path: Path) -> None:
    write(tmp_path / "files", TEXTS)
    folder = tmp_path / "corpus"
    build_corpus(folder, [tmp_path / "files"], Characters())
    (path,) = folder.glob("*.segment")
    good = path.read_bytes()
    for place in np.random.default_rng(6).integers(0, len(good), 100).tolist():
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            with open_corpus(folder) as corpus:
                assert path.name in corpus.check_integrity()
        except GraftError as error:
            assert path.name in str(error)
    with pytest.raises(GraftError, match=r"is corrupted|build the corpus again"):
        refresh_after_change(folder, tmp_path / "files")


def refresh_after_change(folder: Path, files: Path) -> None:
    """Update a corpus whose first page is not what was written, so that the segment would be copied."""
    (path,) = folder.glob("*.segment")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    (files / "0.txt").unlink()
    refresh_corpus(folder, Characters())
