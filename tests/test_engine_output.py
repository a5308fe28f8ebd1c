"""What comes out of the engine: tokens with their origin, numbers that agree, text and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from longgraft.config import EngineConfig, Output, SamplingParams
from longgraft.engine import Engine
from longgraft.tree import Source
from tests import engines
from tests.cases import SOURCES
from tests.engines import cost_of, engine_for, model_of, prompt_of
from tests.small_tokenizers import LINES, byte_level
from tests.truths import GREEDY, truth_of


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


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
