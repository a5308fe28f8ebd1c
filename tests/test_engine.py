"""The engine as its users meet it: prompts, batches, streams, outputs, and a pool that is whole after anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from longgraft.config import EngineConfig, GraftError, Output, SamplingParams
from longgraft.engine import Engine
from longgraft.sequence import Sequence
from longgraft.tree import Acceptance, Level, Source, TreeBuilder, Verification
from tests import engines
from tests.cases import SOURCES, plain_generate
from tests.engines import cost_of, engine_for, model_of, prompt_of
from tests.models import VOCAB
from tests.small_tokenizers import LINES, byte_level
from tests.sources import Right

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
CHUNK = 2 * 2 * 2 * 16 * 256 * 8  # K and V, layers, heads, head size, rows, bytes of float64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@lru_cache(maxsize=64)
def _truth(prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    return tuple(plain_generate(model_of(), prompt, n=new))


def truth_of(prompt: list[int], new: int = 24) -> list[int]:
    """What plain decoding says; not to be asked for while an engine runs the model."""
    return list(_truth(tuple(prompt), new))


def is_whole(engine: Engine) -> bool:
    """True if every chunk is free, and the model has its own attention."""
    pool = engine.pool
    own = engine.target.model.config.get_text_config()._attn_implementation
    return pool.num_free == pool.num_chunks and pool.check_integrity() == "" and own == "sdpa"


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


# The pool is whole after anything -----------------------------------------------------------------------------------


class Trouble(Exception):
    pass


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


# Output -------------------------------------------------------------------------------------------------------------


def test_copied_tokens_point_at_their_place() -> None:
    """Where the source is prompt or history, the origin holds the same token, before the token itself."""
    seen = set()
    for seed in range(3):
        prompt = prompt_of(300, seed)
        output = engine_for().generate(prompt, SamplingParams(max_new_tokens=80, temperature=0.0))
        text = prompt + list(output.token_ids)
        assert len(output.sources) == len(output.origins) == len(output.token_ids) == 80
        for at, (source, (document, offset)) in enumerate(zip(output.sources, output.origins)):
            seen.add(source)
            if source in (Source.PROMPT, Source.HISTORY):
                assert document == 0 and 0 <= offset < len(prompt) + at
                assert text[offset] == output.token_ids[at]
                assert (offset < len(prompt)) == (source == Source.PROMPT)
            else:
                assert (document, offset) == (-1, -1)
    assert seen >= {Source.ROOT, Source.PROMPT, Source.HISTORY, Source.SUCCESSOR}


def test_numbers_of_an_output_agree() -> None:
    prompt = prompt_of(200)
    output = engine_for().generate(prompt, SamplingParams(max_new_tokens=40, temperature=0.0, logprobs=2, seed=5))
    stats = output.stats
    assert output.prompt_len == stats["prompt_tokens"] == 200 and output.seed == 5
    assert (
        len(output.token_ids) == len(output.logprobs) == stats["new_tokens"] == sum(stats["new_tokens_by_round"]) == 40
    )
    assert stats["rounds"] == len(stats["accepted_by_round"])
    assert stats["nodes"] == sum(n for n, _ in stats["accepted_by_round"]) == sum(stats["nodes_by_source"].values())
    assert (
        stats["accepted"] == sum(a for _, a in stats["accepted_by_round"]) == sum(stats["accepted_by_source"].values())
    )
    assert stats["accepted"] == sum(source != Source.ROOT for source in output.sources)
    assert stats["accepted"] + stats["rounds"] >= 40 >= stats["accepted"]
    assert {"prefill", "plan", "verify", "accept", "extend", "index"} <= stats["seconds_by_stage"].keys()
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)


def test_no_new_tokens_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tokenizer=byte_level())
    monkeypatch.setattr(engine.target, "forward", lambda *a, **k: pytest.fail("something was computed"))
    params = SamplingParams(max_new_tokens=0)
    output = engine.generate("the lazy dog", params)
    assert (output.token_ids, output.text, output.finish_reason, output.stats["rounds"]) == ((), "", "length", 0)
    assert list(engine.stream("the lazy dog", params)) == []
    assert [o.finish_reason for o in engine.generate([[1], [2, 3]], params)] == ["length"] * 2


def test_a_prompt_that_fills_the_context_is_no_work() -> None:
    output = engine_for(max_context=64).generate([1] * 64, GREEDY)
    assert (output.token_ids, output.finish_reason) == ((), "context")


@pytest.mark.parametrize("max_nodes", [0, 1, 5, 1023])
def test_a_round_has_no_more_nodes_than_allowed(max_nodes: int) -> None:
    """Whatever the index proposes; and with room for none, every round is plain."""
    prompt = prompt_of(40)
    engine = engine_for(source="very_long", truth=prompt + truth_of(prompt), max_nodes=max_nodes)
    output = engine.generate(prompt, GREEDY)
    assert list(output.token_ids) == truth_of(prompt)
    assert max(n for n, _ in output.stats["accepted_by_round"]) == min(max_nodes, 23)


def test_samples_differ_by_their_index_and_repeat_by_their_seed() -> None:
    engine, prompt = engine_for(), prompt_of(60)

    def sample(**settings: Any) -> tuple[int, ...]:
        return engine.generate(
            prompt, SamplingParams(max_new_tokens=20, temperature=1.0, top_k=0, **settings)
        ).token_ids

    samples = [sample(seed=3, sample_index=index) for index in range(6)]
    assert len(set(samples)) == 6
    assert samples == [sample(seed=3, sample_index=index) for index in range(6)]
    assert sample(seed=4) not in samples


def test_the_models_own_defaults_count() -> None:
    """Its generation_config says when to stop, unless the request does."""
    model, prompt = model_of(), prompt_of(60)
    truth = truth_of(prompt)
    before = model.generation_config
    model.generation_config = hf.GenerationConfig(eos_token_id=[truth[6], truth[9]])
    try:
        engine = engine_for()
        stopped = engine.generate(prompt, GREEDY)
        assert list(stopped.token_ids) == truth[: truth.index(truth[6]) + 1] and stopped.finish_reason == "eos"
        assert len(engine.generate(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True)).token_ids) == 24
    finally:
        model.generation_config = before


# Text ---------------------------------------------------------------------------------------------------------------


class Scripted(hf.LogitsProcessor):
    """Makes the model write one text."""

    def __init__(self, prompt_len: int, script: list[int]) -> None:
        self.prompt_len, self.script = prompt_len, script

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        wanted = self.script[(input_ids.shape[1] - self.prompt_len) % len(self.script)]
        return torch.full_like(scores, -100.0).index_fill_(1, torch.tensor([wanted]), 100.0)


EMOJI = "😀 née 👩‍👩‍👧‍👦 日本語 🇩🇪❤️ ok — “end” 😃"


@pytest.fixture(scope="module")
def writer() -> Engine:
    """An engine whose proposals are always right, so that many tokens are committed at once."""
    return engine_for(tokenizer=byte_level(), model=wide_model())


def wide_model() -> Any:
    """A model with a row for every id of the tokenizer."""
    config = hf.AutoConfig.for_model(
        "llama", vocab_size=330, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def write(writer: Engine, text: str, block: int, **settings: Any) -> tuple[list[str], Output]:
    """Stream `text` with `block` proposals a round, and generate it at once; return the pieces and the output."""
    script = writer.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = writer.tokenizer(LINES[0])["input_ids"]
    index = lambda v: SOURCES["right"](prompt + script)  # noqa: E731
    engine = Engine(writer.target.model, writer.tokenizer, EngineConfig(max_nodes=block), cost=cost_of(), index=index)
    params = SamplingParams(
        **{
            "max_new_tokens": len(script),
            "temperature": 0.0,
            "processors": (Scripted(len(prompt), script),),
            **settings,
        }
    )
    return list(engine.stream(prompt, params)), engine.generate(prompt, params)


@pytest.mark.parametrize("block", [0, 1, 3, 60])
def test_a_stream_never_splits_a_character(writer: Engine, block: int) -> None:
    pieces, output = write(writer, EMOJI, block)
    assert "".join(pieces) == output.text == EMOJI
    assert not any("\ufffd" in piece for piece in pieces) and all(pieces)
    if block == 0:
        assert output.stats["rounds"] == len(output.token_ids) > len(EMOJI)


@pytest.mark.parametrize("block", [0, 2, 60])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("日本",), "😀 née 👩‍👩‍👧‍👦 "),
        (("née", "😀 "), ""),
        (("❤️ ok —", "nowhere"), "😀 née 👩‍👩‍👧‍👦 日本語 🇩🇪"),
        (("end” 😃😃",), EMOJI),
    ],
)
def test_text_ends_before_a_stop_string(writer: Engine, block: int, stop: tuple[str, ...], expected: str) -> None:
    pieces, output = write(writer, EMOJI, block, stop=stop, logprobs=0)
    assert "".join(pieces) == output.text == expected
    is_stopped = expected != EMOJI
    assert output.finish_reason == ("stop" if is_stopped else "length")
    decoded = writer.tokenizer.decode(output.token_ids)
    assert decoded.startswith(expected) and (any(s in decoded for s in stop) == is_stopped)
    assert not any(s in writer.tokenizer.decode(output.token_ids[:-1]) for s in stop), "a token too many"
    assert len(output.logprobs) == len(output.token_ids) == len(output.sources) == output.stats["new_tokens"]


def test_a_text_cut_within_a_character_says_so(writer: Engine) -> None:
    pieces, output = write(writer, "ab😀", 60, max_new_tokens=4)
    assert "".join(pieces) == output.text and output.text.startswith("ab") and output.text.endswith("\ufffd")


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
