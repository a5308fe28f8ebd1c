"""The callable for `model.generate(custom_generate=...)`: rows become sequences of an engine, and back.

Knows what transformers gives and wants back; drawing, trees and attention are the engine's. The one idea: an engine
is kept as long as its model lives, without keeping the model alive, and memory for KV lasts for one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from longgraft.admission import chunks_for, pool_chunks
from longgraft.config import EngineConfig, SamplingParams
from longgraft.draft.base import Drafter, NullDrafter
from longgraft.engine import Engine
from longgraft.hf.call import Call, dropped, one_streamer, prepare, refuse, refuse_positions
from longgraft.hf.rows import Relay, Row, RowStop
from longgraft.linear import output_rows
from longgraft.sampler import Sampler
from longgraft.sequence import Sequence

# Room in which the costs of a round are measured; calls bring pools of their own size.
MEASURING_CONTEXT = 2304
MAX_ENGINES = 4


@dataclass
class Kept:
    """What is kept of one model between calls: engines that passed their checks, by settings. Holds no model.

    `lock`: our attention is set on the model itself, so one call at a time.
    """

    lock: RLock = field(default_factory=RLock)
    kind: Any = None
    engines: dict[tuple[EngineConfig, int], Engine] = field(default_factory=dict)

    def engine(self, model: Any, config: EngineConfig, drafter: Drafter) -> Engine:
        """Return an engine for this model as it is now; one that moved or changed its dtype is checked anew."""
        kind = (model.dtype, model.device, output_rows(model.get_output_embeddings()))
        if self.kind != kind:
            self.kind, self.engines = kind, {}
        # The engine holds its drafter, so the number stands for no other one while it is kept.
        key = (config, id(drafter))
        if key not in self.engines:
            if len(self.engines) == MAX_ENGINES:
                del self.engines[next(iter(self.engines))]
            self.engines[key] = _make(model, config, drafter)
        return self.engines[key]


def _make(model: Any, config: EngineConfig, drafter: Drafter) -> Engine:
    """Check the model and measure it; what comes back holds neither the model nor memory for KV."""
    measuring = replace(config, max_context=MEASURING_CONTEXT, kv_bytes=None, prefix_cache=False)
    engine = Engine(model, None, measuring, drafter=drafter)
    engine.config = config
    engine.pool = engine.prefixes.pool = engine.prefixes.store.pool = engine.target.new_pool(1)
    engine.target.model = proxy(model)
    return engine


class Generate:
    """Generates for `model.generate(custom_generate=...)`; what it learns of a model goes when the model does."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Any, Kept] = WeakKeyDictionary()
        self._no_drafter = NullDrafter()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        graft_config: EngineConfig | None = None,
        graft_drafter: Drafter | None = None,
        graft_streamer: Any = None,
        graft_stats: dict[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Return what `model.generate` returns, which calls this; raises `GraftError` for what cannot be the same.

        `graft_config`: settings of the engine. `graft_drafter`: a drafter, made once and given to every call (see
        `longgraft.draft.load.load_drafter`; one that reads hidden states keeps the model alive). `graft_streamer`:
        a streamer (a plain `streamer=` works too).
        `graft_stats`: a dict that receives `seed` and `rows`, the stats of each row with its `finish_reason`,
        `sources` and `origins`. Rows of a batch advance on their own: custom processors and criteria are called
        with one row `[1, n]`, and scores of a row that has ended are 0.
        """
        hidden = dropped(model)
        refuse(model, input_ids, generation_config, hidden | model_kwargs)
        mask = model_kwargs.get("attention_mask")
        call = prepare(input_ids, logits_processor, stopping_criteria, generation_config, mask)
        refuse_positions(model_kwargs.get("position_ids"), call.padding)
        streamer = one_streamer(hidden.get("streamer"), graft_streamer, input_ids)
        kept = self._kept.setdefault(model, Kept())
        with kept.lock, evaluating(model):
            engine = kept.engine(model, graft_config or EngineConfig(), graft_drafter or self._no_drafter)
            rows = [Row(call, number, engine.max_context) for number in range(len(call.padding))]
            sequences = run(engine, call, rows, streamer)
        if graft_stats is not None:
            graft_stats["seed"] = call.seed if generation_config.do_sample else None
            graft_stats["rows"] = [row_stats(engine, seq) for seq in sequences]
        return assemble(call, rows, sequences)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch the model to evaluation mode, and each of its modules back on exit."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def run(engine: Engine, call: Call, rows: list[Row], streamer: Any) -> list[Sequence]:
    """Generate all rows, as many at a time as memory holds, in a pool that lasts for this call."""
    totals = [min(len(row.prompt_ids) + call.max_new_tokens, engine.max_context) for row in rows]
    sizes = [chunks_for(total, engine.config) for total in totals]
    before = engine.pool
    try:
        engine.pool = engine.target.new_pool(min(pool_chunks(engine.target, engine.config), sum(sizes)))
        sequences = [open_row(engine, call, row, number) for number, row in enumerate(rows)]
        _warn_of_regimes(engine, sequences)
        relay = Relay(streamer, sequences, call.pad_token_id)
        for wave in waves(sequences, sizes, engine.pool.num_chunks):
            read_shared_prompts(engine, wave)
            rounds: Any = engine.run(wave)
            # If a streamer raises, its traceback keeps the rounds, and so our attention, alive until they are closed.
            with closing(rounds):
                for _ in rounds:
                    relay.push()
    finally:
        engine.pool = before
        if streamer is not None:
            streamer.end()
    if any(seq.stop.finish_reason == "context" for seq in sequences):
        _warn(f"generation stopped at the context limit of {engine.max_context} tokens, before max_new_tokens")
    return sequences


def _warn_of_regimes(engine: Engine, sequences: list[Sequence]) -> None:
    """Say where a longrope model will not follow `generate`, which changes the regime in the middle of a text."""
    border = engine.target.long_rope_from
    if border is not None and any(seq.long_rope and seq.prompt_len <= border for seq in sequences):
        _warn(
            f"this model changes its RoPE at {border} tokens; as prompt and max_new_tokens together are longer, all of "
            "the text is computed as a long one, so the output may differ from generate's"
        )


def _warn(message: str) -> None:
    warnings.warn(f"longgraft.hf.generate: {message}", stacklevel=3)


def open_row(engine: Engine, call: Call, row: Row, number: int) -> Sequence:
    """Admit a row, and let transformers' choices stand in for what the engine would read from the model's config."""
    prompt_ids = engine.encode(row.prompt_ids)
    seq = engine.open(prompt_ids, SamplingParams(max_new_tokens=call.max_new_tokens, seed=call.seed))
    seq.sampler = Sampler(call.params(number, row.processors), prompt_ids, engine.target.vocab_size)
    seq.stop = RowStop(row, call, engine.max_context - len(prompt_ids))
    return seq


def waves(sequences: list[Sequence], sizes: list[int], room: int) -> Iterator[list[Sequence]]:
    """Yield runs of sequences whose chunks fit in the pool together, at least one at a time."""
    wave: list[Sequence] = []
    left = room
    for seq, size in zip(sequences, sizes):
        if wave and size > left:
            yield wave
            wave, left = [], room
        wave.append(seq)
        left -= size
    yield wave


def read_shared_prompts(engine: Engine, wave: list[Sequence]) -> None:
    """Read a prompt that several rows have (`num_return_sequences`) once; the others fork its cache."""
    same: dict[tuple[int, ...], list[Sequence]] = {}
    for seq in wave:
        same.setdefault(tuple(seq.token_ids), []).append(seq)
    with engine.target.session():
        for first, *others in same.values():
            if not others:
                continue
            tokens = np.asarray(first.token_ids[:-1], np.int32)
            with first.stats.stage("prefill"):
                engine.target.prefill(first.cache, tokens, engine.config.prefill_rows, long_rope=first.long_rope)
            first.stats.prefilled_tokens += len(tokens)
            for seq in others:
                seq.cache = first.cache.fork()


def row_stats(engine: Engine, seq: Sequence) -> dict[str, Any]:
    """Return plain numbers on one row: stats, why it ended and where its tokens came from."""
    output = engine.output(seq)
    own = {"finish_reason": output.finish_reason, "sources": output.sources, "origins": output.origins}
    return {**output.stats, **own}


def assemble(call: Call, rows: list[Row], sequences: list[Sequence]) -> Any:
    """Return ids `[B, T + n]`, padded on the right, or transformers' output object around them."""
    new = [seq.new_token_ids for seq in sequences]
    n = max(len(ids) for ids in new)
    added = [ids + [call.pad_token_id] * (n - len(ids)) for ids in new]
    token_ids = torch.cat([call.input_ids, call.input_ids.new_tensor(added).view(len(new), n)], dim=-1)
    if not call.config.return_dict_in_generate:
        return token_ids
    scores = by_step([row.scores for row in rows], n)
    return GenerateDecoderOnlyOutput(sequences=token_ids, scores=scores, logits=by_step([r.logits for r in rows], n))


def by_step(records: list[list[Tensor] | None], n: int) -> tuple[Tensor, ...] | None:
    """Turn records `[1, V]` per row and step into `[B, V]` per step, 0 where a row has ended."""
    kept = [record for record in records if record is not None]
    if not kept:
        return None
    return tuple(torch.cat([r[step] if step < len(r) else torch.zeros_like(r[0]) for r in kept]) for step in range(n))
