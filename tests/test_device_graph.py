"""A round of known sizes runs, is recorded, then replayed; when the index has moved, all of it begins anew.

CUDA graphs are stood in for: what is tested is who asks for them and when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longgraft.device_graph import Replay


class Graph:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said = list[str]()

    @contextmanager
    def recording(graph: Graph) -> Iterator[None]:
        said.append("record")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(said))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("wait"))
    return said


def replay_of(log: list[str], moves: list[bool]) -> Replay:
    def run(rows: int, bound: int) -> Any:
        log.append(f"run {rows}")
        return torch.tensor([rows])

    index = SimpleNamespace(recover=lambda: moves.pop(0) if moves else False)
    one: Any = SimpleNamespace(device=torch.device("cpu"), index=index, run=run, propose=lambda: log.append("propose"))
    replay = Replay(one, records=True)
    assert not replay.records  # on the CPU there is nothing to record
    replay.records = True
    return replay


def test_run_record_replay(log: list[str]) -> None:
    replay = replay_of(log, [])
    assert [int(replay.run(4, 100)) for _ in range(3)] == [4, 4, 4]
    assert log == ["run 4", "wait", "record", "run 4", "replay", "replay"]
    replay.run(8, 100)
    assert log[6:] == ["run 8"]


def test_an_index_that_moved_drops_all_graphs(log: list[str]) -> None:
    replay = replay_of(log, [False, False, True, False])
    for _ in range(4):
        replay.run(4, 100)
    assert log == [
        "run 4",
        "wait",
        "record",
        "run 4",
        "replay",
        "propose",
        "run 4",
        "wait",
        "record",
        "run 4",
        "replay",
    ]


def test_without_graphs_every_round_runs(log: list[str]) -> None:
    replay = replay_of(log, [])
    replay.records = False
    replay.run(4, 1)
    replay.run(4, 1)
    assert log == ["run 4", "run 4"]
