"""Prompt log-probabilities: transformers' own numbers, however the prompt was read and whatever was reused of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError, Output, SamplingParams
from longgraft.engine import Engine
from longgraft.prompt_scores import PromptLogprobs, PromptScores, likeliest
from longgraft.scheduler import Scheduler
from longgraft.service import Service
from tests import engines
from tests.engines import engine_for, model_of, prompt_of
from tests.models import VOCAB, tiny_model

SCORED = SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=5)
PROMPT = prompt_of(600)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@lru_cache(maxsize=8)
def expected(arch: str = "llama", length: int = 600) -> np.ndarray[Any, Any]:
    """The model's own log-softmax of every position. [n, V]"""
    with torch.no_grad():
        logits = tiny_model(arch)(input_ids=torch.tensor([PROMPT[:length]]), use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).numpy()


def assert_right(output: Output, length: int = 600, first: int = 1, arch: str = "llama", num_top: int = 5) -> None:
    scores, want = output.prompt_logprobs, expected(arch, length)
    assert len(scores) == output.prompt_len == length
    assert [i for i, one in enumerate(scores) if one is None] == list(range(max(first, 1)))
    for position in range(max(first, 1), length):
        one, row = scores[position], want[position - 1]
        assert one is not None and one.token_id == PROMPT[position]
        assert one.logprob == pytest.approx(row[one.token_id], abs=1e-9)
        assert one.rank == 1 + np.sum(row > row[one.token_id])
        assert (one.rank == 1) == (one.token_id == row.argmax())
        order = np.argsort(-row, kind="stable")[:num_top]
        assert [token for token, _ in one.top] == order.tolist()
        assert [value for _, value in one.top] == pytest.approx(row[order].tolist(), abs=1e-9)


@pytest.mark.parametrize("rows", [1, 37, 256, 300, 1024])
def test_any_chunking_gives_the_models_own_numbers(rows: int) -> None:
    output = engine_for(prefill_rows=rows).generate(PROMPT[:40] if rows == 1 else PROMPT, SCORED)
    assert_right(output, 40 if rows == 1 else 600)
    assert output.token_ids == () and output.finish_reason == "length"


@pytest.mark.parametrize("arch", ["gemma3", "qwen3_moe", "gpt_oss"])
def test_other_attention_kinds(arch: str) -> None:
    assert_right(engine_for(arch, prefill_rows=64).generate(PROMPT[:200], SCORED), 200, arch=arch)


def test_the_second_identical_request_is_right_too_and_so_is_what_comes_after() -> None:
    engine = engine_for()
    outputs = [engine.generate(PROMPT, SCORED) for _ in range(2)]
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
    assert_right(outputs[1])
    assert outputs[1].stats["prefix_rows"] == 0
    plain = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=3))
    assert plain.stats["prefix_rows"] == 599, "a scored prompt is not published"
    assert plain.prompt_logprobs == ()
    assert engine.pool.num_free == engine.pool.num_chunks


def test_rows_before_the_first_scored_token_are_reused() -> None:
    engine = engine_for()
    engine.generate(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=1))
    params = SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=5, prompt_logprobs_from=520)
    output = engine.generate(PROMPT, params)
    assert output.stats["prefix_rows"] == 519
    assert_right(output, first=520)


@pytest.mark.parametrize("first", [0, 1, 2, 64, 598, 599, 600, 10_000])
def test_where_scoring_begins(first: int) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=2, prompt_logprobs=0, prompt_logprobs_from=first)
    output = engine_for(prefill_rows=128).generate(PROMPT, params)
    assert_right(output, first=min(first, 600), num_top=0)
    assert (
        output.token_ids == engine_for().generate(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=2)).token_ids
    )


def test_answers_and_their_log_probabilities_are_as_without() -> None:
    plain = SamplingParams(temperature=0.9, seed=3, max_new_tokens=20, logprobs=3)
    both = SamplingParams(temperature=0.9, seed=3, max_new_tokens=20, logprobs=3, prompt_logprobs=5)
    one, other = engine_for().generate(PROMPT, plain), engine_for().generate(PROMPT, both)
    assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
    assert_right(other)
    # Scored as a prompt, the answer has the numbers it had when it was drawn, ranks included.
    text = [*PROMPT, *one.token_ids]
    again = engine_for().generate(text, SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=3))
    for drawn, read in zip(one.logprobs, again.prompt_logprobs[600:]):
        assert read is not None and (drawn.token_id, drawn.rank) == (read.token_id, read.rank)
        assert drawn.logprob == pytest.approx(read.logprob, abs=1e-9)
        assert [token for token, _ in drawn.top] == [token for token, _ in read.top]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    output = engine_for().generate(PROMPT[:1], SCORED)
    assert list(output.prompt_logprobs) == [None] and output.finish_reason == "length"


def scored_beside(engine: Engine, put_back: int | None = None) -> list[Output]:
    """Outputs of one that decodes and two that are scored, one of them put back after so many rounds."""
    with closing(Scheduler(engine)) as scheduler:
        decoding = SamplingParams(temperature=0.0, max_new_tokens=40)
        both = SamplingParams(temperature=0.0, max_new_tokens=12, prompt_logprobs=5)
        asked = [(PROMPT[:50], decoding), (PROMPT[:300], SCORED), (PROMPT[:400], both)]
        requests = [scheduler.add(engine.open(text, params)) for text, params in asked]
        rounds = 0
        while scheduler.has_work:
            scheduler.step()
            rounds += 1
            if rounds == put_back and requests[2] in scheduler.running:
                scheduler._put_back(requests[2])
        assert all(request.failure is None for request in requests)
        return [engine.output(request.seq) for request in requests]


@pytest.mark.parametrize(("put_back", "prefix_cache"), [(None, True), (2, True), (2, False), (9, True), (18, False)])
def test_beside_others_and_after_being_put_back(put_back: int | None, prefix_cache: bool) -> None:
    decoded, scored, both = scored_beside(engine_for(round_rows=48, prefix_cache=prefix_cache), put_back)
    assert len(decoded.token_ids) == 40 and decoded.prompt_logprobs == ()
    assert_right(scored, 300)
    assert_right(both, 400)
    want = engine_for().generate(PROMPT[:400], SamplingParams(temperature=0.0, max_new_tokens=12))
    assert both.token_ids == want.token_ids


def test_preemption_really_came_in_the_middle_of_reading_and_of_decoding() -> None:
    times = [scored_beside(engine_for(round_rows=48), at)[2].stats["put_back"] for at in (2, 9)]
    assert times == [1, 1]


def test_through_the_service_threads_and_loops() -> None:
    with Service(engine_for()) as service:
        tickets = [service.submit(PROMPT[:length], SCORED) for length in (200, 200, 320)]
        outputs = [ticket.result(60) for ticket in tickets]

        async def read() -> list[list[int]]:
            return [block async for block in service.submit(PROMPT[:100], SCORED)]

        assert asyncio.run(read()) == []
    for output, length in zip(outputs, (200, 200, 320)):
        assert_right(output, length)


def test_one_that_is_ended_early_says_what_was_read() -> None:
    engine = engine_for(prefill_rows=64)
    with closing(Scheduler(engine)) as scheduler:
        request = scheduler.add(engine.open(PROMPT, SCORED))
        scheduler.step()
        scheduler.cancel(request)
        scheduler.sweep()
    output = engine.output(request.seq)
    assert [one is None for one in output.prompt_logprobs] == [True] + [False] * 64 + [True] * 535
    assert engine.pool.num_free == engine.pool.num_chunks


def test_never_more_than_a_forward_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = engine_for(prefill_rows=128), list[int]()
    forward = engine.target.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        logits = forward(*args, **kwargs)
        sizes.append(sum(len(part) for part in logits))
        return logits

    monkeypatch.setattr(engine.target, "forward", watched)
    engine.generate(PROMPT, SCORED)
    assert sizes == [128, 128, 128, 128, 87]
    sizes.clear()
    engine.prefixes.clear()
    engine.generate(
        PROMPT, SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=0, prompt_logprobs_from=400)
    )
    assert sizes == [0, 0, 0, 128, 87], "logits that nobody asked for"


def test_nan_is_one_sentence_and_ends_that_request_alone() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = float("nan")
    with pytest.raises(GraftError, match="prompt contain NaN"):
        PromptScores(4, 2, 8).take(0, logits, [1, 2, 3, 4])


def test_low_precision_is_reduced_in_float32() -> None:
    logits = (torch.randn(70, 300, generator=torch.Generator().manual_seed(2)) * 8).bfloat16()
    tokens = torch.randint(0, 300, (71,), generator=torch.Generator().manual_seed(3)).tolist()
    scores = PromptScores(71, 4, 300)
    scores.take(0, logits, tokens)
    want = torch.log_softmax(logits.float(), -1)
    assert scores.is_complete
    for row in range(70):
        one = scores.logprobs[row + 1]
        assert one is not None and one.logprob == float(want[row, tokens[row + 1]])
        order = np.argsort(-logits[row].float().numpy(), kind="stable")
        assert [token for token, _ in one.top] == order[:4].tolist()
        assert one.rank == 1 + order.tolist().index(tokens[row + 1]), "equal scores count by token id"


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 150), st.integers(0, 152), st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=12))
def test_rows_in_any_pieces_once_or_again(length: int, first: int, steps: list[tuple[int, bool]]) -> None:
    logits = torch.randn(length - 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    tokens = [position * 5 % 12 for position in range(length)]
    whole, pieces = PromptScores(length, 3, 12, first), PromptScores(length, 3, 12, first)
    whole.take(0, logits, tokens)
    begin = 0
    for size, is_put_back in [*steps, (length, False)]:
        begin = begin // 3 if is_put_back else begin
        end = min(length - 1, begin + size)
        if pieces.wants(begin, end):
            pieces.take(begin, logits[begin:end], tokens)
        begin = end
    assert pieces.is_complete and pieces.logprobs == whole.logprobs
    assert [one is None for one in whole.logprobs] == [p < max(first, 1) for p in range(length)]


def test_a_gap_is_a_mistake_of_whoever_reads() -> None:
    with pytest.raises(ValueError, match="row 0 is still missing"):
        PromptScores(9, 0, 4).take(2, torch.zeros(2, 4), [0] * 9)


def test_the_list_of_scores_is_a_sequence() -> None:
    scores = PromptScores(4, 2, 8)
    scores.take(0, torch.arange(24.0).reshape(3, 8), [0, 1, 2, 7])
    held = scores.logprobs
    assert len(held) == 4 and held[0] is None and held[-1] == held[3] == held[1:][2]
    assert held[3] is not None and held[3].rank == 1 and held[3].top[0][0] == 7
    assert held != PromptLogprobs(4, 2) and held != [None] and PromptLogprobs(2, 1) == PromptLogprobs(2, 1)
    with pytest.raises(IndexError):
        held[4]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 10_000))
def test_likeliest_breaks_ties_by_id(rows: int, size: int, seed: int) -> None:
    values = torch.randint(0, 4, (rows, size), generator=torch.Generator().manual_seed(seed)).float()
    count = 1 + seed % size
    want = np.argsort(-values.numpy(), axis=1, kind="stable")[:, :count]
    assert np.array_equal(likeliest(values, count), want)


def test_more_alternatives_than_tokens() -> None:
    scores = PromptScores(2, 20, 3)
    scores.take(0, torch.tensor([[1.0, 3.0, 2.0]]), [0, 2])
    assert scores.logprobs[1] is not None and [token for token, _ in scores.logprobs[1].top] == [1, 2, 0]


def test_the_model_is_the_tests_own() -> None:
    assert model_of().config.vocab_size == VOCAB
