"""Run in a child process by test_corpus_faults: builds and updates that are ended, starved or read in between.

python corpus_child.py ROOT TASK      prints one line of JSON
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from longgraft.config import GraftError
from longgraft.index import corpus_write
from longgraft.index.corpus import open_corpus
from longgraft.index.corpus_build import build_corpus, refresh_corpus
from longgraft.index.corpus_home import locked
from tests.index.corpus_cases import Characters, ids, write

OLD = {"a.txt": "alpha " * 60, "b.txt": "beta " * 60, "c.txt": "gamma " * 40}
NEW = {"b.txt": "BETA " * 60, "d.txt": "delta " * 100}
CALLS = ("write", "sync", "rename", "unlink")


def end_at(moment: int, stop: Callable[[], None]) -> None:
    """Call `stop` in place of the moment-th change to the disk, in the middle of it if it writes."""
    count = 0

    def counted(name: str) -> Callable[..., None]:
        true = getattr(corpus_write, name)

        def call(*arguments: object) -> None:
            nonlocal count
            count += 1
            if count == moment:
                if name == "write":
                    file, data = arguments
                    file.write(bytes(data)[: len(bytes(data)) // 2])  # type: ignore[attr-defined, call-overload]
                    file.flush()  # type: ignore[attr-defined]
                stop()
            if name != "sync":  # what is written outlives a killed process without it
                true(*arguments)

        return call

    for name in CALLS:
        setattr(corpus_write, name, counted(name))


def in_child(task: Callable[[], None]) -> int:
    """Run a task in a forked process and return how that ended: 0, an exit code or minus a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            task()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def state(corpus: Path) -> str:
    """Return which version is there, "none", or what is wrong with it."""
    try:
        opened = open_corpus(corpus)
    except GraftError as error:
        return "none" if "there is no corpus" in str(error) else str(error)
    with opened:
        wrong = opened.check_integrity()
        counts = [opened.lookup(ids(word), len(word)).count for word in ("alpha ", "beta ", "BETA ", "delta ")]
        versions = {(60, 60, 0, 0): "old", (60, 0, 60, 100): "new"}
        return wrong or versions.get(tuple(counts), f"counts {counts}")  # type: ignore[call-overload, no-any-return]


def kill(root: Path, fresh: bool) -> dict[str, list[object]]:
    """Kill a build or an update at each of its changes; return the states left, some also after one more try."""
    corpus, saved, files = root / "corpus", root / "saved", root / "files"
    write(files, OLD)
    if not fresh:
        build_corpus(saved, [files], Characters())
    write(files, NEW)
    left: list[object] = []
    after: list[object] = []

    def task(moment: int) -> None:
        end_at(moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
        build_corpus(corpus, [files], Characters()) if fresh else refresh_corpus(corpus, Characters())

    for moment in range(1, 1000):
        shutil.rmtree(corpus, ignore_errors=True)
        if not fresh:
            shutil.copytree(saved, corpus)
        code = in_child(lambda moment=moment: task(moment))  # type: ignore[misc]
        left.append(state(corpus))
        if moment % 3 == 0:
            build_corpus(corpus, [files], Characters()) if fresh else refresh_corpus(corpus, Characters())
            used = 3 + len(open_corpus(corpus).segments)
            after.append(state(corpus) if len(list(corpus.iterdir())) == used else "files are left over")
        if code != -signal.SIGKILL:
            return {"left": left, "after": after, "code": [code]}
    raise AssertionError("it never ended by itself")


def limit(root: Path) -> dict[str, list[object]]:
    """Update where no file may grow beyond a few sizes; return what was said and the states left."""
    corpus, files = root / "corpus", root / "files"
    write(files, OLD)
    build_corpus(corpus, [files], Characters())
    write(files, NEW)

    def task(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            refresh_corpus(corpus, Characters())
        except GraftError as error:
            sys.stderr.write(str(error) + "\n")
            os._exit(3)

    codes = [in_child(lambda size=size: task(size)) for size in (0, 100, 5000, 20_000)]  # type: ignore[misc]
    return {"codes": list(codes), "states": [state(corpus)], "names": [len(list(corpus.iterdir()))]}


def read(root: Path) -> dict[str, list[object]]:
    """Let two processes read while one updates fifteen times; return how each ended."""
    corpus, files = root / "corpus", root / "files"
    write(files, {"fixed.txt": "fixed text", "v.txt": "version 0 " * 50})
    build_corpus(corpus, [files], Characters())

    def reader() -> None:
        seen: set[str] = set()
        while True:
            with open_corpus(corpus) as opened:
                assert opened.check_integrity() == ""
                assert len(opened.documents) == 2
                assert opened.lookup(ids("fixed text")).match_len == 10
                hits = opened.lookup(ids("version "), 8)
                assert hits.count == 50
                end = int(hits.ends[0])
                seen.add("".join(map(chr, opened.passage(end, 0, 3).token_ids)))
            if any(text.startswith("15") for text in seen):
                return

    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                reader()
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    for version in range(1, 16):
        write(files, {"v.txt": f"version {version} " * 50})
        refresh_corpus(corpus, Characters())
    return {"codes": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]}


def hold(root: Path) -> None:
    """Take the lock, say so, and keep it until killed."""
    with locked(root / "corpus"):
        print("locked", flush=True)
        signal.pause()


if __name__ == "__main__":
    where, what = Path(sys.argv[1]), sys.argv[2]
    if what == "hold":
        hold(where)
    tasks: dict[str, Callable[[], dict[str, list[object]]]] = {
        "kill build": lambda: kill(where, True),
        "kill update": lambda: kill(where, False),
        "limit": lambda: limit(where),
        "read": lambda: read(where),
    }
    print(json.dumps(tasks[what]()))
