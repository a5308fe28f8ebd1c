"""What transformers prepared for one `generate`, sorted: what the engine does natively, what stays the caller's.

Knows no engine. The one idea: nothing is dropped silently; what cannot give what `generate` gives is refused by
name here, before anything is computed.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria

from longgraft.config import GraftError, SamplingParams
from longgraft.processors import split

# What transformers passes to `forward` by itself; masks and positions are looked at, the others ask for nothing.
KNOWN = frozenset(
    "attention_mask position_ids use_cache logits_to_keep cache past_key_values cache_position streamer".split()
)
DYNAMIC_CACHES = (None, "dynamic", "dynamic_full")
# The filters that the sampler has natively, in transformers' order.
FILTERS: dict[type, str] = {
    hf.TemperatureLogitsWarper: "temperature",
    hf.TopKLogitsWarper: "top_k",
    hf.TopPLogitsWarper: "top_p",
    hf.MinPLogitsWarper: "min_p",
}
# Processors that hold something of every row of a batch, which one row cannot be given.
WHOLE_BATCH = frozenset(
    "EncoderRepetitionPenaltyLogitsProcessor EncoderNoRepeatNGramLogitsProcessor "
    "SynthIDTextWatermarkLogitsProcessor".split()
)


@dataclass(frozen=True, slots=True)
class Call:
    """One prepared call: `input_ids [B, T]`, left padding of each row, and what all rows share.

    `processors` and `criteria` are the caller's, `filters` the last processors, which the sampler applies natively.
    """

    input_ids: Tensor
    padding: list[int]
    processors: list[Any]
    filters: list[Any]
    criteria: hf.StoppingCriteriaList
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    config: Any

    @property
    def wants_scores(self) -> bool:
        """True if processed scores are part of the result."""
        return bool(self.config.return_dict_in_generate and self.config.output_scores)

    @property
    def wants_logits(self) -> bool:
        """True if raw logits are part of the result."""
        return bool(self.config.return_dict_in_generate and self.config.output_logits)

    @property
    def pad_token_id(self) -> int:
        """What fills rows that end early; 0 where there is none and no row can end early."""
        pad = self.config._pad_token_tensor
        return 0 if pad is None else int(pad)

    def params(self, number: int, processors: tuple[Any, ...]) -> SamplingParams:
        """Return the sampling parameters of row `number`; rows differ in their noise, whatever their prompts."""
        values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        values |= {FILTERS[type(f)]: getattr(f, FILTERS[type(f)]) for f in self.filters}
        if not self.config.do_sample:
            values["temperature"] = 0.0
        return SamplingParams(
            **values,
            repetition_penalty=1.0,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            sample_index=number,
            processors=processors,
        )


def dropped(model: Any) -> dict[str, Any]:
    """Return arguments of the `generate` that called us and that transformers hands to no callable.

    It drops `streamer` without a word; the one place to find it is the frame of that call.
    """
    code, frame = inspect.unwrap(hf.GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is model):
        frame = frame.f_back
    if frame is None:
        return {}
    values = {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def refuse(model: Any, input_ids: Tensor, config: Any, arguments: dict[str, Any]) -> None:
    """Raise a `GraftError` that names what about this call cannot give what `generate` gives."""
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _no(mode.value.replace("_", " "), "use greedy decoding or sampling: num_beams=1, no assistant")
    if model.config.is_encoder_decoder:
        raise _no(f"the encoder-decoder model {type(model).__name__}", "use a causal LM")
    if config.cache_implementation not in DYNAMIC_CACHES:
        what = f"cache_implementation={config.cache_implementation!r}"
        raise _no(what, "leave it out: keys and values live in longgraft's own cache")
    for flag in ("output_attentions", "output_hidden_states"):
        if getattr(config, flag):
            raise _no(flag, "leave it out, and run the model once over the finished text")
    _refuse_arguments(arguments)
    prepare = vars(model).get("prepare_inputs_for_generation")
    if getattr(prepare, "__self__", model) is not model:
        raise _no("a model whose inputs another one prepares (prompt or prefix tuning)", "use LoRA")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise GraftError("the prompt is empty: expected at least one token")


def _refuse_arguments(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        is_filled = hasattr(value, "get_seq_length") and value.get_seq_length() > 0
        if is_filled or getattr(value, "_is_user_defined", False):
            raise _no(f"a cache of your own ({name})", "pass the whole text as input_ids")
        if value is not None and name not in KNOWN:
            instead = "leave it out, or call generate without custom_generate"
            raise _no(name, "pass input_ids" if name == "inputs_embeds" else instead)


def _no(what: str, instead: str) -> GraftError:
    return GraftError(f"longgraft.hf.generate: {what} is not supported; {instead}")


def prepare(input_ids: Tensor, processors: Any, criteria: Any, config: Any, mask: Tensor | None) -> Call:
    """Sort processors and criteria and find the padding; raises `GraftError` for what no row alone can follow."""
    _, own = split(processors)
    filters: list[Any] = []
    for kind in reversed(FILTERS) if config.do_sample else ():
        if own and type(own[-1]) is kind and _is_native(own[-1]):
            filters.insert(0, own.pop())
    others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    if len(input_ids) > 1:
        _refuse_in_batch(own, others, has_eos=any(hasattr(c, "eos_token_id") for c in criteria))
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria] or [config.max_length]
    eos = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
    return Call(
        input_ids,
        left_padding(input_ids, mask),
        own,
        filters,
        hf.StoppingCriteriaList(others),
        tuple(token_id for ids in eos for token_id in ids),
        max(1, min(lengths) - input_ids.shape[1]),
        int(torch.randint(2**63 - 1, ())) if config.do_sample else 0,
        config,
    )


def _is_native(warper: Any) -> bool:
    is_usual = getattr(warper, "filter_value", -torch.inf) == -torch.inf
    return is_usual and getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "top_p", 1.0) > 0


def _refuse_in_batch(processors: list[Any], criteria: list[Any], has_eos: bool) -> None:
    for processor in processors:
        if type(processor).__name__ in WHOLE_BATCH:
            raise _no(f"{type(processor).__name__} in a batch", "generate one row at a time")
    if criteria and not has_eos:
        # Without EOS transformers goes on generating rows that have stopped until the last one stops.
        what = f"{type(criteria[0]).__name__} in a batch without eos_token_id"
        raise _no(what, "set eos_token_id and pad_token_id, or generate one row at a time")


def left_padding(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    """Return the number of padding tokens of each row; raises `GraftError` for any other mask and empty prompts."""
    width = input_ids.shape[1]
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    padding = width - real.sum(-1, keepdim=True)
    if real.shape != input_ids.shape or not torch.equal(real, torch.arange(width, device=real.device) >= padding):
        raise _no("an attention_mask other than left padding", "set padding_side='left' on the tokenizer")
    for row, count in enumerate(padding.flatten().tolist()):
        if count == width:
            raise GraftError(f"the prompt of row {row} is empty: expected at least one token")
    return [int(count) for count in padding]


def refuse_positions(positions: Tensor | None, padding: list[int]) -> None:
    """Raise a `GraftError` for positions that do not count 0, 1, 2 ... from the first token of each row."""
    if positions is None:
        return
    error = _no("position_ids other than 0, 1, 2 ...", "leave them out")
    if positions.ndim != 2:
        raise error
    for row, count in zip(positions.cpu().expand(len(padding), -1), padding):
        if not torch.equal(row[count:].long(), torch.arange(len(row) - count)):
            raise error


def one_streamer(plain: Any, ours: Any, input_ids: Tensor) -> Any:
    """Return the streamer, if there is one; transformers has put the prompt into a plain one, not into ours."""
    if plain is not None and ours is not None:
        raise GraftError("both streamer and graft_streamer are given: expected one of them")
    if ours is not None:
        ours.put(input_ids.cpu())
    return plain if ours is None else ours
