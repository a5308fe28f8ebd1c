"""The promise again, with drafters: whoever drafts and whichever policy asks, the output is plain decoding's.

float64 models built from config, exact equality; scripted drafters are hostile, model drafters are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from longgraft.config import EngineConfig, SamplingParams
from longgraft.draft.block import BlockDrafter, load_block_drafter
from longgraft.draft.eagle import Eagle3Drafter
from longgraft.draft.lm import ModelDrafter
from longgraft.engine import Engine
from longgraft.resolve import resolve
from longgraft.sampler import Sampler
from tests import engines
from tests.cases import plain_generate
from tests.draft import blocks, heads
from tests.drafters import DRAFTERS
from tests.engines import cost_of, model_of, prompt_of
from tests.models import VOCAB, tiny_model

PROMPT, NEW = prompt_of(60), 18
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "t0.7": {"temperature": 0.7, "top_k": 0, "seed": 21},
    "t1.5": {"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 22},
}
POLICIES = ("dense", "pruned", "paper", "retrieval", "adaptive", "plain")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def params_of(setting: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, **SETTINGS[setting])


@lru_cache(maxsize=8)
def expected(setting: str) -> tuple[int, ...]:
    sampler = Sampler(resolve(params_of(setting), None, VOCAB), PROMPT, VOCAB)
    return tuple(plain_generate(tiny_model("llama"), PROMPT, lambda *args: sampler.draw(*args).token_id, NEW))


def same_model() -> ModelDrafter:
    """Drafts with the target's own weights: all it says is right at temperature 0."""
    return ModelDrafter(tiny_model("llama"), VOCAB, cost=cost_of(0.01))


def other_model() -> ModelDrafter:
    """Drafts with unrelated weights of another architecture, through a small window."""
    return ModelDrafter(tiny_model("gemma3", seed=4), VOCAB, window=24, cost=cost_of(0.01))


def eagle_head() -> Eagle3Drafter:
    """An EAGLE-3 head with random weights, a small window and cheap passes."""
    return Eagle3Drafter(heads.loaded(), window=32, cost=cost_of(0.01))


def block_drafter() -> BlockDrafter:
    """A DFlash drafter with random weights; the files are read before the folder goes."""
    with TemporaryDirectory() as folder:
        path = blocks.save(Path(folder) / "block", blocks.ZLAB, blocks.tensors())
        return load_block_drafter(path, model_of())


MODELS: dict[str, Callable[[], Any]] = {
    "same_model": same_model,
    "other_model": other_model,
    "eagle_head": eagle_head,
    "block_drafter": block_drafter,
}


@lru_cache(maxsize=8)
def engine_with(name: str) -> Engine:
    return Engine(model_of(), None, EngineConfig(), drafter=MODELS[name](), cost=cost_of(0.3))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_model_drafters_change_nothing(name: str, policy: str, setting: str) -> None:
    engine = engine_with(name)
    output = engine.generate(PROMPT, params_of(setting), policy=policy)
    assert output.token_ids == expected(setting)
    assert engine.pool.num_free == engine.pool.num_chunks
    pool = getattr(engine.drafter, "pool", None)
    assert pool is None or pool.num_free == pool.num_chunks
    if name == "same_model" and setting == "greedy" and policy in ("dense", "pruned", "paper"):
        assert output.stats["acceptance_length"] > 4


@pytest.mark.parametrize("setting", ["greedy", "t1.5"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_whatever_is_drafted_adaptive_changes_nothing(name: str, setting: str) -> None:
    drafter = DRAFTERS[name](PROMPT + list(expected(setting)))
    engine = Engine(model_of(), None, EngineConfig(), drafter=drafter, cost=cost_of(0.05))
    output = engine.generate(PROMPT, params_of(setting))
    assert output.token_ids == expected(setting)
    assert engine.pool.num_free == engine.pool.num_chunks and engine.pool.check_integrity() == ""


def test_policies_share_a_batch() -> None:
    """Requests of all policies run side by side, drafters and all."""
    engine = engine_with("same_model")
    batch = [engine.open(PROMPT, params_of("greedy"), policy=policy) for policy in POLICIES]
    for _ in engine.run(batch):
        pass
    assert {tuple(seq.new_token_ids) for seq in batch} == {expected("greedy")}
    assert engine.pool.num_free == engine.pool.num_chunks
