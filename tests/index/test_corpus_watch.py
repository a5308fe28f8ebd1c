"""Watching: one update now, one after changes, none for what does not matter; errors end nothing."""

from __future__ import annotations

import builtins
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.index.corpus import open_corpus
from longgraft.index.corpus_build import Change, build_corpus
from longgraft.index.corpus_home import locked
from longgraft.index.corpus_watch import watch_corpus
from tests.index.corpus_cases import Characters, ids, write


@contextmanager
def watching(corpus: Path, tokenizer: Any) -> Iterator[queue.Queue[Change | GraftError]]:
    """Watch in a thread and give its reports."""
    reports: queue.Queue[Change | GraftError] = queue.Queue()
    stop = threading.Event()
    options = {"debounce_ms": 50, "stop": stop}
    thread = threading.Thread(target=watch_corpus, args=(corpus, tokenizer, reports.put), kwargs=options)
    thread.start()
    try:
        yield reports
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def test_changes_reach_the_corpus(tmp_path: Path) -> None:
    files, corpus = write(tmp_path / "files", {"a.txt": "alpha"}), tmp_path / "files" / "corpus"
    build_corpus(corpus, [files], Characters())
    write(files, {"b.txt": "beta"})
    with watching(corpus, Characters()) as reports:
        first = reports.get(timeout=30)
        assert isinstance(first, Change) and first.num_added == 1
        write(files, {"c.txt": "gamma"})
        while True:
            change = reports.get(timeout=30)
            assert isinstance(change, Change)
            if change.is_new:
                break
        with open_corpus(corpus) as opened:
            assert opened.lookup(ids("gamma")).match_len == 5


def test_an_error_is_reported_and_watching_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, corpus = write(tmp_path / "files", {"a.txt": "alpha"}), tmp_path / "corpus"
    build_corpus(corpus, [files], Characters())
    with watching(corpus, Characters("other")) as reports:
        for text in ("beta", "gamma"):
            report = reports.get(timeout=30)
            assert isinstance(report, GraftError) and "another tokenizer" in str(report)
            write(files, {"a.txt": text})


def test_what_cannot_be_watched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraftError, match="there is no corpus"):
        watch_corpus(tmp_path / "none", Characters(), print)
    true_import = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name == "watchfiles":
            raise ImportError(name)
        return true_import(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(GraftError, match="needs the package watchfiles"):
        watch_corpus(tmp_path / "none", Characters(), print)


def test_the_lock_is_free_between_updates(tmp_path: Path) -> None:
    files, corpus = write(tmp_path / "files", {"a.txt": "alpha"}), tmp_path / "corpus"
    build_corpus(corpus, [files], Characters())
    with watching(corpus, Characters()) as reports:
        reports.get(timeout=30)
        with locked(corpus, patience=10):
            assert (corpus / "manifest.json").exists()
