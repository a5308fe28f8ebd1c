"""Requests that begin alike: the same answers and the same trees, with fewer rows computed, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longgraft.cache import SequenceCache
from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.kernels.rows_linear import is_available
from tests import engines
from tests.engines import cost_of, engine_for, model_of, prompt_of
from tests.models import tiny_model
from tests.prefix_cases import (
    CHUNK,
    DOCUMENT,
    FIRST,
    GREEDY,
    HOT,
    NEW,
    SECOND,
    is_whole,
    rows_of,
    trees_of,
    truth,
)
from tests.test_lossless_drafters import MODELS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss", "phi3_longrope"])
def test_a_second_question_is_answered_as_if_it_were_the_first(arch: str, params: SamplingParams) -> None:
    document = prompt_of(600, arch=arch)
    first, second = document + prompt_of(40, 1, arch), document + prompt_of(37, 2, arch)
    warm, cold = engine_for(arch), engine_for(arch, prefix_cache=False)
    warm.generate(first, params)
    output, alone = warm.generate(second, params), cold.generate(second, params)
    assert trees_of(output) == trees_of(alone)
    assert output.stats["prefix_rows"] >= 600 and output.stats["prefix_chunks"] == 2
    assert alone.stats["prefix_rows"] == 0 and cold.pool.num_idle == 0
    assert is_whole(warm)


def test_the_oracle_agrees() -> None:
    engine = engine_for()
    for prompt in (FIRST, SECOND, FIRST, SECOND[:300], DOCUMENT):
        output = engine.generate(prompt, GREEDY)
        assert list(output.token_ids) == truth(prompt)
    assert engine.prefixes.summary() | {"chunks": 0} == {
        "requests": 5,
        "hits": 4,
        "rows": 600 + 639 + 299 + 599,
        "chunks": 0,
        "dropped": 0,
        "spilled": 0,
        "restored": 0,
    }


def test_a_growing_chat_reads_only_what_is_new() -> None:
    engine, text = engine_for(), list(DOCUMENT)
    for turn in range(4):
        text += prompt_of(50, 5 + turn)
        output = engine.generate(text, HOT)
        assert output.token_ids == engine_for(prefix_cache=False).generate(text, HOT).token_ids
        assert output.stats["prefix_rows"] >= (len(text) - 51 if turn else 0)
        text += output.token_ids
    assert is_whole(engine)


def test_several_answers_to_one_prompt_read_it_once() -> None:
    """Side by side: the second and third begin while the first still runs, within its last chunk."""
    engine = engine_for()
    batch = [
        engine.open(FIRST, SamplingParams(temperature=1.0, seed=1, sample_index=number, max_new_tokens=NEW))
        for number in range(3)
    ]
    for _ in engine.run(batch):
        assert all(seq.cache.check_integrity() == "" for seq in batch)
    assert [seq.stats.prefix_rows for seq in batch] == [0, 639, 639]
    assert len({tuple(seq.new_token_ids) for seq in batch}) > 1
    alone = engine_for(prefix_cache=False)
    for number, seq in enumerate(batch):
        params = SamplingParams(temperature=1.0, seed=1, sample_index=number, max_new_tokens=NEW)
        assert list(alone.generate(FIRST, params).token_ids) == seq.new_token_ids
    assert is_whole(engine)


def test_a_running_sequence_whose_end_moved_still_serves_others() -> None:
    """A fork makes it write into a copy of its last chunk; what it had there belongs to the fork, then to others."""
    engine = engine_for()
    seq = engine.open(FIRST, GREEDY)
    rounds = engine.run([seq])
    next(rounds)
    twin, before = seq.cache.fork(), seq.cache.chunks
    next(rounds)
    assert seq.cache.chunks[-1] != before[-1]
    twin.release()
    other = SequenceCache(engine.pool)
    other.reserve(256 * engine.pool.num_free)
    for layer in range(2):
        engine.pool.keys[layer].view(-1, 256, 2, 16)[list(other.chunks)] = 7.0
    other.release()
    output = engine.generate(FIRST, GREEDY)
    assert output.stats["prefix_rows"] == 639 and list(output.token_ids) == truth(FIRST)
    rounds.close()
    assert is_whole(engine)


def test_low_precision_reuses_only_what_a_cold_run_computes_alike() -> None:
    """Whole forwards of the prompt's grid, never an answer; every reused row has the bits of a cold run."""
    model = tiny_model("llama", torch.float32)
    warm = engine_for(model=model, prefill_rows=96)
    cold = engine_for(model=model, prefill_rows=96, prefix_cache=False)
    assert warm.prefixes.grid == 96
    first = warm.generate(FIRST, GREEDY)
    for prompt, rows in ((SECOND, 576), (FIRST + list(first.token_ids), 576), (FIRST[:400], 384), (FIRST[:90], 0)):
        (reused, keys), (_, own) = (rows_of(engine, prompt) for engine in (warm, cold))
        assert reused == rows
        assert all(torch.equal(one[:rows], other[:rows]) for one, other in zip(keys, own))
    assert is_whole(warm)


def test_any_row_is_reused_if_asked() -> None:
    engine = engine_for(model=tiny_model("llama", torch.float32), prefix_rows=True)
    first = engine.generate(FIRST, GREEDY)
    output = engine.generate(FIRST + list(first.token_ids) + [5], GREEDY)
    assert output.stats["prefix_rows"] == len(FIRST) + NEW - 1


@pytest.mark.skipif(not is_available(), reason="needs the native kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exact_mode_gives_the_bits_of_a_cold_run(dtype: torch.dtype) -> None:
    """Reused, copied and decoded rows, what is computed behind them, and every score."""
    model = tiny_model("llama", dtype)
    warm, cold = (engine_for(model=model, exact=True, prefix_cache=is_on) for is_on in (True, False))
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW, logprobs=5)
    chat = FIRST + list(warm.generate(FIRST, params).token_ids) + prompt_of(30, 3)
    for prompt in (chat, SECOND, DOCUMENT):
        (reused, keys), (_, own) = (rows_of(engine, prompt) for engine in (warm, cold))
        assert reused >= 599 and all(map(torch.equal, keys, own))
        answers = [engine.generate(prompt, params) for engine in (warm, cold)]
        assert answers[0].logprobs == answers[1].logprobs


def test_a_full_pool_drops_what_was_used_longest_ago() -> None:
    engine = engine_for(kv_bytes=4 * CHUNK)
    texts = [prompt_of(500, seed) for seed in range(4)]
    for text in (*texts, texts[3], texts[0]):
        output = engine.generate(text, GREEDY)
        assert list(output.token_ids) == truth(text)
        assert is_whole(engine)
    assert engine.prefixes.summary()["dropped"] > 0


def test_admission_counts_idle_chunks_as_free() -> None:
    engine = engine_for(kv_bytes=3 * CHUNK, max_nodes=8)
    engine.generate(prompt_of(700), GREEDY)
    assert engine.pool.num_idle == 3 == engine.pool.num_free
    outputs = engine.generate([prompt_of(480, 1), prompt_of(200, 2)], GREEDY)
    for seed, output in zip((1, 2), outputs):
        prompt = prompt_of(480 if seed == 1 else 200, seed)
        assert list(output.token_ids) == truth(prompt)


def test_no_room_for_a_copy_means_fewer_rows() -> None:
    engine = engine_for(kv_bytes=3 * CHUNK, max_nodes=0)
    engine.generate(prompt_of(600), GREEDY)
    holder = SequenceCache(engine.pool)
    seq = engine.open(prompt_of(600), GREEDY)
    match_free = engine.pool.num_free
    engine.prefixes.begin(seq)
    assert seq.cache.length == 512 and engine.pool.num_free == match_free - 2
    seq.cache.release()
    holder.release()
    assert is_whole(engine)


def test_a_cancelled_prompt_keeps_what_was_read() -> None:
    engine = engine_for(prefill_rows=128)

    def stop(done: int, *_: float) -> None:
        if done == 384:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(FIRST, GREEDY, progress=stop)
    assert is_whole(engine)
    output = engine.generate(FIRST, GREEDY)
    assert output.stats["prefix_rows"] == 384
    assert list(output.token_ids) == truth(FIRST)


@pytest.mark.parametrize("broken", ["index", "drafter", "target"])
def test_failures_leak_nothing(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model_of(), None, EngineConfig(), drafter=MODELS["eagle_head"](), cost=cost_of(0.02))
    engine.generate(FIRST, GREEDY)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        place: Any = {"index": engine.retrieval, "drafter": engine.drafter, "target": engine.target}[broken]
        name = {"index": "new_index", "drafter": "extend", "target": "forward"}[broken]
        patch.setattr(place, name, fail)
        with pytest.raises(RuntimeError, match="injected"):
            engine.generate(SECOND, GREEDY, policy="dense")
    assert is_whole(engine)
    assert list(engine.generate(SECOND, GREEDY).token_ids) == truth(SECOND)


def test_many_random_requests_leave_nothing_behind() -> None:
    """Texts that share beginnings, cancelled at random, in a pool too small for them."""
    engine = engine_for(kv_bytes=6 * CHUNK, max_nodes=16)
    rng = np.random.default_rng(0)
    for _ in range(40):
        prompt = [*prompt_of(700, int(rng.integers(3)))[: int(rng.integers(1, 700))], int(rng.integers(300))]
        seq = engine.open(prompt, SamplingParams(temperature=0.8, seed=1, max_new_tokens=int(rng.integers(1, 9))))
        rounds = engine.run([seq])
        for _ in zip(range(int(rng.integers(0, 4))), rounds):
            pass
        rounds.close()
        seq.cache.release()
        assert is_whole(engine)
    summary = engine.prefixes.summary()
    assert summary["hits"] > 10 and summary["dropped"] > 5
    engine.prefixes.clear()
    assert engine.pool.num_idle == 0 and is_whole(engine)


def test_spilled_chunks_come_back(tmp_path: Path) -> None:
    engine = engine_for(kv_bytes=4 * CHUNK, prefix_spill=str(tmp_path))
    texts = [prompt_of(600, seed) for seed in range(3)]
    for text in texts * 2:
        assert list(engine.generate(text, GREEDY).token_ids) == truth(text)
        assert is_whole(engine)
    summary = engine.prefixes.summary()
    assert summary["restored"] >= 4 and summary["spilled"] >= 4
    engine.prefixes.clear()
    assert not list(tmp_path.glob("*/*"))
