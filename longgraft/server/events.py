"""Server-sent events, and noticing that nobody listens any more.

Knows ASGI; no endpoint. Work goes on only while the client is there: whatever is sent or computed runs beside a watch
on the connection, and the first of the two to end ends the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response

from longgraft.server.errors import api_error, is_known

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no")]  # fmt: skip


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def event(values: Any) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def unless_gone(receive: Any, work: Awaitable[T]) -> T:
    """Return what `work` returns; `ClientGone` if the client leaves first, and the work is cancelled."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of events, kept alive by comments every `ping` seconds; `ends`: what is sent last."""

    def __init__(self, events: AsyncIterator[bytes], ping: float, ends: bytes = DONE) -> None:
        super().__init__(media_type="text/event-stream")
        self._events, self._ping, self._ends = events, ping, ends

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send everything, or stop when the client leaves."""
        with suppress(ClientGone):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        failure: Exception | None = None
        try:
            async for data in _pinged(self._events, self._ping):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # too late for a status
            await send({"type": "http.response.body", "body": event(api_error(error).values()), "more_body": True})
            failure = error
        await send({"type": "http.response.body", "body": self._ends, "more_body": False})
        if failure is not None and not is_known(failure):
            raise failure  # for the server's log; the client has its answer


async def begun(events: AsyncIterator[bytes], patience: float) -> AsyncIterator[bytes]:
    """Return the same events once the first is there, so that an early error still has its status.

    After `patience` seconds it returns in any case.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=patience)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        with suppress(BaseException):
            await first
        await events.aclose()  # type: ignore[attr-defined]
        raise
    return _resumed(first, events)


async def _resumed(first: asyncio.Future[bytes], events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield await first
        async for one in events:
            yield one
    finally:
        first.cancel()
        with suppress(BaseException):
            await first
        await events.aclose()  # type: ignore[attr-defined]


async def _pinged(events: AsyncIterator[bytes], every: float) -> AsyncIterator[bytes]:
    """Yield events, and a comment whenever there was none for so long."""
    task: asyncio.Future[bytes] | None = None
    try:
        while True:
            task = task or asyncio.ensure_future(anext(events))
            await asyncio.wait({task}, timeout=every)
            if not task.done():
                yield PING
                continue
            try:
                yield task.result()
            except StopAsyncIteration:
                return
            task = None
    finally:
        if task is not None:
            task.cancel()
            with suppress(BaseException):
                await task
        await events.aclose()  # type: ignore[attr-defined]
