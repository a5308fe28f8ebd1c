"""How much memory there is, as the system tells it, and the sentence when it is not enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import longgraft.memory as memory
from longgraft.config import GraftError
from longgraft.memory import GIB, available_bytes, require

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc and /sys of our own: 8 GiB available, no container."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nBuffers: 1 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    real = memory.Path

    def inside(name: str) -> Path:
        return tmp_path / name.lstrip("/") if name.startswith(("/proc", "/sys")) else real(name)

    monkeypatch.setattr(memory, "Path", inside)
    return tmp_path


def container(system: Path, limit: Any, used: Any) -> None:
    (system / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
    (system / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")


def test_what_the_system_says(system: Path) -> None:
    assert available_bytes(CPU) == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", GIB, 8 * GIB), (5 * GIB, 2 * GIB, 3 * GIB), (64 * GIB, GIB, 8 * GIB), (GIB, 2 * GIB, 0)],
)
def test_a_container_may_have_less(system: Path, limit: Any, used: Any, expected: int) -> None:
    container(system, limit, used)
    assert available_bytes(CPU) == expected


def test_a_system_that_does_not_tell(system: Path) -> None:
    (system / "proc/meminfo").unlink()
    assert available_bytes(CPU) is None
    require("anything", 2**60, CPU, "buy more")


def test_this_machine_has_some() -> None:
    free = available_bytes(CPU)
    assert free is None or 2**20 < free < 2**50


def test_the_sentence_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 * GIB)
    require("loading it", 2 * GIB, CPU, "choose another")
    with pytest.raises(GraftError, match=r"^loading it needs 2\.5 GiB, 2\.0 free on cpu; choose another$"):
        require("loading it", 5 * GIB // 2, CPU, "choose another")
