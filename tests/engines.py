"""Engines on tiny models, made once: for tests of the engine itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from longgraft.config import EngineConfig
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.engine import Engine
from tests.cases import SOURCES
from tests.models import prompt_for, tiny_model


def cost_of(rise: float = 0.0) -> CostTable:
    """A frozen table: the first row costs 1 s, every further one `rise`."""
    return CostTable(1.0 + rise * (np.array(ROW_BUCKETS) - 1.0), np.zeros(len(ROW_BUCKETS)), frozen=True)


class AllNodes(CostTable):
    """Verifies every proposed node of every sequence, whatever the others propose."""

    def choose(self, scores: Sequence[Sequence[float]], *_: Any) -> list[int]:
        return [len(tree) for tree in scores]


def all_nodes() -> AllNodes:
    return AllNodes(np.ones(len(ROW_BUCKETS)), np.zeros(len(ROW_BUCKETS)), frozen=True)


@lru_cache(maxsize=16)
def _model(arch: str, dtype: torch.dtype) -> Any:
    return tiny_model(arch, dtype)


@lru_cache(maxsize=64)
def _prompt(length: int, seed: int, arch: str) -> tuple[int, ...]:
    return tuple(prompt_for(_model(arch, torch.float64), length, seed))


def model_of(arch: str = "llama", dtype: torch.dtype = torch.float64) -> Any:
    """The one model of this arch and dtype; whoever changes it gives it back."""
    return _model(arch, dtype)


def prompt_of(length: int, seed: int = 0, arch: str = "llama") -> list[int]:
    return list(_prompt(length, seed, arch))


def engine_for(
    arch: str = "llama",
    tokenizer: Any = None,
    *,
    rise: float = 0.0,
    source: str | None = None,
    truth: Sequence[int] = (),
    model: Any = None,
    **settings: Any,
) -> Engine:
    """A fresh engine with a frozen cost table; with `source`, its proposals come from one of `SOURCES`."""
    options: dict[str, Any] = {} if source is None else {"index": lambda vocab_size: SOURCES[source](truth)}
    return Engine(model or model_of(arch), tokenizer, EngineConfig(**settings), cost=cost_of(rise), **options)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
