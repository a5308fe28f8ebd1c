"""From the fields of a request to sampling parameters.

Knows both vocabularies; no engine but for the model's own defaults, which fill what a client leaves open.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from longgraft.config import SamplingParams
from longgraft.resolve import resolve
from longgraft.server.bodies import LlamaRequest
from longgraft.server.errors import ApiError
from longgraft.server.fields import Sampled, stops_of

MOST_BIAS = 100.0


def params_of(body: Sampled, engine: Any, new_tokens: int, logprobs: int | None = None) -> SamplingParams:
    """Return the resolved parameters of an OpenAI request; raises `GraftError` or `ApiError`."""
    params = SamplingParams(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias),
        min_new_tokens=body.min_tokens or 0,
        max_new_tokens=new_tokens,
        stop=stops_of(body.stop),
        ignore_eos=bool(body.ignore_eos),
        seed=_seed(body.seed),
        logprobs=logprobs,
    )
    return resolved(params, engine, tuple(body.stop_token_ids or ()))


def llama_params(body: LlamaRequest, engine: Any, new_tokens: int) -> SamplingParams:
    """Return the resolved parameters of a llama.cpp request; its values for "off" are our None."""
    params = SamplingParams(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p or None,
        min_p=body.min_p,
        repetition_penalty=body.repeat_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        max_new_tokens=new_tokens,
        stop=stops_of(body.stop),
        ignore_eos=bool(body.ignore_eos),
        seed=_seed(None if body.seed is not None and body.seed < 0 else body.seed),
    )
    return resolved(params, engine)


def resolved(params: SamplingParams, engine: Any, more_ends: tuple[int, ...] = ()) -> SamplingParams:
    """Fill what is open as the engine would; `more_ends`: token ids that end an answer besides the model's own."""
    vocab_size = engine.target.vocab_size
    if wrong := [i for i in more_ends if i >= vocab_size]:
        raise ApiError(400, f"stop_token_ids holds {wrong[0]}: expected 0 to {vocab_size - 1}", param="stop_token_ids")
    params = resolve(params, getattr(engine.target.model, "generation_config", None), vocab_size)
    return replace(params, eos_token_ids=(*(params.eos_token_ids or ()), *more_ends))


def held(params: SamplingParams, grammar: Any, tokenizer: Any) -> SamplingParams:
    """Return parameters with a grammar; its answer needs an end, the tokenizer's where the model names none."""
    ends, own = params.eos_token_ids or (), getattr(tokenizer, "eos_token_id", None)
    if grammar is not None and not ends and own is not None and not params.ignore_eos:
        ends = (own,)
    return replace(params, grammar=grammar, eos_token_ids=ends)


def _seed(seed: int | None) -> int:
    """Return a seed the engine takes; one that is drawn is told, and some clients' numbers hold 53 bits."""
    return secrets.randbits(53) if seed is None else seed % 2**64


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    found = {}
    for name, value in bias.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise ApiError(400, f"logit_bias names {name!r}: expected token ids", param="logit_bias")
        if not -MOST_BIAS <= value <= MOST_BIAS:
            raise ApiError(400, f"logit_bias holds {value}: expected -100 to 100", param="logit_bias")
        found[int(name)] = float(value)
    return found
