"""Rounds on the device for a request that decodes alone; plain rounds for everything else.

Knows requests, `Rounds` and `DeviceRound`; no tensor of a tree. The one idea: **the host is late, never wrong**. It
queues a few rounds ahead and commits what reports say when they arrive, through the same stop rules; what was computed
beyond a stop is dropped. A request moves between here and plain rounds whenever company, memory or its sampling asks
for it, and gives the same tokens, since those follow from the text alone.

Chosen by name only (`EngineConfig(round="device")` or "graphs"). **Never run on a GPU yet.**
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence as Seq
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from longgraft.config import EngineConfig, GraftError
from longgraft.cost import ROW_BUCKETS
from longgraft.device_draw import why_not
from longgraft.device_graph import Replay
from longgraft.device_round import DeviceIndex, DeviceRound, Report
from longgraft.index.context_index import CONTEXT_DOCUMENT, ContextIndex
from longgraft.kernels.bounded import BACKENDS as BOUNDED
from longgraft.prefill import PromptReader
from longgraft.request import Request
from longgraft.rounds import Portion, Rounds
from longgraft.sequence import Sequence
from longgraft.tree import Source, TokenTree

if TYPE_CHECKING:
    from longgraft.engine import Engine

AHEAD = 2
"""Rounds that are queued before the host waits for the oldest."""
ROOM = 2048
"""Tokens that chunks are reserved for at a time."""
BOUND_STEP = 2048
"""Cached rows a round is bounded by are a multiple of this: a graph for each."""


class DeviceRounds(Rounds):
    """As `Rounds`, with rounds on the device for a request that decodes alone and whose sampling allows it."""

    def __init__(self, engine: Engine, reader: PromptReader) -> None:
        super().__init__(engine, reader)
        self.records = engine.config.round == "graphs"
        self._visit: Visit | None = None
        self._on_host = WeakSet[Request]()

    def step(self, decoding: Seq[Request], portions: Seq[Portion]) -> None:
        """One round of the batch, or one more queued on the device and what has arrived from earlier ones."""
        alone = decoding[0] if len(decoding) == 1 and not portions else None
        if self._visit is not None and (self._visit.request is not alone or self._visit.is_void):
            self._leave()
        if alone is None or (self._visit is None and self.reason_for_host(alone)):
            super().step(decoding, portions)
            return
        with alone.guarded("model"):
            if self._visit is None:
                with alone.seq.stats.stage("plan"):
                    self._visit = Visit(self, alone)
            self._advance(self._visit)
        if alone.is_over or self._visit is None or self._visit.is_done:
            self._leave()

    def reason_for_host(self, request: Request) -> str:
        """Return why a request's rounds must be plain ones, or an empty string."""
        seq, target = request.seq, self.target
        if request in self._on_host:
            return "its sampler has something to say"
        if seq.trace is not None:
            return "its trees are recorded on the host"
        if seq.policy.drafts or self.features is not None:
            return "a drafter works on the host"
        if target.long_rope_from is not None:
            return "the RoPE regime is chosen by looking at the positions"
        if seq.policy.retrieves and not (isinstance(seq.index, ContextIndex) and seq.index.is_alone):
            return "texts from elsewhere are looked up on the host"
        if seq.cache.length != len(seq.token_ids) - 1 or seq.stop.remaining < 1 or seq.is_scoring:
            return "its rows are not all there"
        return why_not(seq.sampler.params, seq.sampler.reads_text(target.device))

    def rows_for(self, seq: Sequence, last: Report | None, most: int) -> int:
        """Return how many rows the next round gets: what the last report known makes worth it, up to a bucket."""
        wanted = most
        if last is not None and self.cost is not None:
            with np.errstate(divide="ignore"):
                scores = np.concatenate([[0.0], np.log(last.gains[: most - 1])])
            wanted = self.cost.choose([scores.tolist()], [len(seq.token_ids)], [seq.trust])[0]
        return min([n for n in ROW_BUCKETS if n >= wanted] + [most], key=lambda n: (n > most, n))

    def _advance(self, visit: Visit) -> None:
        request, seq = visit.request, visit.request.seq
        with seq.stats.stage("verify"):
            visit.queue()
            reports = visit.arrived()
        for report in reports:
            self._take(request, report)
            visit.is_done |= report.is_done
            if request.is_over:
                break

    def _take(self, request: Request, report: Report) -> None:
        """Commit what a round did, as far as the stop rules let it."""
        seq = request.seq
        if report.has_fault:
            self._on_host.add(request)
        with request.guarded("sampler or tokenizer"), seq.stats.stage("accept"):
            new = seq.stop.clip(report.tokens)
            if new:  # rounds behind the end of the text did nothing
                seq.record(new, tree_of(seq, report), report.path[1 : len(new) + 1])
        if request.failure is None and new and request.on_tokens is not None:
            with request.guarded("receiver of its tokens"):
                request.on_tokens(new)

    def _leave(self) -> None:
        """Make the request as if all its rounds had been plain ones; what was computed beyond them is dropped."""
        visit, self._visit = self._visit, None
        if visit is None or visit.is_void:
            return
        request, seq = visit.request, visit.request.seq
        if not request.is_over:
            for report in visit.arrived(all_of_them=True):
                self._take(request, report)
        with request.guarded("index"), seq.stats.stage("extend"):
            seq.cache.keep(range(len(seq.token_ids) - 1 - seq.cache.length))
            if seq.policy.retrieves and not request.is_over:
                seq.index.extend(np.asarray(seq.token_ids[seq.num_indexed :], np.int32), learn=True)
                seq.num_indexed = len(seq.token_ids)


class Visit:
    """One request's stay on the device: its state there, and the reports that are on their way."""

    def __init__(self, rounds: DeviceRounds, request: Request) -> None:
        seq, most = request.seq, min(rounds.most_nodes + 1, ROW_BUCKETS[-1])
        room = min(seq.stop.remaining, ROOM)
        self.rounds, self.request, self.is_done = rounds, request, False
        index = new_index(seq, rounds.target.vocab_size, rounds.target.device, most, room) if most > 1 else None
        self.round = DeviceRound(rounds.target, seq, index, most, room)
        self._replay = Replay(self.round, rounds.records)
        self._reports: list[tuple[Tensor, Any, int]] = []
        self._last: Report | None = None
        self._known = seq.cache.length  # rows the host knows to be there

    @property
    def is_void(self) -> bool:
        """Whether the request's rows were taken away: it is over, or was put back."""
        return not self.request.seq.cache.reserved

    def queue(self) -> None:
        """Queue one round, and its report's copy to the host."""
        one = self.round
        rows = self.rounds.rows_for(self.request.seq, self._last, one.most_rows)
        most = self._known + sum(width for _, _, width in self._reports)
        bound = min(-(-(most + rows) // BOUND_STEP) * BOUND_STEP, len(one.rows))
        packed, event = self._replay.run(rows, bound), None
        if packed.device.type == "cuda":
            slot = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            packed, event = slot.copy_(packed, non_blocking=True), torch.cuda.Event()
            event.record()
        self._reports.append((packed, event, rows))

    def arrived(self, all_of_them: bool = False) -> list[Report]:
        """Return the reports that have arrived; waits only for those due, or for all."""
        reports = list[Report]()
        while self._reports:
            packed, event, rows = self._reports[0]
            is_due = all_of_them or len(self._reports) > AHEAD
            if not is_due and (event is None or not event.query()):
                break
            if event is not None:
                event.synchronize()
            del self._reports[0]
            self._last = Report.of(packed.numpy(), rows)
            self._known += len(self._last.tokens)
            reports.append(self._last)
        return reports


def tree_of(seq: Sequence, report: Report) -> TokenTree:
    """Return the tree that a round verified."""
    token_ids, parents, origins = report.nodes.T.astype(np.int32)
    n = len(token_ids)
    sources = np.where(origins < 0, Source.SUCCESSOR, np.where(origins < seq.prompt_len, Source.PROMPT, Source.HISTORY))
    documents = np.minimum(origins, CONTEXT_DOCUMENT)
    gains = np.maximum(report.gains[:n], np.finfo(np.float32).tiny)
    return TokenTree(
        np.concatenate([[seq.root_token], token_ids]).astype(np.int32),
        np.concatenate([[-1], parents]).astype(np.int32),
        np.concatenate([[0.0], np.log(gains)]).astype(np.float32),
        np.concatenate([[Source.ROOT], sources]).astype(np.int8),
        np.concatenate([[(-1, -1)], np.stack([documents, origins], axis=1)]).astype(np.int32),
    )


def new_index(seq: Sequence, vocab_size: int, device: torch.device, most: int, room: int) -> DeviceIndex | None:
    """Return a device automaton over the sequence's text, None for a policy that retrieves nothing.

    On the CPU its kernel runs as host code, which takes a C++ compiler.
    """
    from longgraft.index.device import DeviceAutomaton
    from longgraft.index.suffix_automaton import SuffixAutomaton

    if not seq.policy.retrieves:
        return None
    host = SuffixAutomaton(vocab_size, native=True)
    host.extend(np.asarray(seq.token_ids, np.int32))
    launch = None if device.type == "cuda" else _host_launch()
    return DeviceAutomaton(host, device, room=room + most, max_budget=most - 1, launch=launch)


@cache
def _host_launch() -> Any:
    from longgraft.index.host_kernel import host_launch

    with tempfile.TemporaryDirectory() as folder:
        return host_launch(folder)


def require_round(config: EngineConfig, target: Any) -> None:
    """Raise `GraftError` where rounds of the name that a config asks for cannot run at all."""
    name = config.round
    if config.exact and name != "plain":
        raise GraftError(f"round is {name!r}: exact mode needs 'plain', whose rows do not depend on one another")
    if name != "plain" and config.backend not in ("auto", *BOUNDED):
        known = ", ".join(("auto", *BOUNDED))
        raise GraftError(f"round is {name!r} with backend {config.backend!r}: expected one of {known}")
    if name == "graphs" and target.device.type != "cuda":
        raise GraftError(f"round is 'graphs': CUDA graphs need a CUDA device, this model is on {target.device}")
