"""One round of a batch: trees of requests that decode and portions of prompts that are read, in one target pass.

Knows requests and the stages; not who waits, who is admitted or how much memory there is. The one idea: **all rows of
a round have one price**. Prompt rows take what the roots leave of the row budget, the cost table prices proposed nodes
behind them, and each node that is worth it takes a prompt row's place. So a long prompt cannot hold up those who
decode for longer than one forward of `round_rows` rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longgraft.accept import accept
from longgraft.guided import guided
from longgraft.policy import rows_for
from longgraft.prefill import PromptReader
from longgraft.request import Request
from longgraft.stats import shared_stage
from longgraft.target import Segment
from longgraft.tree import TokenTree, TreeBuilder, Verification
from longgraft.verify import Rows, run_segments, segment_of, verified

if TYPE_CHECKING:
    from longgraft.engine import Engine

# A forward in which somebody decodes gives prompts at least this share of its rows, however many nodes would pay.
LEAST_SHARE = 4


@dataclass(frozen=True, slots=True)
class Portion:
    """The next rows of a prompt, as many as this round reads."""

    request: Request
    rows: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one request has in a forward: a tree to verify, or (`tree` None) rows of its prompt."""

    request: Request
    segment: Segment
    tree: TokenTree | None = None


class Rounds:
    """Runs the rounds of one engine. Errors end the requests they belong to (`Request.failure`)."""

    def __init__(self, engine: Engine, reader: PromptReader) -> None:
        self.reader = reader
        self.target, self.drafter = engine.target, engine.drafter
        self.features, self.cost = engine.features, engine.cost
        self.most_nodes, self.round_rows = engine.config.max_nodes, engine.config.round_rows

    def step(self, decoding: Seq[Request], portions: Seq[Portion]) -> None:
        """One round: propose, verify in one target pass with the prompt rows beside, accept, commit.

        All requests are in one RoPE regime.
        """
        with shared_stage([request.seq.stats for request in decoding], "plan"):
            parts = self._plan(decoding, portions)
        for part, rows in self._forward(parts):
            if part.tree is not None:
                self._commit(part.request, verified(part.tree, rows))
            else:
                self._read(part.request, len(part.segment.token_ids), rows)

    def _plan(self, decoding: Seq[Request], portions: Seq[Portion]) -> list[Part]:
        """Return who has which rows in the forward: the nodes that are worth verifying now, and prompt rows."""
        builders = dict[Request, TreeBuilder]()
        for request in decoding:
            with request.guarded("drafter or index"):
                builders[request] = guided(request.seq, self.most_nodes, self.target.vocab_size)
        beside = sum(portion.rows for portion in portions)
        most = self.round_rows - min(beside, self.round_rows // LEAST_SHARE) if beside else None
        batch = [request.seq for request in builders]
        proposed = list(builders.values())
        counts = rows_for(self.cost, batch, proposed, self.most_nodes + 1, beside=beside, in_all=most)
        parts = list[Part]()
        for (request, builder), count in zip(builders.items(), counts):
            with request.guarded("drafter or index"):
                tree = builder.build(count)
                parts.append(Part(request, segment_of(request.seq.cache, tree), tree))
        return parts + self._portions(portions, sum(counts))

    def _portions(self, portions: Seq[Portion], taken: int) -> list[Part]:
        """Return the prompt rows that have room beside `taken` rows of trees."""
        room = sum(portion.rows for portion in portions)
        if taken:
            room = min(room, max(self.round_rows - taken, self.round_rows // LEAST_SHARE))
        parts = list[Part]()
        for portion in portions:
            rows, room = min(portion.rows, room), room - min(portion.rows, room)
            if rows:
                parts.append(Part(portion.request, self.reader.segment(portion.request.seq, rows)))
        return parts

    def _forward(self, parts: Seq[Part]) -> list[tuple[Part, Rows]]:
        """Run one flat forward. If it fails, each request is tried alone, so that only those fail that must."""
        if not parts:
            return []
        try:
            return list(zip(parts, self._run(parts)))
        except Exception as error:  # whatever the model raises
            for part in parts:
                part.request.seq.cache.truncate(part.request.seq.cache.length)
            if len(parts) > 1:
                return [pair for part in parts for pair in self._forward([part])]
            parts[0].request.fail("model", error)
            return []

    def _run(self, parts: Seq[Part]) -> list[Rows]:
        is_read = any(
            p.request.seq.policy.drafts if p.tree is not None else self.reader.wants_states(p.request.seq)
            for p in parts
        )
        features = self.features if is_read else None
        segments, long_rope = [part.segment for part in parts], parts[0].request.seq.long_rope
        begin = time.perf_counter()
        rows = run_segments(self.target, segments, long_rope, features)
        seconds = time.perf_counter() - begin
        for part in parts:
            part.request.seq.stats.seconds["prefill" if part.tree is None else "verify"] += seconds
        if len(parts) == 1 and parts[0].tree is not None and self.cost is not None:
            # What a table holds is one sequence's rows; those of several read several prefixes.
            self.cost.learn(len(parts[0].tree), len(parts[0].request.seq.token_ids), seconds)
        return rows

    def _commit(self, request: Request, result: Verification) -> None:
        """Accept what the ordinary sampler draws, and commit it."""
        seq = request.seq
        with request.guarded("sampler or tokenizer"), seq.stats.stage("accept"):
            accepted = accept(result, seq.sampler, seq.token_ids, seq.stop)
            new = seq.stop.clip(accepted.token_ids)
        if request.failure is not None:
            return
        with request.guarded("index or drafter"), seq.stats.stage("extend"):
            seq.policy.learn(seq, accepted)
            seq.extend(new, result, accepted)
            if seq.policy.drafts:
                self.drafter.extend(seq, new, result, accepted)
        if request.failure is None and seq.trace is not None:
            seq.trace.take(result.tree, accepted.path[1 : len(new) + 1], len(new), seq.stats.seconds)
        if request.failure is None and request.on_tokens is not None:
            with request.guarded("receiver of its tokens"):
                request.on_tokens(new)

    def _read(self, request: Request, part_rows: int, rows: Rows) -> None:
        """Keep prompt rows that were computed."""
        with request.guarded("drafter or prompt scores"):
            self.reader.take(request.seq, part_rows, rows.logits, rows.states)
        with request.guarded("receiver of its progress"):
            request.tell_progress()
