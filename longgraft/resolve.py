"""Fills what a request left open, the way transformers' `generate` fills it from a model's generation_config.

Knows no scores and no transformers, only its field names. Nothing in a generation_config is dropped silently:
a field is a sampling parameter, a processor (`ConfigRules`), without effect on the tokens, or refused by
name.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from longgraft.config import GraftError, SamplingParams

# What generate() puts in place of a missing top_k; its other defaults are neutral.
TOP_K_DEFAULT = 50

_PARAMETERS = """
do_sample temperature top_k top_p min_p repetition_penalty bad_words_ids min_new_tokens eos_token_id stop_strings
"""
# Fields that become processors, and the value that asks for nothing.
RULES: dict[str, Any] = {
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "watermarking_config": None,
    "renormalize_logits": False,
}
# Fields that would change the output in a way one sampled sequence cannot follow, and the value that does
# not.
REFUSED: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "guidance_scale": 1.0,
    "token_healing": False,
    "max_time": None,
    "assistant_ensemble_weight": None,
}
# Fields that change no token of a plain decode: lengths are the request's, the rest is for beams, drafts and
# caches.
_WITHOUT_EFFECT = """
max_length max_new_tokens early_stopping use_mtp use_cache cache_implementation cache_config max_cache_len
length_penalty num_return_sequences output_attentions output_hidden_states output_scores output_logits
return_dict_in_generate pad_token_id bos_token_id decoder_start_token_id is_assistant num_assistant_tokens
num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens diversity_penalty
max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind speculation_type low_memory
compile_config disable_compile continuous_batching_config prefill_chunk_size transformers_version
"""
KNOWN = frozenset(_PARAMETERS.split()) | RULES.keys() | REFUSED.keys() | frozenset(_WITHOUT_EFFECT.split())


@dataclass(frozen=True)
class ConfigRules:
    """The generation_config fields that need processors, carried at the front of `SamplingParams.processors`."""

    fields: dict[str, Any]


def resolve(params: SamplingParams, generation_config: Any | None, vocab_size: int) -> SamplingParams:
    """Return `params` with every open value filled the way transformers' `generate` fills it.

    What the user gave wins, then the model's `generation_config`, then transformers' defaults (`top_k` 50
    when sampling; 0 turns it off). Without `do_sample` the temperature is 0 unless the user gives one. A seed
    is drawn. `ignore_eos` leaves no EOS at all, so nothing stops or is held back at one. Resolving twice
    changes nothing. Raises `GraftError` for a field that cannot be followed and for token ids outside the
    vocabulary.
    """
    _refuse(generation_config)

    def choose(given: Any, field: str, default: Any) -> Any:
        value = getattr(generation_config, field, None) if given is None else given
        return default if value is None else value

    sampling = getattr(generation_config, "do_sample", None) is True
    temperature = choose(params.temperature, "temperature", 1.0) if sampling else params.temperature or 0.0
    eos = () if params.ignore_eos else choose(params.eos_token_ids, "eos_token_id", ())
    stop = choose(params.stop or None, "stop_strings", ())
    resolved = replace(
        params,
        temperature=float(temperature),
        top_k=int(choose(params.top_k, "top_k", TOP_K_DEFAULT)),
        top_p=float(choose(params.top_p, "top_p", 1.0)),
        min_p=float(choose(params.min_p, "min_p", 0.0)),
        repetition_penalty=float(choose(params.repetition_penalty, "repetition_penalty", 1.0)),
        bad_words_ids=tuple(tuple(word) for word in choose(params.bad_words_ids, "bad_words_ids", ())),
        min_new_tokens=choose(params.min_new_tokens or None, "min_new_tokens", 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        processors=_with_rules(params.processors, generation_config),
    )
    _check_ids(resolved, vocab_size)
    return resolved


def _with_rules(processors: tuple[Any, ...], config: Any) -> tuple[Any, ...]:
    """Put the config's processor fields in front, once."""
    values = {name: getattr(config, name, None) for name in RULES}
    rules = {name: value for name, value in values.items() if value is not None and value != RULES[name]}
    if not rules or any(isinstance(p, ConfigRules) for p in processors):
        return processors
    return (ConfigRules(rules), *processors)


def _refuse(config: Any) -> None:
    for name, neutral in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise GraftError(
                f"generation_config.{name} is {value!r}, which would change the output and is not supported: "
                f"set it to {neutral!r}"
            )
    if not hasattr(config, "to_diff_dict"):
        return
    for name in vars(type(config)()):
        if not name.startswith("_") and name not in KNOWN and getattr(config, name, None) is not None:
            raise GraftError(
                f"generation_config.{name} is newer than this longgraft, which cannot tell whether it changes the "
                "output: set it to None"
            )


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    bias = params.logit_bias or {}
    named = {
        "bad_words_ids": [i for word in params.bad_words_ids or () for i in word],
        "logit_bias": list(bias),
    }
    for name, token_ids in named.items():
        wrong = [i for i in token_ids if not 0 <= i < vocab_size]
        if wrong:
            raise GraftError(f"{name} holds token id {wrong[0]}: expected 0 to {vocab_size - 1}")
    if not all(params.bad_words_ids or ()):
        raise GraftError("bad_words_ids holds an empty sequence: expected at least one token id in each")
    if not all(value < float("inf") for value in bias.values()):
        raise GraftError("logit_bias holds NaN or +inf: expected finite numbers, or -inf to forbid a token")
