"""A ticket: how other threads and event loops follow one request, and end it.

Knows outputs and errors; no engine, no scheduler. Everything said so far stays in it, so any number of readers may
come, early or late.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress

from longgraft.config import GraftError, Output, TokenLogprob


class Ticket:
    """One request as whoever asked sees it; every method may be called from any thread.

    Iterating gives the committed tokens, a list for every round, from the first on, also afterwards and repeatedly;
    `async for` the same without blocking the event loop. Both raise the request's error at its end, if it has one.
    """

    def __init__(self, cancel: Callable[[Ticket], None]) -> None:
        self._cancel = cancel
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._blocks: list[list[int]] = []
        self.logprobs: list[TokenLogprob] = []  # of the tokens said so far, if they were asked for
        self.prompt_logprobs: Seq[TokenLogprob | None] = ()  # of the prompt, once it is read, if they were asked for
        self._output: Output | None = None
        self._error: GraftError | None = None
        self._reading: tuple[int, int, float] | None = None

    @property
    def is_over(self) -> bool:
        """True once there is a result or an error."""
        return self._output is not None or self._error is not None

    @property
    def reading(self) -> tuple[int, int, float] | None:
        """How far its prompt was read when last heard: rows done, rows in all, seconds left. None: not begun."""
        return self._reading

    def cancel(self) -> None:
        """End it after the round under way; what was committed is its result. Nothing happens if it is over."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the result; raises the request's `GraftError`, or `TimeoutError` after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_over, timeout):
                raise TimeoutError(f"no result after {timeout} seconds")
        return self._concluded()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield committed tokens, blocking between rounds."""
        given = 0
        while True:
            with self._changed:
                while len(self._blocks) == given and not self.is_over:
                    self._changed.wait()
                fresh = self._blocks[given:]
            yield from fresh
            given += len(fresh)
            if not fresh:
                self._concluded()
                return

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        """Yield committed tokens without blocking the event loop."""
        loop, news, given = asyncio.get_running_loop(), asyncio.Event(), 0

        def tell() -> None:
            with suppress(RuntimeError):  # the loop was closed with the reader in the middle
                loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._listeners.append(tell)
        try:
            while True:
                news.clear()
                with self._changed:
                    fresh, is_over = self._blocks[given:], self.is_over
                for block in fresh:
                    yield block
                given += len(fresh)
                if not fresh and is_over:
                    self._concluded()
                    return
                if not fresh:
                    await news.wait()
        finally:
            with self._changed:
                self._listeners.remove(tell)

    def _concluded(self) -> Output:
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    def say(
        self,
        block: Seq[int] = (),
        logprobs: Seq[TokenLogprob] = (),
        output: Output | None = None,
        error: GraftError | None = None,
    ) -> None:
        """Take news from whoever does the work: tokens, or the end."""
        with self._changed:
            self.logprobs += logprobs
            if block:
                self._blocks.append(list(block))
            self._output, self._error = output, error
            self._changed.notify_all()
            listeners = list(self._listeners)
        for tell in listeners:
            tell()

    def read(self, done: int, total: int, seconds: float) -> None:
        """Take in how far the prompt is read."""
        self._reading = (done, total, seconds)
