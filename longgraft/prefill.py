"""Reads prompts, a portion at a time: K/V of every token but the last, then the index.

Knows sequences, target, drafter and index by their seams; nothing of queues or budgets. The one idea: **what is to be
read is whatever has no row in the cache yet**, so a prompt, one that shares its first rows with another and a
sequence that was put back and lost all its rows are one case.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from operator import eq
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from longgraft.cost import CostTable
from longgraft.sequence import Sequence
from longgraft.target import Progress, Segment

if TYPE_CHECKING:
    from longgraft.engine import Engine

# A prompt waits for another that is being read if it shares at least this part of it.
SHARED = 0.75
# Where the slope of the cost over the context is taken for estimates: rows of a forward, and tokens of context.
SLOPE_ROWS, SLOPE_CONTEXT = 64, 32 * 1024


@dataclass(frozen=True, slots=True)
class ReadingClock:
    """Estimates how long reading will take: rows `first` .. `end` - 1 of a prompt, begun at `since` (seconds).

    A row further back attends to more: row p takes 1 + `growth` x p of what row 0 takes.
    """

    first: int
    end: int
    since: float
    growth: float = 0.0

    def seconds_left(self, at: int, now: float) -> float:
        """Return the seconds that rows `at` .. are expected to take, going by those before them."""
        done = self._work(self.first, at)
        return (now - self.since) * self._work(at, self.end) / done if done else 0.0

    def _work(self, begin: int, end: int) -> float:
        return (end - begin) * (1.0 + self.growth * (begin + end) / 2)


def growth_of(cost: CostTable | None) -> float:
    """Return by how much a row's cost grows with each token before it, as a share of the cost of the first row."""
    if cost is None:
        return 0.0
    near, far = (float(cost.rounds(SLOPE_ROWS, context)[-1]) for context in (0, SLOPE_CONTEXT))
    return (far / near - 1.0) / SLOPE_CONTEXT


class PromptReader:
    """Reads the prompts of one engine: `begin`, then `segment` and `take` for every portion, then `finish`."""

    def __init__(self, engine: Engine) -> None:
        self.target, self.drafter, self.features = engine.target, engine.drafter, engine.features
        self.prefixes = engine.prefixes
        self.rows = engine.config.prefill_rows
        self.growth = growth_of(engine.cost)

    def begin(self, seq: Sequence) -> None:
        """Attach the rows that were computed for others; nothing is computed yet."""
        self.prefixes.begin(seq)

    def finish(self, seq: Sequence) -> None:
        """Make the rows known to others, now that every row of the prompt is in the cache."""
        self.prefixes.finish(seq)

    def will_share(self, seq: Sequence, other: Sequence) -> bool:
        """Say whether most of what `other` is reading will serve `seq` too, so that it need not be read twice.

        Stops at the first token that differs.
        """
        prefixes, shared = self.prefixes, int(SHARED * other.prompt_len)
        if seq.is_scoring or not prefixes.is_on or shared < prefixes.grid or len(seq.token_ids) <= shared:
            return False
        is_open = (seq.tenant, seq.long_rope) == (other.tenant, other.long_rope)
        return is_open and all(map(eq, islice(seq.token_ids, shared), other.token_ids))

    def left(self, seq: Sequence) -> int:
        """Return how many rows are still to be read."""
        return len(seq.token_ids) - 1 - seq.cache.length

    def clock(self, seq: Sequence) -> ReadingClock:
        """Return a clock for what is left to read, started now."""
        return ReadingClock(seq.cache.length, len(seq.token_ids) - 1, time.perf_counter(), self.growth)

    def next_rows(self, seq: Sequence, most: int) -> int:
        """Return how many rows the next portion has: to the next line of the grid of `prefill_rows`, `most` at most.

        On one grid from position 0, a prompt that is read alone is computed alike whatever else was reused.
        """
        done = seq.cache.length
        return min(most, self.left(seq), self.rows - done % self.rows)

    def segment(self, seq: Sequence, rows: int) -> Segment:
        """Return the next `rows` rows as part of a forward."""
        done, scores = seq.cache.length, seq.prompt_scores
        tokens = np.asarray(seq.token_ids[done : done + rows], np.int32)
        is_scored = scores is not None and scores.wants(done, done + rows)
        return Segment(seq.cache, tokens, np.arange(done, done + rows, dtype=np.int32), wants_logits=is_scored)

    def take(self, seq: Sequence, rows: int, logits: Tensor, states: Tensor | None) -> None:
        """Keep the rows that a forward computed, and the hidden states `[rows, F]` that the drafter reads.

        `logits`: [rows, V] where the segment wanted them, else [0, V]; of them only the prompt's scores are kept.
        Where the pool has side rows all states go there, whoever the request is for; else those in the drafter's window
        go to it.
        """
        first = seq.cache.length
        if seq.prompt_scores is not None and len(logits):
            seq.prompt_scores.take(first, logits, seq.token_ids)
        seq.cache.keep(range(rows))
        seq.stats.prefilled_tokens += rows
        if states is not None and seq.cache.pool.side is not None:
            seq.cache.write_side(first, states)
            return
        skipped = max(0, len(seq.token_ids) - 1 - self.drafter.feature_window - first)
        if states is not None and seq.policy.drafts and skipped < rows:
            self.drafter.prefill(seq, first + skipped, states[skipped:])

    def index(self, seq: Sequence) -> None:
        """Let the index take in what it does not have of the text."""
        if seq.policy.retrieves and seq.num_indexed < len(seq.token_ids):
            with seq.stats.stage("index"):
                seq.index.extend(np.asarray(seq.token_ids[seq.num_indexed :], np.int32), learn=False)
            seq.num_indexed = len(seq.token_ids)

    def wants_states(self, seq: Sequence) -> bool:
        """Say whether a forward over a prompt's rows must take the states that the drafter reads."""
        return self.features is not None and (seq.policy.drafts or seq.cache.pool.side is not None)

    def read(self, seq: Sequence, progress: Progress | None = None) -> None:
        """Read a whole prompt by itself, and index it."""
        self.begin(seq)
        clock, total = self.clock(seq), self.left(seq)
        while (rows := self.next_rows(seq, self.rows)) > 0:
            features = self.features if self.wants_states(seq) else None
            with seq.stats.stage("prefill"):
                segment = self.segment(seq, rows)
                (logits,) = self.target.forward([segment], long_rope=seq.long_rope, features=features)
                self.take(seq, rows, logits, features.rows() if features else None)
            if progress is not None:
                progress(total - self.left(seq), total, clock.seconds_left(seq.cache.length, time.perf_counter()))
        self.finish(seq)
        self.index(seq)
