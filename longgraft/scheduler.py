"""Continuous batching: requests join and leave between rounds, and every one ends with a result or one clear error.

Knows who waits, who runs and how much memory is free; what a round does is `rounds`' business. The one idea: **age
decides**. Memory goes to the oldest first: when a round does not fit, the youngest is put back and its tokens,
committed ones included, are read again later, which changes no output. A younger one may pass one that does not fit
yet, but only so often; and of the forwards that read prompts, every other one is the oldest's, the rest the shortest's.

Synchronous and of one thread; `longgraft.service` puts a thread behind it.
"""

from __future__ import annotations

import time
from bisect import insort
from contextlib import ExitStack
from typing import TYPE_CHECKING

from longgraft.admission import chunks_missing, chunks_to_grow
from longgraft.device_rounds import DeviceRounds
from longgraft.prefill import PromptReader
from longgraft.request import OnTokens, Request
from longgraft.rounds import LEAST_SHARE, Portion, Rounds
from longgraft.sequence import Sequence
from longgraft.target import Progress

if TYPE_CHECKING:
    from longgraft.engine import Engine

# How often younger requests may be admitted before one that does not fit.
MOST_PASSED = 8
# Of what is left of a forward a further prompt gets no portion smaller than this, unless it is all of it.
LEAST_PORTION = 16


class Scheduler:
    """Runs the requests of one engine. `add`, then `step` until nothing `has_work`; `close` ends what is left.

    The model runs with our attention from the first step until nothing is left or `close` is called.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.config, self.pool = engine, engine.config, engine.pool
        self.reader = PromptReader(engine)
        self.rounds = (Rounds if engine.config.round == "plain" else DeviceRounds)(engine, self.reader)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._ended: list[Request] = []
        self._count = 0
        self._turn = 0
        self._session: ExitStack | None = None

    @property
    def has_work(self) -> bool:
        """True while a request is on its way or has ended and was not returned by a step yet."""
        return bool(self.waiting or self.running or self._ended)

    def add(
        self,
        seq: Sequence,
        *,
        progress: Progress | None = None,
        on_tokens: OnTokens | None = None,
        deadline: float | None = None,
    ) -> Request:
        """Take in an opened sequence; it joins when there is room.

        `progress` is called while its prompt is read, `on_tokens` with the tokens of every round, both within `step`.
        After `deadline` seconds from now it ends with what it has.
        """
        due = None if deadline is None else time.perf_counter() + deadline
        self._count += 1
        request = Request(seq, self._count, progress, on_tokens, due)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request between two steps; what it committed stays. Nothing happens if it is over."""
        self._finish(request, "cancelled")

    def step(self) -> list[Request]:
        """Run one round; return the requests that are over since the last step, their memory given back."""
        self.advance()
        return self.sweep()

    def advance(self) -> None:
        """Run one round: who is due ends, who fits joins, prompts are read and trees verified in one forward."""
        try:
            self._expire()
            self._admit()
            portions = self._make_room()
            for regime in (False, True):
                decoding = [r for r in self.running if r.seq.long_rope == regime and not (r.is_reading or r.is_over)]
                beside = [portion for portion in portions if portion.request.seq.long_rope == regime]
                if decoding or beside:
                    self.rounds.step(decoding, beside)
            for portion in portions:
                self._end_reading(portion.request)
        except Exception as error:  # nothing above should fail; if it does, the scheduler lives on without these
            for request in self.running or self.waiting:
                request.fail("scheduler", error)

    def sweep(self) -> list[Request]:
        """Release what belongs to requests that are over, and return them."""
        for request in [*self.waiting, *self.running]:
            if request.is_over:
                self._finish(request)
        ended, self._ended = self._ended, []
        if not self.has_work:
            self._end_session()
        return ended

    def close(self) -> None:
        """End all requests that are left and give the model back."""
        for request in [*self.waiting, *self.running]:
            self._finish(request, "cancelled")
        self._end_session()

    def _expire(self) -> None:
        now = time.perf_counter()
        for request in [*self.waiting, *self.running]:
            if request.deadline is not None and now >= request.deadline:
                self._finish(request, "deadline")

    def _admit(self) -> None:
        """Let waiting requests join, oldest first, as far as memory goes; with nobody running, the oldest in any case.

        One that does not fit lets younger ones pass, but only so often. One whose text somebody is just reading waits
        for those rows.
        """
        # What those who run will still need has room first.
        free = self.pool.num_free - sum(chunks_to_grow(request.seq, self.config) for request in self.running)
        skipped = list[Request]()
        for request in [request for request in self.waiting if not request.is_over]:
            if len(self.running) >= self.config.max_batch or any(r.passed >= MOST_PASSED for r in skipped):
                break
            if self._waits(request):
                continue
            if (needed := chunks_to_grow(request.seq, self.config)) > free and self.running:
                skipped.append(request)
                continue
            free -= needed
            for other in skipped:
                other.passed += 1
            self._start(request)

    def _waits(self, request: Request) -> bool:
        """Say whether somebody is just reading most of what this request would read."""
        if request.behind is None or not (request.behind.is_reading and request.behind in self.running):
            reading = (other for other in self.running if other.is_reading)
            request.behind = next((o for o in reading if self.reader.will_share(request.seq, o.seq)), None)
        return request.behind is not None

    def _start(self, request: Request) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=lambda r: r.number)
        self._begin_session()
        with request.guarded("model"):
            self.reader.begin(request.seq)
            request.clock = self.reader.clock(request.seq)
            request.is_reading = True
        self._end_reading(request)

    def _end_reading(self, request: Request) -> None:
        """Let a request decode from the next round on, once its prompt is read."""
        if request.is_over or not request.is_reading or self.reader.left(request.seq):
            return
        with request.guarded("index"):
            self.reader.finish(request.seq)
            self.reader.index(request.seq)
        request.is_reading = False

    def _make_room(self) -> list[Portion]:
        """Return what is read in the next round, after the youngest were put back as long as the round did not fit."""
        self._turn += 1
        while True:
            portions = self._portions()
            rows = {portion.request: portion.rows for portion in portions}
            trees = self.config.max_nodes + 1
            missing = chunks_missing(
                (request.seq.cache, rows.get(request, 0) if request.is_reading else trees)
                for request in self.running
                if not request.is_over
            )
            if missing <= self.pool.num_free or len(self.running) < 2:
                return portions
            self._put_back(self.running[-1])

    def _portions(self) -> list[Portion]:
        """Return which prompts are read next, and how many rows of each."""
        reading = [request for request in self.running if request.is_reading and not request.is_over]
        num_decoding = sum(not (request.is_reading or request.is_over) for request in self.running)
        room = self.config.prefill_rows
        if num_decoding:
            share = max(1, self.config.round_rows // LEAST_SHARE)
            room = min(room, max(self.config.round_rows - num_decoding, share))
        reading.sort(key=lambda request: self.reader.left(request.seq))
        if self._turn % 2:
            reading.sort(key=lambda request: request.number)
        portions = list[Portion]()
        for request in reading:
            left = self.reader.left(request.seq)
            rows = self.reader.next_rows(request.seq, room)
            if rows and (not portions or rows >= min(left, LEAST_PORTION)):
                portions.append(Portion(request, rows))
                room -= rows
        return portions

    def _put_back(self, request: Request) -> None:
        """Take everything computed for a request away; its tokens stay and are read again when it is its turn."""
        self.running.remove(request)
        insort(self.waiting, request, key=lambda r: r.number)
        request.is_reading, request.seq.stats.put_back = False, request.seq.stats.put_back + 1
        request.seq.cache.release()
        with request.guarded("drafter"):
            self.engine.drafter.reset(request.seq)

    def _finish(self, request: Request, reason: str | None = None) -> None:
        """Take a request out of the queues and release what belongs to it; `reason`: why, if it is not over yet."""
        if request.ended_at is not None:
            return
        if not request.is_over:
            request.end_reason = reason
        request.ended_at = time.perf_counter()
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        seq = request.seq
        seq.ended = request.end_reason
        seq.stats.seconds["total"] += request.ended_at - request.since
        seq.cache.release()
        with request.guarded("drafter"):
            self.engine.drafter.reset(seq)
        with request.guarded("history"):
            self.engine.retrieval.close(seq)
        self._ended.append(request)

    def _begin_session(self) -> None:
        if self._session is None:
            with ExitStack() as stack:
                stack.enter_context(self.engine.target.session())
                stack.enter_context(self.engine.drafter.session())
                self._session = stack.pop_all()

    def _end_session(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.close()
