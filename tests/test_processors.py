"""Processors: the same ones, in the same order, with the same scores as transformers' own `generate`."""

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from longgraft.config import GraftError, SamplingParams
from longgraft.processors import Bias, Penalties, build
from longgraft.resolve import resolve
from longgraft.sampler import Sampler

VOCAB = 48
EOS = [5, 6]
LENGTH = 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Keep the warnings of transformers about unusual settings out of the log."""
    level = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()
    yield
    hf.logging.set_verbosity(level)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.9, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval()


# Every way to ask for processors, alone and together.
ASKED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "no_repeat": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[3], [5], [9, 10], [1, 2, 3]]},
    "min_length": {"min_length": 9},
    "min_new_tokens": {"min_new_tokens": 4},
    "min_both": {"min_length": 9, "min_new_tokens": 2},
    "sequence_bias": {"sequence_bias": {(4,): 3.0, (7, 8): -9.0}},
    "encoder": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "forced": {"forced_bos_token_id": 0, "forced_eos_token_id": 6},
    "decay": {"exponential_decay_length_penalty": (2, 1.3)},
    "suppress": {"suppress_tokens": [1, 2, 30], "begin_suppress_tokens": [8, 9]},
    "invalid": {"remove_invalid_values": True},
    "normal": {"renormalize_logits": True},
    "watermark": {"watermarking_config": hf.WatermarkingConfig(bias=3.0)},
    "synthid": {"watermarking_config": hf.SynthIDTextWatermarkingConfig(keys=[5, 9, 3], ngram_len=2)},
    "many": {
        "sequence_bias": {(4,): 3.0},
        "repetition_penalty": 0.8,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[3]],
        "min_new_tokens": 5,
        "exponential_decay_length_penalty": (1, 1.5),
        "suppress_tokens": [0],
        "forced_eos_token_id": [5],
        "renormalize_logits": True,
    },
}
FILTERS: dict[str, dict[str, Any]] = {
    "top_h": {"top_h": 0.5, "top_k": 30},
    "typical": {"typical_p": 0.6, "temperature": 0.7},
    "epsilon": {"epsilon_cutoff": 0.03, "top_p": 0.9},
    "eta": {"eta_cutoff": 0.05, "top_k": 0},
    "all": {"temperature": 1.5, "top_h": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9},
    "normal": {"renormalize_logits": True, "top_k": 10, "repetition_penalty": 1.2},
    "watermark": {"watermarking_config": hf.WatermarkingConfig(bias=3.0), "top_p": 0.8},
}


def config_of(fields: dict[str, Any], sampling: bool) -> hf.GenerationConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hf.GenerationConfig(
            eos_token_id=EOS, pad_token_id=0, max_new_tokens=LENGTH, do_sample=sampling, **fields
        )


def compare(model: Any, prompt: list[int], fields: dict[str, Any], sampling: bool) -> None:
    """Replay the raw logits of `generate` through a sampler, step by step."""
    config = config_of(fields, sampling)
    torch.manual_seed(1)
    output = model.generate(
        torch.tensor([prompt]), generation_config=config, output_scores=True, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    params = resolve(SamplingParams(max_new_tokens=LENGTH, seed=1), config, VOCAB)
    sampler, drawing = Sampler(params, prompt, VOCAB), Sampler(params, prompt, VOCAB)
    sampler._prepare(CPU)
    token_ids = output.sequences[0].tolist()
    assert len(output.logits) == len(token_ids) - len(prompt) > 0
    for n, (logits, scores) in enumerate(zip(output.logits, output.scores), len(prompt)):
        got, is_filtered = sampler._processed(logits[0], token_ids[:n])
        assert torch.equal(got, scores[0]), f"token {n}"
        assert is_filtered or not sampling
        drawn = drawing.draw(logits[0], token_ids[:n]).token_id
        assert torch.isfinite(scores[0, drawn]) if sampling else drawn == token_ids[n]


@pytest.mark.parametrize("prompt", [[9, 10, 9], [7]])
@pytest.mark.parametrize("name", ASKED)
def test_scores_and_greedy_tokens_equal_generate(model: Any, name: str, prompt: list[int]) -> None:
    compare(model, prompt, ASKED[name], sampling=False)


@pytest.mark.parametrize("name", FILTERS)
def test_filtered_scores_equal_generate(model: Any, name: str) -> None:
    compare(model, [9, 10, 9], FILTERS[name], sampling=True)


@pytest.mark.parametrize("name", {**ASKED, **FILTERS})
def test_same_processors_in_the_same_order(model: Any, name: str) -> None:
    sampling = name in FILTERS
    config = config_of(FILTERS[name] if sampling else ASKED[name], sampling)
    own: list[Any] = [lambda ids, scores: scores]
    params = resolve(SamplingParams(max_new_tokens=LENGTH, processors=tuple(own)), config, VOCAB)
    pipeline = build(params, [9, 10, 9], VOCAB, CPU)
    config = model._prepare_generation_config(config)[0]
    config.max_length = 3 + LENGTH
    config.min_length = None if config.min_new_tokens else config.min_length
    model._prepare_special_tokens(config, device="cpu")
    theirs = model._get_logits_processor(config, 3, torch.tensor([[9, 10, 9]]), None, own, "cpu", {})
    assert pipeline is not None
    ours = pipeline.before + (pipeline.after or [])
    assert [type(p).__name__ for p in ours] == [type(p).__name__ for p in theirs]


def test_the_users_processor_takes_the_place_of_a_built_in_one() -> None:
    mine = hf.RepetitionPenaltyLogitsProcessor(2.0)
    other = hf.SuppressTokensLogitsProcessor([3])
    params = SamplingParams(repetition_penalty=1.1, bad_words_ids=[[1]], seed=0, processors=([other, mine],))
    pipeline = build(resolve(params, None, VOCAB), [1], VOCAB, CPU)
    assert pipeline is not None and pipeline.before[0] is mine
    assert [type(p).__name__ for p in pipeline.before[1:]] == [
        "NoBadWordsLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    ]


def test_nothing_asked_is_nothing_built() -> None:
    plain = resolve(SamplingParams(temperature=0.8, top_p=0.9, seed=1, logprobs=2), hf.GenerationConfig(), VOCAB)
    assert build(plain, [1, 2], VOCAB, CPU) is None
    no_eos = resolve(SamplingParams(min_new_tokens=5), None, VOCAB)
    assert build(no_eos, [1, 2], VOCAB, CPU) is None


def test_penalties_count_generated_tokens_only() -> None:
    input_ids = torch.tensor([[4, 4, 4, 2, 2, 3]])
    scores = Penalties(presence=0.5, frequency=0.25, prompt_len=3)(input_ids, torch.zeros(1, 6))
    assert scores.tolist() == [[0.0, 0.0, -1.0, -0.75, 0.0, 0.0]]
    double = Penalties(0.0, 2.0, 0)(input_ids, torch.zeros(1, 6, dtype=torch.float64))
    assert double.dtype == torch.float64 and double[0, 4] == -6.0


def test_bias_is_an_addend() -> None:
    scores = torch.ones(1, 4)
    got = Bias({0: 2.0, 3: float("-inf")})(torch.tensor([[1]]), scores)
    assert got.tolist() == [[3.0, 1.0, 1.0, float("-inf")]] and scores.tolist() == [[1.0] * 4]


class RunsTheModel(hf.UnbatchedClassifierFreeGuidanceLogitsProcessor):
    pass


@pytest.mark.parametrize(
    ("processor", "match"),
    [
        (RunsTheModel(1.5, None), "UnbatchedClassifierFreeGuidanceLogitsProcessor runs the model"),
        (hf.LogitsProcessorList([hf.ClassifierFreeGuidanceLogitsProcessor(1.5)]), "ClassifierFreeGuidance"),
        (hf.WhisperTimeStampLogitsProcessor, None),
        ("top-k", "expected callables"),
    ],
)
def test_unusable_processors_are_refused_at_once(processor: Any, match: str | None) -> None:
    params = resolve(SamplingParams(processors=(processor,)), None, VOCAB)
    if match is None:
        Sampler(params, [1], VOCAB)
        return
    with pytest.raises(GraftError, match=match):
        Sampler(params, [1], VOCAB)


def test_what_transformers_rejects_is_one_sentence() -> None:
    params = resolve(SamplingParams(), hf.GenerationConfig(no_repeat_ngram_size=-1), VOCAB)
    with pytest.raises(GraftError, match="ngram_size"):
        build(params, [1], VOCAB, CPU)
    decay = resolve(SamplingParams(), hf.GenerationConfig(exponential_decay_length_penalty=(1, 1.1)), VOCAB)
    with pytest.raises(GraftError, match="needs an EOS"):
        build(decay, [1], VOCAB, CPU)


def test_a_processor_that_returns_no_scores_is_named() -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Any:
        return scores[0]

    params = resolve(SamplingParams(processors=(broken,)), None, VOCAB)
    with pytest.raises(GraftError, match=r"shape \[1, 48\]"):
        Sampler(params, [1], VOCAB).draw(torch.zeros(VOCAB), [1])
