"""The logits processors a request asks for, in transformers' order, transformers' own wherever it has one.

Knows no tree and draws nothing. A processor is called with `input_ids [1, n]` (prompt and output so far) and
`scores [1, V]`, once per committed position, so stateful ones stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longgraft.config import GraftError, SamplingParams
from longgraft.resolve import ConfigRules

Processor = Callable[[Tensor, Tensor], Tensor]

# Rules that act from temperature on: with one of them every filter is transformers' own.
FILTERS = frozenset(("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config", "renormalize_logits"))
# Processors that run the model themselves, or expect a batch or codebooks that a text request does not have.
FOREIGN = (
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "WhisperNoSpeechDetection",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "AlternatingCodebooksLogitsProcessor",
)


@dataclass(frozen=True)
class Penalties:
    """OpenAI's presence and frequency penalties: they count the tokens after the first `prompt_len` only."""

    presence: float
    frequency: float
    prompt_len: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores less `presence` once and `frequency` per earlier occurrence in the output. [1, V]"""
        counts = torch.bincount(input_ids[0, self.prompt_len :], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - (counts * self.frequency + (counts > 0) * self.presence)


@dataclass(frozen=True)
class Bias:
    """OpenAI's logit_bias: an addend per token id."""

    addends: dict[int, float]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores plus the addends. [1, V]"""
        token_ids = torch.tensor(list(self.addends), device=scores.device)
        values = torch.tensor(list(self.addends.values()), dtype=scores.dtype, device=scores.device)
        return scores.index_add(1, token_ids, values[None])


def split(processors: Iterable[Any]) -> tuple[dict[str, Any], list[Processor]]:
    """Return the config rules and the user's own processors, lists opened; raises `GraftError` for unusable ones."""
    rules: dict[str, Any] = {}
    own: list[Processor] = []
    for item in processors:
        foreign = [name for base in type(item).__mro__ if (name := base.__name__) in FOREIGN]
        if isinstance(item, ConfigRules):
            rules = item.fields
        elif isinstance(item, list | tuple):
            own += split(item)[1]
        elif foreign:
            raise GraftError(f"{foreign[0]} runs the model itself or is not for text: leave it out")
        elif not callable(item):
            raise GraftError(f"processors holds {item!r}: expected callables of (input_ids, scores)")
        else:
            own.append(item)
    return rules, own


@dataclass
class Pipeline:
    """Processors before temperature, and from temperature on (None: the sampler's own filters do)."""

    before: list[Processor]
    after: list[Processor] | None


def build(params: SamplingParams, prompt_ids: list[int], vocab_size: int, device: torch.device) -> Pipeline | None:
    """Return what resolved `params` ask for, None if that is nothing (then transformers is not imported).

    `device` is where the logits lie. Raises `GraftError` where transformers rejects a value.
    """
    rules, own = split(params.processors)
    asked = _asked(params, rules)
    if not asked and not own:
        return None
    prompt = torch.tensor([prompt_ids], dtype=torch.int64, device=device)
    try:
        filters = _filters(params, rules, vocab_size, device) if FILTERS & rules.keys() else None
        return Pipeline(_merge(_builtin(params, asked, prompt), own), filters)
    except (TypeError, ValueError) as error:
        raise GraftError(f"transformers rejects a sampling parameter: {error}") from error


def _asked(params: SamplingParams, rules: dict[str, Any]) -> dict[str, Any]:
    """Return every processor that is asked for, by name, with its value."""
    eos = params.eos_token_ids or ()
    asked = dict(rules)
    if params.repetition_penalty != 1.0:
        asked["repetition_penalty"] = params.repetition_penalty
    # A single EOS token is not a bad word: transformers' own rule, without which generation could not end.
    if words := [list(word) for word in params.bad_words_ids or () if len(word) > 1 or word[0] not in eos]:
        asked["bad_words_ids"] = words
    if params.min_new_tokens:
        asked["min_new_tokens"] = params.min_new_tokens
        asked.pop("min_length", None)  # as in generate, where the former takes precedence
    if params.presence_penalty or params.frequency_penalty:
        asked["penalties"] = (params.presence_penalty, params.frequency_penalty)
    if params.logit_bias:
        asked["logit_bias"] = params.logit_bias
    if not eos:
        asked.pop("min_length", None)
        asked.pop("min_new_tokens", None)
        if "exponential_decay_length_penalty" in asked:
            raise GraftError("exponential_decay_length_penalty needs an EOS token: none is set")
    return asked


def _builtin(params: SamplingParams, asked: dict[str, Any], prompt: Tensor) -> list[Processor]:
    import transformers as hf

    length, device = prompt.shape[1], prompt.device
    eos = torch.tensor(params.eos_token_ids or (), dtype=torch.int64, device=device)
    total = length + params.max_new_tokens
    begin = length + (length == 1 and "forced_bos_token_id" in asked)
    made: dict[str, Callable[[Any], Processor]] = {
        "sequence_bias": hf.SequenceBiasLogitsProcessor,
        "encoder_repetition_penalty": lambda v: hf.EncoderRepetitionPenaltyLogitsProcessor(float(v), prompt),
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size": lambda v: hf.EncoderNoRepeatNGramLogitsProcessor(v, prompt),
        "bad_words_ids": hf.NoBadWordsLogitsProcessor,
        "min_length": lambda v: hf.MinLengthLogitsProcessor(v, eos, device=device),
        "min_new_tokens": lambda v: hf.MinNewTokensLengthLogitsProcessor(length, v, eos, device=device),
        "forced_bos_token_id": hf.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda v: hf.ForcedEOSTokenLogitsProcessor(total, v, device=device),
        "remove_invalid_values": lambda _: hf.InfNanRemoveLogitsProcessor(),
        "exponential_decay_length_penalty": lambda v: hf.ExponentialDecayLengthPenalty(v, eos, length),
        "suppress_tokens": lambda v: hf.SuppressTokensLogitsProcessor(v, device=device),
        "begin_suppress_tokens": lambda v: hf.SuppressTokensAtBeginLogitsProcessor(v, begin, device=device),
        "penalties": lambda v: Penalties(v[0], v[1], length),
        "logit_bias": Bias,
    }
    return [make(asked[name]) for name, make in made.items() if name in asked]


def _merge(builtin: list[Processor], own: list[Processor]) -> list[Processor]:
    """Put the user's processors last; one of a built-in's type takes that one's place, as in `generate`."""
    merged = [next((mine for mine in own if type(mine) is type(made)), made) for made in builtin]
    return merged + [mine for mine in own if not any(mine is taken for taken in merged)]


def _filters(params: SamplingParams, rules: dict[str, Any], vocab_size: int, device: torch.device) -> list[Processor]:
    import transformers as hf

    temperature = params.temperature or 0.0
    made: list[tuple[bool, Callable[[], Processor]]] = []
    if temperature > 0:
        made = [
            (temperature != 1.0, lambda: hf.TemperatureLogitsWarper(temperature)),
            ("top_h" in rules, lambda: hf.TopHLogitsWarper(rules["top_h"])),
            (bool(params.top_k), lambda: hf.TopKLogitsWarper(params.top_k)),
            (params.top_p != 1.0, lambda: hf.TopPLogitsWarper(params.top_p)),
            (bool(params.min_p), lambda: hf.MinPLogitsWarper(params.min_p)),
            ("typical_p" in rules, lambda: hf.TypicalLogitsWarper(rules["typical_p"])),
            ("epsilon_cutoff" in rules, lambda: hf.EpsilonLogitsWarper(rules["epsilon_cutoff"])),
            ("eta_cutoff" in rules, lambda: hf.EtaLogitsWarper(rules["eta_cutoff"], device=device)),
        ]
    if watermark := rules.get("watermarking_config"):
        made.append((True, lambda: watermark.construct_processor(vocab_size, device)))
    made.append(("renormalize_logits" in rules, hf.LogitNormalization))
    return [make() for wanted, make in made if wanted]
