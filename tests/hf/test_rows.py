"""What processors, criteria and streamers are shown, what is recorded, and where a row stops."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from longgraft.config import EngineConfig, GraftError
from tests import small_tokenizers
from tests.hf.cases import NEW, Seen, new_ids
from tests.models import tiny_model


def test_scores_and_logits_equal_those_of_generate(llama: Any, graft: Any, batch: Any) -> None:
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.4}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    theirs, ours = llama.generate(**batch, **options), graft(llama, **batch, **options)
    assert isinstance(ours, type(theirs))
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        mine, own = getattr(ours, name), getattr(theirs, name)
        assert len(mine) == len(own) == 10
        assert all(a.dtype == b.dtype for a, b in zip(mine, own))
        torch.testing.assert_close(torch.stack(mine), torch.stack(own), atol=1e-4, rtol=1e-4)
    transitions = llama.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    assert transitions.shape == (3, 10) and bool((transitions < 0).all())


def test_scores_of_ended_rows_are_zero_and_absent_ones_none(llama: Any, graft: Any, batch: Any) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    eos = new_ids(graft(llama, **batch, **options).sequences, batch["input_ids"])[1][6]
    ours = graft(llama, **batch, **options, eos_token_id=eos, output_scores=True)
    assert ours.logits is None
    end = new_ids(ours.sequences, batch["input_ids"])[1].index(eos)
    assert bool(ours.scores[end][1].any()) and not bool(ours.scores[end + 1][1].any())


def test_sampled_scores_are_filtered(llama: Any, graft: Any, prompt: Tensor) -> None:
    options = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.5, "top_k": 4}
    out = graft(llama, prompt, **options, return_dict_in_generate=True, output_scores=True, output_logits=True)
    for scores, logits, token_id in zip(out.scores, out.logits, new_ids(out.sequences, prompt)[0]):
        kept = scores[0].isfinite()
        assert int(kept.sum()) == 4 and bool(kept[token_id])
        assert torch.equal(scores[0][kept], logits[0][kept] / 0.5)


def test_every_eos_position_stops_as_generate_does(llama: Any, graft: Any, prompt: Tensor, greedy: list[int]) -> None:
    for eos in {greedy[i] for i in range(0, NEW, 3)}:
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [eos, greedy[-1]], "pad_token_id": 0}
        expected = llama.generate(prompt, **options)
        assert torch.equal(graft(llama, prompt, **options), expected)


@pytest.mark.parametrize("limit", [{"max_new_tokens": 1}, {"max_length": 97}, {"max_new_tokens": 5, "min_length": 3}])
def test_lengths(llama: Any, graft: Any, prompt: Tensor, limit: Any) -> None:
    expected = llama.generate(prompt, do_sample=False, **limit)
    assert torch.equal(graft(llama, prompt, do_sample=False, **limit), expected)


def test_a_length_criterion_of_ones_own_counts(llama: Any, graft: Any, prompt: Tensor) -> None:
    own = [hf.MaxLengthCriteria(93)]
    expected = llama.generate(prompt, do_sample=False, max_new_tokens=9, stopping_criteria=own)
    ours = graft(llama, prompt, do_sample=False, max_new_tokens=9, stopping_criteria=own)
    assert torch.equal(ours, expected) and ours.shape[1] == 93


def test_stop_strings_stop_as_in_generate(llama: Any, graft: Any, prompt: Tensor, greedy: list[int]) -> None:
    tokenizer = small_tokenizers.byte_level()
    text = next(t for i in range(4, NEW) if len(t := tokenizer.decode(greedy[i])) and "\ufffd" not in t)
    criteria = [hf.StopStringCriteria(tokenizer, [text])]
    options = {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": criteria}
    expected, stats = llama.generate(prompt, **options), dict[str, Any]()
    assert torch.equal(graft(llama, prompt, **options, graft_stats=stats), expected)
    assert expected.shape[1] < prompt.shape[1] + NEW
    assert stats["rows"][0]["finish_reason"] == "stop"


def test_stop_strings_without_a_criterion_are_an_error(llama: Any, graft: Any, prompt: Tensor) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        graft(llama, prompt, max_new_tokens=3, stop_strings=["x"], tokenizer=small_tokenizers.byte_level())


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 15])
def test_criteria_are_asked_once_a_token_and_nothing_overshoots(
    llama: Any, graft: Any, prompt: Tensor, length: int
) -> None:
    shown: list[list[list[int]]] = []
    results = []
    for run in (llama.generate, lambda *a, **o: graft(llama, *a, **o)):
        seen, counter = Seen(lambda row: len(row) >= 90 + length), Seen()
        options = {"max_new_tokens": NEW, "do_sample": False, "logits_processor": [counter.process]}
        results.append(run(prompt, **options, stopping_criteria=[seen.criterion]))
        shown += [seen.rows, counter.rows]
    assert torch.equal(results[0], results[1]) and results[0].shape[1] == 90 + length
    assert shown[0] == shown[2] and shown[1] == shown[3]
    assert [len(row) for row in shown[2]] == list(range(91, 91 + length))


def test_criteria_get_scores_if_asked_for(llama: Any, graft: Any, prompt: Tensor) -> None:
    given: list[Any] = []

    def unsure(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        given.append(scores)
        return torch.tensor([len(given) == 3])

    options = {"max_new_tokens": 9, "do_sample": False, "stopping_criteria": [unsure]}
    graft(llama, prompt, **options, return_dict_in_generate=True, output_scores=True)
    assert [len(scores) for scores in given] == [1, 2, 3] and given[0][0].shape == (1, 320)


def test_the_context_limit_is_said(llama: Any, graft: Any, prompt: Tensor) -> None:
    short = EngineConfig(policy="plain", max_context=95)
    with pytest.warns(UserWarning, match="context limit of 95"):
        assert graft(llama, prompt, do_sample=False, max_new_tokens=9, graft_config=short).shape[1] == 95


def test_a_change_of_rope_within_the_text_is_said(graft: Any) -> None:
    model = tiny_model("phi3_longrope", torch.float32)
    ids = torch.arange(500)[None] % 320
    with pytest.warns(UserWarning, match="changes its RoPE at 512 tokens"):
        assert graft(model, ids, do_sample=False, max_new_tokens=14).shape[1] == 514


@pytest.mark.parametrize("name", ["streamer", "graft_streamer"])
def test_text_streamers_get_the_text(llama: Any, graft: Any, prompt: Tensor, greedy: list[int], name: str) -> None:
    tokenizer = small_tokenizers.byte_level()
    streamer = hf.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    options = {"max_new_tokens": NEW, "do_sample": False, name: streamer}
    thread = threading.Thread(target=graft, args=(llama, prompt), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text and text == tokenizer.decode(greedy)


@pytest.mark.parametrize("name", ["streamer", "graft_streamer"])
def test_streamers_of_a_batch_get_what_generate_gives(llama: Any, graft: Any, batch: Any, name: str) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    eos = new_ids(llama.generate(**batch, **options), batch["input_ids"])[1][6]
    theirs, ours = Seen(), Seen()
    llama.generate(**batch, **options, eos_token_id=eos, streamer=theirs)
    graft(llama, **batch, **options, eos_token_id=eos, **{name: ours})
    assert ours.puts == theirs.puts and ours.is_ended


def test_two_streamers_are_refused(llama: Any, graft: Any, prompt: Tensor) -> None:
    with pytest.raises(GraftError, match="both streamer and graft_streamer"):
        graft(llama, prompt, max_new_tokens=2, streamer=Seen(), graft_streamer=Seen())
