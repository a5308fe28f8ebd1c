"""One answer as it comes: tokens of a ticket turned into text, round by round.

Knows tickets and text streams; no protocol. The one idea: **whoever stops listening stops the work**. A follower
cancels its ticket however it is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from longgraft.config import Output, SamplingParams, TokenLogprob
from longgraft.references import References
from longgraft.server.structure import PLAIN, Structure
from longgraft.stream import TextStream
from longgraft.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be: everything the engine must know. `predicted`: token ids of the prediction, if there is one.

    `prompt_text`: what is echoed. `structure`: how the answer is held to a form and read.
    """

    prompt_ids: list[int]
    params: SamplingParams
    references: References | None = None
    policy: str | None = None
    deadline: float | None = None
    predicted: tuple[int, ...] = ()
    prompt_text: str = ""
    structure: Structure = PLAIN


@dataclass(slots=True)
class Clock:
    """When things happened, on the clock of `time.perf_counter`: asked, first tokens, last tokens."""

    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None

    def tick(self) -> float | None:
        """Note that tokens came; return the seconds since the last ones, None at the first."""
        now, before = time.perf_counter(), self.last
        self.first, self.last = self.first or now, now
        return None if before is None else now - before


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round added; the last piece holds the rest of the text and the `output`."""

    text: str
    token_ids: Seq[int] = ()
    logprobs: Seq[TokenLogprob] = ()
    output: Output | None = None


class Follower:
    """Follows one ticket. `ends_at(text)`: says of all text so far whether that is enough."""

    def __init__(self, job: Job, ticket: Ticket, tokenizer: Any, on_round: Callable[[Clock, int], None]) -> None:
        self.job, self.ticket = job, ticket
        self.clock = Clock()
        self.ends_at: Callable[[str], bool] | None = None
        self.text = ""
        self.output: Output | None = None
        self._stream = TextStream(tokenizer, job.prompt_ids, job.params.stop)
        self._on_round = on_round

    @property
    def prompt_logprobs(self) -> Seq[TokenLogprob | None]:
        """Those of the prompt, from the first piece on, if they were asked for."""
        return self.output.prompt_logprobs if self.output is not None else self.ticket.prompt_logprobs

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield a piece a round and one at the end; raises the request's error."""
        given = 0
        try:
            async with aclosing(aiter(self.ticket)) as blocks:  # type: ignore[type-var]
                async for block in blocks:
                    self._on_round(self.clock, len(block))
                    text = self._stream.push(block)
                    self.text += text
                    logprobs = self.ticket.logprobs[given : given + len(block)]
                    given += len(block)
                    yield Piece(text, block, logprobs)
                    if self.ends_at is not None and self.ends_at(self.text):
                        self.ticket.cancel()
            self.output = self.ticket.result(0)
            rest = self._stream.finish()
            self.text += rest
            yield Piece(rest, output=self.output)
        finally:
            self.ticket.cancel()


async def merged(followers: Seq[Follower]) -> AsyncIterator[tuple[int, Piece]]:
    """Yield the pieces of all as they come, with the number of whose they are; the first error ends all."""
    queue = asyncio.Queue[tuple[int, Piece | BaseException | None]]()

    async def pump(number: int, follower: Follower) -> None:
        try:
            async with aclosing(follower.pieces()) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    queue.put_nowait((number, piece))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(pump(number, one)) for number, one in enumerate(followers)]
    left = len(tasks)
    try:
        while left:
            number, news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                left -= 1
            else:
                yield number, news
    finally:
        for task, follower in zip(tasks, followers):
            task.cancel()
            follower.ticket.cancel()  # a task that never began has not done it
        await asyncio.gather(*tasks, return_exceptions=True)
