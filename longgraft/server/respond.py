"""From jobs to a response: whole or as a stream, whatever the protocol.

Knows followers and events; what chunks and answers look like is a `Form`'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from longgraft.server.desk import Desk, desk_of
from longgraft.server.errors import api_error
from longgraft.server.events import ClientGone, EventStream, begun, event, unless_gone
from longgraft.server.follow import Follower, Job, Piece, merged

# What servers say of a request whose client left; nobody reads it.
GONE = 499


class Form(Protocol):
    """One protocol's way to write answers down. `ends`: what its streams end with."""

    ends: bytes

    def piece(self, number: int, piece: Piece, follower: Follower) -> list[dict[str, Any]]:
        """Return the chunks that one piece becomes; the last piece of an answer holds its output."""

    def closing(self, followers: Seq[Follower]) -> list[dict[str, Any]]:
        """Return the chunks after all answers."""

    def whole(self, followers: Seq[Follower], logprobs: Seq[Seq[Any]]) -> dict[str, Any]:
        """Return all answers as one body."""


async def respond(request: Request, jobs: Seq[Job], form: Form, stream: bool, until: Any = None) -> Response:
    """Answer a request; its client's leaving ends the work. `until(follower)` makes a follower's `ends_at`."""
    desk = desk_of(request)
    followers = await desk.submit(jobs)
    for follower in followers:
        follower.ends_at = until(follower) if until is not None else None
    try:
        if stream:
            first = begun(_events(desk, followers, form), desk.settings.ping_seconds)
            events = await unless_gone(request.receive, first)
            return EventStream(events, desk.settings.ping_seconds, form.ends)
        logprobs = await unless_gone(request.receive, _collected(desk, followers))
    except ClientGone:
        return Response(status_code=GONE)
    if not _is_scored(jobs):
        return JSONResponse(form.whole(followers, logprobs))
    return await run_in_threadpool(lambda: JSONResponse(form.whole(followers, logprobs)))


def _is_scored(jobs: Seq[Job]) -> bool:
    """Say whether there are log-probabilities of prompts: writing down those of a long one takes seconds."""
    return any(job.params.prompt_logprobs is not None for job in jobs)


async def _collected(desk: Desk, followers: Seq[Follower]) -> list[list[Any]]:
    logprobs: list[list[Any]] = [[] for _ in followers]
    async for number, piece in _counted(desk, followers):
        logprobs[number] += piece.logprobs
    return logprobs


async def _events(desk: Desk, followers: Seq[Follower], form: Form) -> AsyncIterator[bytes]:
    pieces = _counted(desk, followers)
    try:
        async for number, piece in pieces:
            written = partial(_written, form, number, piece, followers[number])
            yield await run_in_threadpool(written) if _is_scored([followers[number].job]) else written()
        if last := form.closing(followers):
            yield b"".join(event(values) for values in last)
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]


def _written(form: Form, number: int, piece: Piece, follower: Follower) -> bytes:
    """Return what one round becomes; it is sent in one go."""
    return b"".join(event(values) for values in form.piece(number, piece, follower))


async def _counted(desk: Desk, followers: Seq[Follower]) -> AsyncIterator[tuple[int, Piece]]:
    """Yield pieces, and tell the metrics how each answer ended."""
    pieces = merged(followers)
    try:
        async for number, piece in pieces:
            if piece.output is not None:
                desk.metrics.finished(followers[number].clock.asked, piece.output)
            yield number, piece
    except Exception as error:
        desk.metrics.failed(api_error(error).status)
        raise
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
