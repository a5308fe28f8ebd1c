"""Drop-in for transformers: `model.generate(**inputs, custom_generate=longgraft.hf.generate, ...)`.

transformers prepares the call as ever (processors, stopping criteria, lengths, padding) and hands it over; here rows
become sequences of an engine, and their tokens what `generate` returns. Knows no tree and no attention. The one
idea: the caller's processors, criteria and streamer are shown each row as transformers shows it, left padding
included, once for every committed token and in order; so they work as they always do.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
import transformers as hf
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from longgraft.admission import chunks_for, pool_chunks
from longgraft.config import EngineConfig, GraftError, SamplingParams
from longgraft.engine import Engine
from longgraft.processors import split
from longgraft.sampler import Sampler
from longgraft.sequence import Sequence
from longgraft.stop import StopRules

# What transformers passes on to `forward` that asks for nothing: positions and masks are looked at, the rest is ours.
KNOWN = frozenset("attention_mask position_ids use_cache logits_to_keep cache past_key_values cache_position".split())
DYNAMIC_CACHES = (None, "dynamic", "dynamic_full")
# The filters the sampler has natively, in transformers' order.
FILTERS = {
    hf.TemperatureLogitsWarper: "temperature",
    hf.TopKLogitsWarper: "top_k",
    hf.TopPLogitsWarper: "top_p",
    hf.MinPLogitsWarper: "min_p",
}
# Processors that hold something of every row of the batch, which one row cannot be given.
WHOLE_BATCH = frozenset(
    "EncoderRepetitionPenaltyLogitsProcessor EncoderNoRepeatNGramLogitsProcessor "
    "SynthIDTextWatermarkLogitsProcessor".split()
)
# Room to measure round costs in before the first call; afterwards every call brings a pool of its own size.
MEASURING_CONTEXT = 2304
MAX_ENGINES = 4


@dataclass(frozen=True, slots=True)
class Call:
    """What transformers prepared: `input_ids [B, T]`, left padding per row, and everything all rows share."""

    input_ids: Tensor
    padding: list[int]
    processors: list[Any]
    filters: list[Any]
    criteria: hf.StoppingCriteriaList
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    config: Any
    seed: int

    @property
    def wants_scores(self) -> bool:
        """True if processed scores are part of the result."""
        return bool(self.config.return_dict_in_generate and self.config.output_scores)

    @property
    def wants_logits(self) -> bool:
        """True if raw logits are part of the result."""
        return bool(self.config.return_dict_in_generate and self.config.output_logits)

    def params(self, row: Row, number: int) -> SamplingParams:
        """Return the sampling parameters of one row; rows differ in their noise, whatever their prompts."""
        asked = bool(self.processors or self.wants_scores or self.wants_logits)
        neutral: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        native = {FILTERS[type(f)]: getattr(f, FILTERS[type(f)]) for f in self.filters}
        return SamplingParams(
            **(neutral | native if self.config.do_sample else neutral | {"temperature": 0.0}),
            repetition_penalty=1.0,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            sample_index=number,
            processors=(row,) if asked else (),
        )


class Row:
    """One row as the caller's processors and criteria see it: a processor for the sampler, and what ends it."""

    def __init__(self, call: Call, number: int, max_context: int) -> None:
        width = call.input_ids.shape[1]
        self.prompt_ids: list[int] = call.input_ids[number, call.padding[number] :].tolist()
        self._ids = call.input_ids.new_empty(1, width + min(call.max_new_tokens, max_context))
        self._ids[0, :width] = call.input_ids[number]
        self._length = width
        self._processors = [_of_row(p, number) for p in call.processors]
        self._filters = call.filters
        self._criteria = call.criteria
        self.scores: list[Tensor] | None = [] if call.wants_scores else None
        self.logits: list[Tensor] | None = [] if call.wants_logits else None

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        """Return `scores [1, V]` as the caller's processors leave them, and record what was asked for."""
        ids = self._ids[:, : self._length]
        shown = scores.to(ids.device, torch.float32)
        if self.logits is not None:
            self.logits.append(shown.clone())
        for processor in self._processors:
            shown = processor(ids, shown)
        if self.scores is not None:
            recorded = shown.clone()
            for warper in self._filters:
                recorded = warper(ids, recorded)
            self.scores.append(recorded)
        return shown.to(scores.device)

    def append(self, token_id: int) -> bool:
        """Take the next token and tell whether a criterion ends the row with it."""
        self._ids[0, self._length] = token_id
        self._length += 1
        if not self._criteria:
            return False
        scores = None if self.scores is None else tuple(self.scores)
        return bool(self._criteria(self._ids[:, : self._length], scores).any())


class RowStop(StopRules):
    """EOS and length natively, then the caller's criteria: asked as tokens are drawn, never again when they commit."""

    def __init__(self, row: Row, call: Call, context_room: int) -> None:
        super().__init__(call.eos_token_ids, (), call.max_new_tokens, context_room)
        self._row = row
        self._is_over = False

    def watch(self) -> Callable[[int], bool]:
        """Return what tells whether a drawn token is the last; draws end there, so every one asked about commits."""
        is_last = super().watch()

        def ends(token_id: int) -> bool:
            self._is_over = self._row.append(token_id)
            return is_last(token_id) or self._is_over

        return ends

    def clip(self, token_ids: Seq[int]) -> list[int]:
        """Commit tokens; the criteria have spoken about them already."""
        kept = super().clip(token_ids)
        if self._is_over and self.finish_reason is None:
            self.finish_reason = "stop"
        return kept


class Relay:
    """Gives a streamer one token of every row at a time, as transformers does, once all unfinished rows have it."""

    def __init__(self, streamer: Any, sequences: Seq[Sequence], pad: int) -> None:
        self._streamer = streamer
        self._sequences = sequences
        self._pad = pad
        self._sent = 0

    def push(self) -> None:
        """Pass on the steps that are complete."""
        if self._streamer is None:
            return
        waiting = [len(seq.sources) for seq in self._sequences if not seq.is_finished]
        ready = min(waiting, default=max(len(seq.sources) for seq in self._sequences))
        for step in range(self._sent, ready):
            at = [(seq.token_ids, seq.prompt_len + step) for seq in self._sequences]
            self._streamer.put(torch.tensor([ids[i] if i < len(ids) else self._pad for ids, i in at]))
        self._sent = max(ready, self._sent)


@dataclass
class _Kept:
    """What is kept of a model between calls: engines that passed their checks, by settings. Holds no model."""

    lock: RLock = field(default_factory=RLock)
    shape: Any = None
    engines: dict[EngineConfig, Engine] = field(default_factory=dict)


class Generate:
    """The callable for `custom_generate`. Engines (checks, measured costs) are kept as long as their model lives."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        graft_config: EngineConfig | None = None,
        graft_streamer: Any = None,
        graft_stats: dict[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Return what `model.generate` returns; called by it. Anything that cannot be the same is a `GraftError`.

        `graft_config`: settings of the engine. `graft_streamer`: a streamer (a plain `streamer=` works as well).
        `graft_stats`: a dict that receives `seed` and, per row, `rows`: stats, `finish_reason`, `sources`, `origins`.
        Rows of a batch advance on their own, so custom processors and criteria see one row `[1, n]` at a time.
        """
        dropped = _dropped(model)
        _refuse(model, input_ids, generation_config, dropped | model_kwargs)
        call = _prepare(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        streamer = _one_streamer(dropped.get("streamer"), graft_streamer, input_ids)
        kept = self._kept.setdefault(model, _Kept())
        with kept.lock, _evaluating(model):
            engine = kept.engine(model, graft_config or EngineConfig())
            rows = [Row(call, number, engine.max_context) for number in range(len(call.padding))]
            sequences = _run(engine, call, rows, streamer)
        if graft_stats is not None:
            graft_stats |= {"seed": call.seed if generation_config.do_sample else None}
            graft_stats["rows"] = [_row_stats(engine, seq) for seq in sequences]
        return _assemble(call, rows, sequences)


def _dropped(model: Any) -> dict[str, Any]:
    """Return arguments of the `generate` that called us and that transformers does not hand to a callable.

    It drops `streamer` without a word; the one place to find it is the frame of that call.
    """
    code, frame = inspect.unwrap(hf.GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is model):
        frame = frame.f_back
    names = ("streamer", "assistant_model", "synced_gpus")
    found = {} if frame is None else {name: frame.f_locals.get(name) for name in names}
    return {name: value for name, value in found.items() if value}


def _one_streamer(plain: Any, ours: Any, input_ids: Tensor) -> Any:
    """Return the streamer, if there is one; the prompt has been put into a plain one, not into ours."""
    if plain is not None and ours is not None:
        raise GraftError("both streamer and graft_streamer are given: expected one of them")
    if ours is not None:
        ours.put(input_ids.cpu())
    return plain if ours is None else ours


def _no(what: str, instead: str) -> GraftError:
    return GraftError(f"longgraft.hf.generate: {what} is not supported; {instead}")


def _refuse(model: Any, input_ids: Tensor, config: Any, arguments: dict[str, Any]) -> None:
    """Raise a `GraftError` that names what in this call cannot give what `generate` gives."""
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    without = "leave it out, or call generate without custom_generate"
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _no(mode.value.replace("_", " "), "use greedy decoding or sampling: num_beams=1, no assistant")
    if model.config.is_encoder_decoder:
        raise _no(f"the encoder-decoder model {type(model).__name__}", "use a causal LM")
    if config.cache_implementation not in DYNAMIC_CACHES:
        raise _no(
            f"cache_implementation={config.cache_implementation!r}", "leave it out: KV live in longgraft's own cache"
        )
    for flag in ("output_attentions", "output_hidden_states"):
        if getattr(config, flag):
            raise _no(flag, "leave it out, and run the model once over the finished text")
    for name, value in arguments.items():
        is_own_cache = getattr(value, "_is_user_defined", False)
        if is_own_cache or (hasattr(value, "get_seq_length") and value.get_seq_length() > 0):
            raise _no(f"a cache of your own ({name})", "pass the whole text as input_ids")
        if value is not None and name not in KNOWN | {"streamer"}:
            raise _no(name, "pass input_ids" if name == "inputs_embeds" else without)
    prepare = vars(model).get("prepare_inputs_for_generation")
    if getattr(prepare, "__self__", model) is not model:
        raise _no("a model whose inputs are prepared elsewhere (prompt tuning, prefix tuning)", "use LoRA, or merge it")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise GraftError("the prompt is empty: expected at least one token")


def _prepare(input_ids: Tensor, processors: Any, criteria: Any, config: Any, kwargs: dict[str, Any]) -> Call:
    """Sort what transformers prepared into what the engine has natively and what stays the caller's."""
    width = input_ids.shape[1]
    _, own = split(processors)
    filters: list[Any] = []
    for kind in reversed(FILTERS) if config.do_sample else ():
        if own and type(own[-1]) is kind and _is_native(own[-1]):
            filters.insert(0, own.pop())
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria] or [config.max_length]
    eos = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
    others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    if len(input_ids) > 1:
        _refuse_in_batch(own, others, has_eos=any(hasattr(c, "eos_token_id") for c in criteria))
    return Call(
        input_ids,
        _left_padding(input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids")),
        own,
        filters,
        hf.StoppingCriteriaList(others),
        tuple(token_id for ids in eos for token_id in ids),
        max(1, min(lengths) - width),
        config,
        int(torch.randint(2**63 - 1, ())) if config.do_sample else 0,
    )


def _is_native(warper: Any) -> bool:
    is_usual = getattr(warper, "filter_value", -torch.inf) == -torch.inf
    return is_usual and getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "top_p", 1.0) > 0


def _refuse_in_batch(processors: list[Any], criteria: list[Any], has_eos: bool) -> None:
    for processor in processors:
        if type(processor).__name__ in WHOLE_BATCH:
            raise _no(f"{type(processor).__name__} in a batch", "generate one row at a time")
    if criteria and not has_eos:
        # Without EOS transformers goes on generating rows that have stopped, until the last one stops.
        raise _no(f"{type(criteria[0]).__name__} in a batch without eos_token_id", "set eos_token_id and pad_token_id")


def _of_row(processor: Any, number: int) -> Any:
    """Return a processor that sees row `number` alone; only one tells rows apart by their number."""
    if type(processor) is not hf.PrefixConstrainedLogitsProcessor:
        return processor
    allowed, prompt = processor._prefix_allowed_tokens_fn, number // processor._num_beams
    return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)


def _left_padding(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[int]:
    """Return the padding tokens of each row; raises for masks and positions that are not those of left padding."""
    rows, width = input_ids.shape
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    padding = width - real.sum(-1, keepdim=True)
    column = torch.arange(width, device=real.device)
    if real.shape != input_ids.shape or not torch.equal(real, column >= padding):
        raise _no("an attention_mask other than left padding", "set padding_side='left' on the tokenizer")
    empty = (padding == width).flatten().nonzero()
    if len(empty):
        raise GraftError(f"the prompt of row {int(empty[0])} is empty: expected at least one token")
    if positions is not None:
        given = positions.to(real.device).expand(rows, width) if positions.ndim == 2 else None
        if given is None or not torch.equal(given[real], (column - padding)[real]):
            raise _no("position_ids other than 0, 1, 2 ...", "leave them out")
    return [int(n) for n in padding]


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Switch the model to evaluation mode, and every module back on exit."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def _run(engine: Engine, call: Call, rows: list[Row], streamer: Any) -> list[Sequence]:
    """Generate all rows in a pool that lasts for this call, as many at a time as memory holds."""
    totals = [min(len(row.prompt_ids) + call.max_new_tokens, engine.max_context) for row in rows]
    sizes = [chunks_for(total, engine.config) for total in totals]
    try:
        engine.pool, before = (
            engine.target.new_pool(min(pool_chunks(engine.target, engine.config), sum(sizes))),
            engine.pool,
        )
        try:
            sequences = [_open(engine, call, row, number) for number, row in enumerate(rows)]
            relay = Relay(streamer, sequences, _pad(call))
            for wave in _waves(sequences, sizes, engine.pool.num_chunks):
                _read_shared_prompts(engine, wave)
                # Closed by name: were a streamer to raise, the traceback would keep the model in our hands.
                with closing(engine.run(wave)) as rounds:
                    for _ in rounds:
                        relay.push()
        finally:
            engine.pool = before
    finally:
        if streamer is not None:
            streamer.end()
    return sequences
