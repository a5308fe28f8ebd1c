"""The engine as its users meet it: prompts, batches, drafters and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longgraft.config import EngineConfig, GraftError, Output, SamplingParams
from longgraft.engine import Engine
from longgraft.sequence import Sequence
from longgraft.tree import Acceptance, Level, Source, TreeBuilder, Verification
from tests import engines
from tests.cases import SOURCES
from tests.engines import cost_of, engine_for, model_of, prompt_of
from tests.models import VOCAB
from tests.small_tokenizers import byte_level
from tests.sources import Right
from tests.truths import CHUNK, GREEDY, Trouble, is_whole, truth_of


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


# Prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([[1], []], "the prompt is empty"),
        ([VOCAB], f"prompt token id {VOCAB}: expected 0 to {VOCAB - 1}"),
        ([3, -1], "prompt token id -1"),
        ([2**40], "prompt token id 1099511627776"),
        ([1.5, 2.0], "a prompt of type float: expected text or a flat sequence of token ids"),
        ([[1], [2.0]], "a prompt of type list: expected text or a flat sequence of token ids"),
        ([[[1, 2]]], "a prompt of type list: expected text or a flat sequence"),
        ([None], "a prompt of type NoneType"),
        ([5] * 65, "the prompt has 65 tokens: expected at most 64"),
        ([[5] * 3, [5] * 65], "the prompt has 65 tokens: expected at most 64"),
    ],
)
def test_a_prompt_that_cannot_run_is_one_sentence(prompt: Any, message: str) -> None:
    engine = engine_for(tokenizer=byte_level(), max_context=64)
    with pytest.raises(GraftError, match=message):
        engine.generate(prompt, GREEDY)
    assert is_whole(engine)


def test_text_needs_a_tokenizer() -> None:
    for ask in (lambda e: e.generate("hello"), lambda e: list(e.stream([1, 2]))):
        with pytest.raises(GraftError, match="this engine has no tokenizer: give token ids"):
            ask(engine_for())


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.int32)])
def test_token_ids_may_come_in_any_sequence(kind: Callable[[list[int]], Any]) -> None:
    prompt = prompt_of(30)
    output = engine_for().generate(kind(prompt), GREEDY)
    assert isinstance(output, Output) and list(output.token_ids) == truth_of(prompt)


def test_a_list_of_prompts_gives_a_list() -> None:
    engine, prompt = engine_for(tokenizer=byte_level()), prompt_of(20)
    assert engine.generate([], GREEDY) == []
    one, text, array = engine.generate([prompt, "the lazy dog", np.array(prompt)], GREEDY)
    assert one.token_ids == array.token_ids == engine.generate(prompt, GREEDY).token_ids
    assert text.token_ids == engine.generate("the lazy dog", GREEDY).token_ids
    rows = engine.generate(torch.tensor([prompt, prompt]), GREEDY)
    assert [row.token_ids for row in rows] == [one.token_ids] * 2


def test_nothing_runs_if_one_of_many_prompts_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even those that would be in an earlier wave."""
    engine = engine_for(max_context=300, kv_bytes=2 * CHUNK)
    monkeypatch.setattr(engine.target, "forward", lambda *a, **k: pytest.fail("something was computed"))
    with pytest.raises(GraftError, match="the prompt has 400 tokens"):
        engine.generate([[1] * 200, [1] * 200, [1] * 200, [1] * 400], GREEDY)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    engine = engine_for(kv_bytes=2 * CHUNK)
    with pytest.raises(GraftError, match=r"of KV cache, the pool has .* shorten them, free memory or raise kv_bytes"):
        engine.generate([1] * 500, GREEDY)
    assert is_whole(engine)
    assert len(engine.generate([1] * 400, GREEDY).token_ids) == 24


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 512])
def test_prompts_around_a_chunk(length: int) -> None:
    prompt = prompt_of(600)[:length]
    engine = engine_for(source="right", truth=prompt + truth_of(prompt, 8))
    assert list(engine.generate(prompt, SamplingParams(max_new_tokens=8, temperature=0.0)).token_ids) == truth_of(
        prompt, 8
    )
    assert is_whole(engine)


# Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [2, 4, 5, 30])
def test_a_small_pool_is_used_for_as_many_as_it_holds(chunks: int) -> None:
    """With trees of 61 rows the five requests need 2, 2, 1, 1 and 2 chunks."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((200, 220, 150, 10, 230))]
    engine = engine_for(kv_bytes=chunks * CHUNK)
    outputs = engine.generate(prompts, GREEDY)
    assert [list(output.token_ids) for output in outputs] == [truth_of(prompt) for prompt in prompts]
    assert is_whole(engine)


def test_members_may_end_at_any_time() -> None:
    """Early, late, at the context limit: the others go on."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((50, 90, 95))]
    truths = [truth_of(prompt) for prompt in prompts]
    eos = truths[0][4]
    outputs = engine_for(max_context=100).generate(
        prompts, SamplingParams(max_new_tokens=24, temperature=0.0, eos_token_ids=(eos,))
    )
    for prompt, truth, output in zip(prompts, truths, outputs):
        end = truth.index(eos) + 1 if eos in truth else 99
        assert list(output.token_ids) == truth[: min(end, 24, 100 - len(prompt))]
        assert output.finish_reason == (
            "eos" if end <= min(24, 100 - len(prompt)) else "context" if len(prompt) > 76 else "length"
        )


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    engine_for(prefill_rows=64).generate(
        prompt_of(150), GREEDY, lambda done, total, seconds: told.append((done, total))
    )
    assert told == [(64, 149), (128, 149), (149, 149)]


# Drafters -----------------------------------------------------------------------------------------------------------


class Oracle:
    """A drafter that knows the text: the true token among two others, level by level; counts what it is told."""

    def __init__(self, truth: list[int], fails: bool = False) -> None:
        self.truth, self.fails = truth, fails
        self.committed: list[int] = []
        self.resets = 0

    feature_layers: tuple[int, ...] = ()
    feature_window = 0
    cost_table = None
    in_one_pass = True

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prefill(self, sequence: Sequence, first: int, features: torch.Tensor) -> None:
        raise AssertionError("no features were asked for")

    def begin(self, sequence: Sequence) -> Oracle:
        self.rest = self.truth[len(sequence.token_ids) :]
        return self

    def expand(self, tree: TreeBuilder, nodes: Seq[int], width: int) -> Level:
        rows = [(tok, node) for node in nodes if node == 0 for tok in self.rest[:1]]
        tokens = [[(token + 1) % VOCAB, token, (token + 2) % VOCAB] for token, _ in rows]
        parents = np.repeat(np.array([node for _, node in rows], np.int32), 3)
        scores = np.tile(np.array([-1.0, -2.0, -3.0], np.float32), len(rows))
        return Level(np.array(tokens, np.int32).reshape(-1), parents, scores)

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        return 0.0

    def extend(self, sequence: Sequence, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        self.committed += token_ids

    def reset(self, sequence: Sequence) -> None:
        self.resets += 1
        if self.fails:
            raise Trouble


@pytest.mark.parametrize("source", ["empty", "wrong", "right", "siblings"])
def test_drafted_and_retrieved_nodes_share_a_tree(source: str) -> None:
    prompt = prompt_of(80)
    truth = prompt + truth_of(prompt)
    drafter = Oracle(truth)
    engine = Engine(model_of(), cost=cost_of(), drafter=drafter, index=lambda v: SOURCES[source](truth))
    output = engine.generate(prompt, GREEDY)
    assert list(output.token_ids) == truth[80:] == drafter.committed
    assert drafter.resets == 1
    assert output.stats["accepted_by_source"].get("draft", 0) > 0 or source in ("right", "siblings")
    assert max(n for n, _ in output.stats["accepted_by_round"]) <= 60


def test_a_drafter_that_fails_to_forget_holds_no_chunk() -> None:
    engine = Engine(model_of(), cost=cost_of(), drafter=Oracle([], fails=True))
    with pytest.raises(Trouble):
        engine.generate([prompt_of(20), prompt_of(30)], GREEDY)
    assert is_whole(engine)


# Settings -----------------------------------------------------------------------------------------------------------


def test_plain_never_asks_the_index() -> None:
    class Silent(Right):
        def draft(self, budget: int, path: Any = (), at: int = 0) -> Any:
            raise AssertionError("asked")

    prompt = prompt_of(50)
    output = Engine(model_of(), None, EngineConfig(policy="plain"), index=lambda v: Silent([])).generate(prompt, GREEDY)
    assert list(output.token_ids) == truth_of(prompt)
    assert output.stats["nodes"] == 0 and output.stats["rounds"] == 24
    assert set(output.sources) == {Source.ROOT}


def test_costs_come_from_a_file_or_are_measured(tmp_path: Path) -> None:
    cost_of(0.7).save(tmp_path / "costs.json")
    engine = Engine(model_of(), None, EngineConfig(cost_table=str(tmp_path / "costs.json")))
    assert engine.cost is not None and engine.cost.frozen
    assert engine.cost.rounds(2, 0)[1] == pytest.approx(1.7)
    with pytest.raises(GraftError, match="not a longgraft cost table"):
        Engine(model_of(), None, EngineConfig(cost_table=str(tmp_path / "none.json")))
    measured = Engine(model_of(), None, EngineConfig(max_context=600))
    assert measured.cost is not None and not measured.cost.frozen and is_whole(measured)
    before = measured.cost.correction.copy()
    assert list(measured.generate(prompt_of(100), GREEDY).token_ids) == truth_of(prompt_of(100))
    assert not np.array_equal(measured.cost.correction, before), "it learns from real rounds"


def test_a_pool_may_be_shared() -> None:
    first, truth = engine_for(kv_bytes=3 * CHUNK), truth_of(prompt_of(100))
    second = Engine(model_of(), cost=cost_of(), pool=first.pool)
    run = first.run([first.open(prompt_of(200), GREEDY)])
    next(run)
    assert second.pool.num_free < 3
    assert list(second.generate(prompt_of(100), GREEDY).token_ids) == truth
    run.close()
    assert is_whole(second)


def test_max_context_is_the_smaller_limit() -> None:
    assert engine_for().max_context == 2048
    assert engine_for(max_context=100).max_context == 100
    assert engine_for(max_context=9999).max_context == 2048
