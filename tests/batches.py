"""Schedulers over small pools, and what their requests say alone: for tests of many requests at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from longgraft.cache import ChunkPool
from longgraft.config import EngineConfig, SamplingParams
from longgraft.draft.eagle import Eagle3Drafter
from longgraft.draft.lm import ModelDrafter
from longgraft.engine import Engine
from longgraft.request import Request
from longgraft.scheduler import Scheduler
from longgraft.sequence import Sequence
from tests.draft import heads
from tests.engines import cost_of, model_of
from tests.models import VOCAB, prompt_for, tiny_model

NEW = 10
POLICIES = ("plain", "retrieval", "adaptive", "dense", "paper")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5},
}
OPEN = list[Scheduler]()  # what a test leaves open when it fails must not fail the next; tests close it
ROWS = 16  # rows of a chunk: small, so that little text fills a pool


def scheduler_for(engine: Engine) -> Scheduler:
    OPEN.append(Scheduler(engine))
    return OPEN[-1]


@lru_cache(maxsize=4)
def twin_of(arch: str) -> Any:
    """A model of the same weights that no scheduler holds: it writes prompts, and says what is right."""
    return tiny_model(arch)


@lru_cache(maxsize=64)
def prompt_of(length: int, seed: int = 0, arch: str = "llama") -> tuple[int, ...]:
    return tuple(prompt_for(twin_of(arch), length, seed))


def small(chunks: int = 200, drafter: Any = None, arch: str = "llama", tokenizer: Any = None, **more: Any) -> Engine:
    """An engine with small chunks and small forwards; costs are frozen."""
    config = EngineConfig(**{"max_nodes": 6, "prefill_rows": 32, "round_rows": 24, **more})
    model = model_of(arch)
    return Engine(model, tokenizer, config, cost=cost_of(0.02), drafter=drafter, pool=pool_of(arch, chunks))


def pool_of(arch: str, chunks: int) -> ChunkPool:
    return ChunkPool(_target(arch).layers, chunks, torch.float64, chunk_rows=ROWS)


@lru_cache(maxsize=4)
def _target(arch: str) -> Any:
    return Engine(twin_of(arch), None, EngineConfig(policy="plain", max_context=64)).target


def params_of(setting: str = "greedy", **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": NEW, **SETTINGS[setting], **more})


@lru_cache(maxsize=128)
def alone(length: int, seed: int, setting: str = "greedy", new: int = NEW, arch: str = "llama") -> tuple[int, ...]:
    """What plain decoding says of a prompt by itself (held against a loop without engine in test_lossless)."""
    engine = Engine(twin_of(arch), None, EngineConfig(policy="plain"))
    return tuple(engine.generate(prompt_of(length, seed, arch), params_of(setting, max_new_tokens=new)).token_ids)


def opened(engine: Engine, length: int, seed: int = 0, policy: str | None = None, **more: Any) -> Sequence:
    arch = more.pop("arch", "llama")
    return engine.open(list(prompt_of(length, seed, arch)), params_of(**more), policy=policy)


def finish(scheduler: Scheduler, most: int = 2000) -> list[Request]:
    """Step until nothing is left; the requests in the order of their ends."""
    ended = list[Request]()
    for _ in range(most):
        if not scheduler.has_work:
            return ended
        ended += scheduler.step()
    raise AssertionError(f"{most} rounds were not enough")


def is_whole(engine: Engine) -> bool:
    """True if every chunk is free, the drafter's too, and the model has its own attention."""
    pools = [engine.pool] + ([engine.drafter.pool] if hasattr(engine.drafter, "pool") else [])
    own = engine.target.model.config.get_text_config()._attn_implementation
    return own == "sdpa" and all(p.num_free == p.num_chunks and p.check_integrity() == "" for p in pools)


@lru_cache(maxsize=4)
def drafter_of(name: str) -> Any:
    """An EAGLE-3 head that fits, or another small model."""
    if name == "eagle":
        return Eagle3Drafter(heads.loaded(), window=32, cost=cost_of(0.01))
    return ModelDrafter(tiny_model("gemma3", seed=4), VOCAB, window=24, cost=cost_of(0.01))
