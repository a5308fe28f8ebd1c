"""Resolving: what the user left open becomes what `generate` would use, and nothing is dropped silently."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from longgraft.config import GraftError, SamplingParams
from longgraft.resolve import KNOWN, REFUSED, RULES, TOP_K_DEFAULT, ConfigRules, resolve

VOCAB = 100


def config(**fields: Any) -> GenerationConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GenerationConfig(**fields)


def test_defaults_are_those_of_generate() -> None:
    """If transformers changes a default, this tells."""
    defaults = GenerationConfig._get_default_generation_params()
    assert defaults["top_k"] == TOP_K_DEFAULT
    resolved = resolve(SamplingParams(), config(do_sample=True), VOCAB)
    assert resolved.temperature == defaults["temperature"] == 1.0
    assert resolved.top_p == defaults["top_p"] == 1.0
    assert resolved.repetition_penalty == defaults["repetition_penalty"] == 1.0
    assert resolved.min_p == 0.0 and "min_p" not in defaults
    for name, neutral in RULES.items() | REFUSED.items():
        assert defaults.get(name) in (None, neutral), name


def test_every_field_of_generation_config_is_known() -> None:
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= KNOWN


@pytest.mark.parametrize("given", [None, config(), config(do_sample=False), config(temperature=0.7, top_p=0.5)])
def test_greedy_unless_asked_to_sample(given: GenerationConfig | None) -> None:
    assert resolve(SamplingParams(), given, VOCAB).temperature == 0.0
    sampling = resolve(SamplingParams(temperature=0.3), given, VOCAB)
    assert sampling.temperature == 0.3 and sampling.top_k == 50


def test_config_fills_what_is_open_and_the_user_wins() -> None:
    given = config(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.05,
        bad_words_ids=[[3], [4, 5]], min_new_tokens=4, eos_token_id=[7, 8], stop_strings="END",
    )  # fmt: skip
    filled = resolve(SamplingParams(), given, VOCAB)
    assert (filled.temperature, filled.top_k, filled.top_p, filled.min_p) == (0.6, 20, 0.9, 0.02)
    assert (filled.repetition_penalty, filled.min_new_tokens) == (1.05, 4)
    assert filled.bad_words_ids == ((3,), (4, 5)) and filled.eos_token_ids == (7, 8) and filled.stop == ("END",)
    mine = SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, bad_words_ids=(),
        min_new_tokens=1, eos_token_ids=(), stop=("x",), seed=3,
    )  # fmt: skip
    assert resolve(mine, given, VOCAB) == mine


@pytest.mark.parametrize(("eos", "want"), [(None, ()), (5, (5,)), (0, (0,)), ([5, 6], (5, 6))])
def test_eos_token_ids(eos: Any, want: tuple[int, ...]) -> None:
    assert resolve(SamplingParams(), config(eos_token_id=eos), VOCAB).eos_token_ids == want
    assert resolve(SamplingParams(ignore_eos=True), config(eos_token_id=eos), VOCAB).eos_token_ids == ()


def test_nothing_stays_open_and_twice_is_once() -> None:
    for given in (None, config(), config(do_sample=True, no_repeat_ngram_size=3, eos_token_id=2)):
        once = resolve(SamplingParams(), given, VOCAB)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_ids", "seed"):
            assert getattr(once, name) is not None
        assert resolve(once, given, VOCAB) == once


def test_a_seed_is_drawn_and_kept() -> None:
    seeds = {resolve(SamplingParams(), None, VOCAB).seed for _ in range(20)}
    assert len(seeds) == 20 and all(s is not None and 0 <= s < 2**63 for s in seeds)
    assert resolve(SamplingParams(seed=0), None, VOCAB).seed == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4), ("guidance_scale", 1.5), ("penalty_alpha", 0.6), ("dola_layers", "low"), ("max_time", 3.0),
        ("token_healing", True), ("assistant_ensemble_weight", 0.5), ("constraints", [1]), ("force_words_ids", [[1]]),
        ("num_beam_groups", 2),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(name: str, value: Any) -> None:
    given = config()
    setattr(given, name, value)
    with pytest.raises(GraftError, match=rf"generation_config\.{name} is "):
        resolve(SamplingParams(), given, VOCAB)
    setattr(given, name, REFUSED[name])
    resolve(SamplingParams(), given, VOCAB)


def test_a_field_from_a_newer_transformers_is_refused() -> None:
    class Newer(GenerationConfig):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            self.quantum_p = None

    given = Newer()
    resolve(SamplingParams(), given, VOCAB)
    given.quantum_p = 0.5
    with pytest.raises(GraftError, match="quantum_p"):
        resolve(SamplingParams(), given, VOCAB)
    # What transformers does not know either is of no effect there, so none here.
    resolve(SamplingParams(), config(chat_format="chatml"), VOCAB)


def test_fields_that_need_processors_are_carried_along() -> None:
    mine = object()
    given = config(no_repeat_ngram_size=3, forced_eos_token_id=0, typical_p=1.0, suppress_tokens=[])
    params = SamplingParams(processors=(mine,))
    resolved = resolve(params, given, VOCAB)
    rules = {"no_repeat_ngram_size": 3, "forced_eos_token_id": 0, "suppress_tokens": []}
    assert resolved.processors == (ConfigRules(rules), mine)
    assert resolve(params, config(), VOCAB).processors == (mine,)
    assert resolve(params, SimpleNamespace(top_h=0.4), VOCAB).processors[0] == ConfigRules({"top_h": 0.4})


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (SamplingParams(bad_words_ids=[[1], [2, VOCAB]]), "bad_words_ids holds token id 100"),
        (SamplingParams(bad_words_ids=[[]]), "empty"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias holds token id -1"),
        (SamplingParams(logit_bias={1: float("nan")}), "NaN"),
        (SamplingParams(logit_bias={1: float("inf")}), "inf"),
    ],
)
def test_token_ids_and_biases_are_checked(params: SamplingParams, match: str) -> None:
    with pytest.raises(GraftError, match=match):
        resolve(params, None, VOCAB)
    resolve(SamplingParams(logit_bias={0: float("-inf"), VOCAB - 1: -100.0}), None, VOCAB)
