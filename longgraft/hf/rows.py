"""One row of a transformers batch, shown to the caller's processors, criteria and streamer.

Knows no engine and no model. The one idea: they see a row as transformers shows it, left padding included, once
for every committed token and in order, so stateful ones work as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from longgraft.hf.call import Call
from longgraft.sequence import Sequence
from longgraft.stop import StopRules


class Row:
    """The tokens `[1, n]` of one row and what the caller's objects make of them; a processor for the sampler."""

    def __init__(self, call: Call, number: int, max_context: int) -> None:
        width = call.input_ids.shape[1]
        self.prompt_ids: list[int] = call.input_ids[number, call.padding[number] :].tolist()
        self._ids = call.input_ids.new_empty(1, width + min(call.max_new_tokens, max_context))
        self._ids[0, :width] = call.input_ids[number]
        self._length = width
        self._processors = [_for_row(processor, number) for processor in call.processors]
        self._filters = call.filters
        self._criteria = call.criteria
        self.scores: list[Tensor] | None = [] if call.wants_scores else None
        self.logits: list[Tensor] | None = [] if call.wants_logits else None

    @property
    def processors(self) -> tuple[Any, ...]:
        """What the sampler must run: this row, unless there is nothing to do at a draw."""
        is_idle = not self._processors and self.scores is None and self.logits is None
        return () if is_idle else (self,)

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
        """Take the next token; return True if one of the caller's criteria ends the row with it."""
        self._ids[0, self._length] = token_id
        self._length += 1
        if not self._criteria:
            return False
        scores = None if self.scores is None else tuple(self.scores)
        return bool(self._criteria(self._ids[:, : self._length], scores).any())


def _for_row(processor: Any, number: int) -> Any:
    """Return a processor for row `number` alone: two of transformers' hold something of each row."""
    if type(processor) is hf.PrefixConstrainedLogitsProcessor:
        allowed, prompt = processor._prefix_allowed_tokens_fn, number // processor._num_beams
        return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if type(processor) is hf.RepetitionPenaltyLogitsProcessor and isinstance(ignored, Tensor):
        return hf.RepetitionPenaltyLogitsProcessor(processor.penalty, int(ignored[number]))
    return processor


class RowStop(StopRules):
    """EOS and length natively, then the caller's criteria: asked when a token is drawn, not again when it commits."""

    def __init__(self, row: Row, call: Call, context_room: int) -> None:
        super().__init__(call.eos_token_ids, (), call.max_new_tokens, context_room)
        self._row = row
        self._is_over = False

    def watch(self) -> Callable[[int], bool]:
        """Return what tells whether a drawn token is the last. Draws end there, so every token asked about commits."""
        is_last = super().watch()

        def ends(token_id: int) -> bool:
            self._is_over = self._row.append(token_id)
            return is_last(token_id) or self._is_over

        return ends

    def clip(self, token_ids: Seq[int]) -> list[int]:
        """Commit tokens, about which the criteria have spoken."""
        kept = super().clip(token_ids)
        if self._is_over and self.finish_reason is None:
            self.finish_reason = "stop"
        return kept


class Relay:
    """Gives a streamer one token of every row at a time, as transformers does, once all unfinished rows have it."""

    def __init__(self, streamer: Any, sequences: Seq[Sequence], pad_token_id: int) -> None:
        self._streamer = streamer
        self._sequences = sequences
        self._pad = pad_token_id
        self._sent = 0

    def push(self) -> None:
        """Pass on the steps that are complete."""
        if self._streamer is None:
            return
        counts = [len(seq.token_ids) - seq.prompt_len for seq in self._sequences]
        waiting = [count for count, seq in zip(counts, self._sequences) if not seq.is_finished]
        ready = min(waiting, default=max(counts))
        for step in range(self._sent, ready):
            at = [(seq.token_ids, seq.prompt_len + step) for seq in self._sequences]
            self._streamer.put(torch.tensor([ids[i] if i < len(ids) else self._pad for ids, i in at]))
        self._sent = max(ready, self._sent)
