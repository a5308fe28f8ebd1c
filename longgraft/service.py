"""A thread that owns the model: other threads and event loops hand it requests and get tickets.

Knows engine and scheduler; no protocol. The one idea: **one thread touches the model**. Everything else reaches it as
an order in a queue, read between two rounds; what it has to say lies in the ticket of its request.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from longgraft.config import GraftError, Output, SamplingParams
from longgraft.references import References
from longgraft.request import Failure, Request
from longgraft.scheduler import Scheduler
from longgraft.sequence import Sequence
from longgraft.ticket import Ticket

if TYPE_CHECKING:
    from longgraft.engine import Engine, Prompt

Order = Callable[[], None]


class Busy(GraftError):
    """Refused because too many requests are on their way: the same request may be taken later."""


class Closed(GraftError):
    """Refused or ended because the service takes no more requests."""


class Service:
    """Runs an engine's requests in one thread of its own, which ends with `close`.

    While it is open nothing else may run on the engine. Between requests the model has its own attention back.
    """

    def __init__(self, engine: Engine, *, max_requests: int = 1024) -> None:
        """`max_requests`: so many on their way at a time; one more is refused."""
        self.engine, self.max_requests = engine, max_requests
        self._scheduler = Scheduler(engine)
        self._requests: dict[Ticket, Request | None] = {}
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._door = threading.Lock()
        self.tokenizing = threading.Lock()  # whoever uses the tokenizer beside `submit` holds it: tokenizers keep state
        self._is_closing = self._is_draining = False
        self._thread = threading.Thread(target=self._work, name="longgraft", daemon=True)
        self._thread.start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_requests(self) -> int:
        """Requests on their way."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Those of them that compute; the others wait for room or for their turn."""
        return len(self._scheduler.running)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        references: References | None = None,
        policy: str | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        """Hand in a request; `deadline`: seconds from now after which it ends with what it has.

        Raises `GraftError` if the prompt or the grammar cannot be read, `Closed` or `Busy` if no more are taken or too
        many are on their way; whatever else is wrong is the ticket's error.
        """
        since = time.perf_counter()
        prompt_ids = self._encoded(prompt)
        if params is not None:
            self.engine.grammars.compile(params.grammar)  # here, as a large one would hold up everybody's round
        ticket = Ticket(lambda ticket: self._orders.put(partial(self._cancel, ticket)))

        def begin() -> None:
            seq = self.engine.open(prompt_ids, params or SamplingParams(), references=references, policy=policy)
            left = None if deadline is None else deadline - (time.perf_counter() - since)
            told = partial(self._told, ticket, seq)
            request = self._scheduler.add(seq, progress=ticket.read, on_tokens=told, deadline=left)
            self._requests[ticket] = request

        with self._door:
            if self._is_closing:
                raise Closed("the service is closed: it takes no more requests")
            if len(self._requests) >= self.max_requests:
                raise Busy(f"{self.max_requests} requests are on their way already: try again later")
            self._requests[ticket] = None
            self._orders.put(partial(self._guarded, ticket, "request", begin))
        return ticket

    def close(self, drain: bool = False) -> None:
        """Take no more requests, end those that are left (`drain`: let them finish) and wait for the thread to end."""
        with self._door:
            self._is_closing, self._is_draining = True, drain
        self._orders.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _encoded(self, prompt: Prompt) -> list[int]:
        """Return token ids, made in the thread that asks: a long text would hold up everybody's round."""
        try:
            with self.tokenizing:
                return self.engine.encode(prompt)
        except GraftError:
            raise
        except Exception as error:
            raise Failure("tokenizer", error).sentence() from error

    def _work(self) -> None:
        while not self._is_closing or (self._is_draining and self._requests):
            self._turn()
        self._scheduler.close()
        self._conclude(self._scheduler.sweep())
        for ticket in list(self._requests):
            self._end(ticket, error=Closed("the service was closed before the request began"))

    def _obey(self) -> None:
        """Carry out the orders that lie there; with nothing else to do, wait for one."""
        if not self._scheduler.has_work:
            self._orders.get()()
        with suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()

    def _turn(self) -> None:
        try:
            self._obey()
            self._conclude(self._scheduler.step())
        except Exception as error:  # the last net: those on their way end in it, those to come find all as new
            with suppress(Exception):
                self._scheduler.close()
            self._scheduler = Scheduler(self.engine)
            for ticket, request in list(self._requests.items()):
                if request is not None:
                    self._end(ticket, error=Failure("scheduler", error).sentence())

    def _conclude(self, ended: list[Request]) -> None:
        """Give results or errors to the tickets of requests that are over."""
        tickets = {request: ticket for ticket, request in self._requests.items()}
        for request in ended:
            if (ticket := tickets.get(request)) is None:
                continue
            if request.failure is not None:
                self._end(ticket, error=request.failure.sentence())
            else:
                self._guarded(ticket, "tokenizer", partial(self._deliver, ticket, request))

    def _told(self, ticket: Ticket, seq: Sequence, token_ids: Seq[int]) -> None:
        if seq.prompt_scores is not None:
            ticket.prompt_logprobs = seq.prompt_scores.logprobs
        ticket.say(token_ids, seq.logprobs[-len(token_ids) :] if seq.logprobs else ())

    def _deliver(self, ticket: Ticket, request: Request) -> None:
        self._end(ticket, self.engine.output(request.seq))

    def _cancel(self, ticket: Ticket) -> None:
        if (request := self._requests.get(ticket)) is not None:
            self._scheduler.cancel(request)

    def _guarded(self, ticket: Ticket, stage: str, act: Order) -> None:
        """Make an error of `act` the end of one ticket."""
        try:
            act()
        except Exception as error:
            self._end(ticket, error=Failure(stage, error).sentence())

    def _end(self, ticket: Ticket, output: Output | None = None, error: GraftError | None = None) -> None:
        with self._door:
            self._requests.pop(ticket, None)
        ticket.say(output=output, error=error)
