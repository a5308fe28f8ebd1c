"""What drafters and dense stores read beside the keys is the same with and without hits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.index.dense_store import DenseStore
from tests import engines
from tests.engines import cost_of, engine_for, model_of, prompt_of
from tests.prefix_cases import (
    DOCUMENT,
    FIRST,
    GREEDY,
    SECOND,
    is_whole,
    trees_of,
    truth,
)
from tests.test_lossless_drafters import MODELS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.mark.parametrize("policy, temperature", [("dense", 0.0), ("adaptive", 0.9)])
@pytest.mark.parametrize("name", MODELS)
def test_drafters_draft_alike_with_and_without_hits(name: str, policy: str, temperature: float) -> None:
    """Second questions (shorter, longer, all of the text known) and a chat's next turn."""
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=5)
    document = DOCUMENT[:290]
    warm, cold = (
        Engine(model_of(), None, EngineConfig(prefix_cache=is_on), drafter=MODELS[name](), cost=cost_of(0.02))
        for is_on in (True, False)
    )
    # Each measured its own costs when it was made: what is asked of a drafter must not hang on that here.
    held = "_cost" if name.startswith("eagle") else "cost"
    assert warm.drafter.cost_table is not None
    setattr(cold.drafter, held, getattr(warm.drafter, held))
    prompts = [document + prompt_of(20, 1), document + prompt_of(35, 2), document[:270], document + prompt_of(20, 1)]
    for number, prompt in enumerate(prompts):
        output, alone = (engine.generate(prompt, params, policy=policy) for engine in (warm, cold))
        assert trees_of(output) == trees_of(alone)
        assert output.stats["draft_rows"] == alone.stats["draft_rows"]
        assert output.stats["prefix_rows"] >= 269 or number == 0
    chat = prompts[-1] + list(output.token_ids) + prompt_of(3, 8)
    output, alone = (engine.generate(chat, params, policy=policy) for engine in (warm, cold))
    assert trees_of(output) == trees_of(alone) and output.stats["prefix_rows"] == len(chat) - 4
    assert is_whole(warm)


def test_rows_of_plain_requests_serve_drafters_too() -> None:
    warm, cold = (
        Engine(model_of(), None, EngineConfig(prefix_cache=on), drafter=MODELS["eagle_head"](), cost=cost_of(0.02))
        for on in (True, False)
    )
    warm.generate(FIRST, GREEDY, policy="plain")
    output, alone = (engine.generate(SECOND, GREEDY, policy="dense") for engine in (warm, cold))
    assert output.stats["prefix_rows"] == 600 and trees_of(output) == trees_of(alone)


@pytest.mark.parametrize("name", ["eagle_head", "block_drafter"])
def test_without_side_rows_a_drafter_uses_later_positions(name: str, tmp_path: Path) -> None:
    """Rows saved by an engine without a drafter: the text is right, and the drafter's window begins behind them."""
    plain = engine_for()
    plain.save_prefix(str(tmp_path / "p"), DOCUMENT)
    engine = Engine(model_of(), None, EngineConfig(), drafter=MODELS[name](), cost=cost_of(0.02))
    engine.load_prefix(str(tmp_path / "p"))
    seen: list[tuple[int, int]] = []
    take = engine.drafter.prefill

    def prefill(seq: Any, first: int, features: torch.Tensor) -> None:
        seen.append((first, len(features)))
        take(seq, first, features)

    engine.drafter.prefill = prefill  # type: ignore[method-assign]
    output = engine.generate(SECOND, GREEDY, policy="dense")
    assert list(output.token_ids) == truth(SECOND)
    assert output.stats["prefix_rows"] == 600
    window = engine.drafter.feature_window
    assert seen == [(max(600, 636 - window), min(36, window))]
    assert is_whole(engine)


def test_all_reused_and_no_side_rows_lets_the_drafter_step_aside(tmp_path: Path) -> None:
    engine_for().save_prefix(str(tmp_path / "p"), DOCUMENT)
    engine = Engine(model_of(), None, EngineConfig(), drafter=MODELS["eagle_head"](), cost=cost_of(0.02))
    engine.load_prefix(str(tmp_path / "p"))
    output = engine.generate(DOCUMENT, GREEDY, policy="dense")
    assert list(output.token_ids) == truth(DOCUMENT)
    assert output.stats["prefix_rows"] == 599


def test_a_dense_store_gets_the_same_keys() -> None:
    """States beside reused rows are those of a cold run; rows without any are skipped."""
    drafter = MODELS["eagle_head"]
    warm, cold = (Engine(model_of(), None, EngineConfig(), drafter=drafter(), cost=cost_of(0.02)) for _ in range(2))
    warm.generate(FIRST, GREEDY)
    stores = []
    for engine in (warm, cold):
        seq = engine.open(SECOND, GREEDY)
        with engine.target.session():
            engine.prefill(seq)
        store, (begin, end) = DenseStore(dim=16, fit_after=100, backend="numpy"), seq.cache.side_rows
        store.skip(begin)
        store.extend(seq.cache.read_side(begin, end)[:, :64].float().numpy())
        stores.append((store, begin, seq.cache.read_side(end - 1, end)[0, :64].float().numpy()))
        seq.cache.release()
    (one, first, state), (other, begin, _) = stores
    assert (first, begin, len(one), len(other)) == (0, 0, 636, 636)
    for mine, own in zip(one.search(state, 5), other.search(state, 5)):
        assert np.array_equal(mine, own)
