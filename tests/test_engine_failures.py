"""The pool and the model are whole after anything that fails or is left early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from longgraft.config import GraftError, SamplingParams
from longgraft.engine import Engine
from tests import engines
from tests.cases import SOURCES
from tests.engines import cost_of, engine_for, model_of, prompt_of
from tests.models import VOCAB
from tests.small_tokenizers import byte_level
from tests.sources import Right
from tests.truths import GREEDY, Trouble, is_whole, truth_of


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


# The pool is whole after anything -----------------------------------------------------------------------------------


class Failing(Right):
    """An index that fails in one of its calls, once the output has begun."""

    def __init__(self, truth: list[int], where: str, error: type[BaseException]) -> None:
        super().__init__(truth)
        self.where, self.error, self.prompt_len = where, error, 0

    def fail(self, where: str) -> None:
        if where == self.where and self.length > self.prompt_len:
            raise self.error

    def extend(self, token_ids: Any, learn: bool = False) -> None:
        super().extend(token_ids, learn)
        self.prompt_len = self.prompt_len or self.length
        self.fail("extend")

    def observe(self, token_ids: Any, top_ids: Any) -> None:
        self.fail("observe")

    def draft(self, budget: int, path: Any = (), at: int = 0) -> Any:
        self.fail("draft")
        return super().draft(3, path, at)


@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["extend", "observe", "draft"])
def test_after_an_error_in_the_index(where: str, error: type[BaseException]) -> None:
    prompt = prompt_of(250)
    truth = prompt + truth_of(prompt)
    engine = Engine(model_of(), cost=cost_of(), index=lambda v: Failing(truth, where, error))
    with pytest.raises(error):
        engine.generate([prompt, prompt], GREEDY)
    assert is_whole(engine)
    engine.retrieval.new_index = lambda v: SOURCES["right"](truth)
    assert list(engine.generate(prompt, GREEDY).token_ids) == truth[250:], "the engine can be used again"


@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_after_an_error_in_the_model(call: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """While the prompt is read, and in a round."""
    engine, prompt = engine_for(prefill_rows=100), prompt_of(250)
    layer, calls = engine.target.model.model.layers[1], []
    forward = layer.forward

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) >= call:
            raise error
        return forward(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", failing)
        with pytest.raises(error):
            engine.generate([prompt, prompt[:40]], GREEDY)
    assert is_whole(engine)
    assert list(engine.generate(prompt, GREEDY).token_ids) == truth_of(prompt)


class Breaking(hf.LogitsProcessor):
    """Fails, or forbids everything, at one output position."""

    def __init__(self, length: int, error: type[BaseException] | None) -> None:
        self.length, self.error = length, error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.length:
            return scores
        if self.error is not None:
            raise self.error
        return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt, None])
def test_after_an_error_in_a_processor(error: type[BaseException] | None) -> None:
    engine, prompt = engine_for(), prompt_of(100)
    with pytest.raises(error or GraftError):
        engine.generate(prompt, SamplingParams(temperature=0.0, processors=(Breaking(105, error),)))
    assert is_whole(engine)
    assert list(engine.generate(prompt, GREEDY).token_ids) == truth_of(prompt)


def test_words_that_forbid_everything_are_one_sentence() -> None:
    engine = engine_for()
    everything = [[token] for token in range(VOCAB)]
    for settings in ({"bad_words_ids": everything}, {"logit_bias": dict.fromkeys(range(VOCAB), -np.inf)}):
        with pytest.raises(GraftError, match="every token is forbidden at output position 0: loosen the processors"):
            engine.generate(prompt_of(20), SamplingParams(temperature=0.0, **settings))
        assert is_whole(engine)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_run_that_is_left_early_keeps_what_was_committed(rounds: int) -> None:
    engine, prompt = engine_for(), prompt_of(250)
    seq = engine.open(prompt, GREEDY)
    running = engine.run([seq])
    committed = [token for _ in range(rounds) for token in next(running)[0]]
    running.close()
    output = engine.output(seq)
    assert list(output.token_ids) == committed == truth_of(prompt)[: len(committed)]
    assert output.finish_reason == "cancelled" and len(output.sources) == len(committed)
    assert is_whole(engine)


def test_a_stream_that_is_left_early_or_dropped() -> None:
    engine = engine_for(tokenizer=byte_level())
    stream = engine.stream(prompt_of(100), GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert is_whole(engine)
    stream = engine.stream(prompt_of(100), GREEDY)
    next(stream)
    del stream
    assert is_whole(engine)


@pytest.mark.parametrize("first_ends", [True, False])
def test_two_runs_on_one_model_do_not_disturb_each_other(first_ends: bool) -> None:
    """Whichever ends first: the other must not go on with the model's own attention."""
    engine = engine_for()
    prompts = [prompt_of(60), prompt_of(90, 1)]
    seqs = [engine.open(prompt, GREEDY) for prompt in prompts]
    runs = [engine.run([seq]) for seq in seqs]
    for run in runs:
        next(run)
    for _ in runs[1 - first_ends]:
        pass
    for run in runs:
        for _ in run:
            pass
    assert [seq.new_token_ids for seq in seqs] == [truth_of(prompt) for prompt in prompts]
    assert is_whole(engine)
