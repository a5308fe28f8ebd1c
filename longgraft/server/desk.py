"""What all endpoints share: the service, the settings, what is counted, and how a job becomes an answer.

Knows the service and the settings; no protocol. Whatever takes time (tokenising, reading corpora) runs in a thread, so
that the event loop always answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from longgraft.config import GraftError
from longgraft.engine import Engine
from longgraft.grammar import Grammar
from longgraft.references import References
from longgraft.server.errors import SERVER, ApiError
from longgraft.server.fields import Extras, Sampled, titled
from longgraft.server.follow import Clock, Follower, Job
from longgraft.server.metrics import Metrics
from longgraft.server.settings import ServerSettings
from longgraft.server.shelf import Shelf
from longgraft.server.structure import named
from longgraft.service import Busy, Service

T = TypeVar("T")


class Desk:
    """One server's state. `service` is None while the model is loading."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.service: Service | None = None
        self.shelf = Shelf(settings.shelf, settings.corpora, settings.max_corpora)
        self.metrics = Metrics(lambda: self.service, settings.names[0], settings.vllm_metrics)
        self.is_draining = False

    def open(self, engine: Engine) -> None:
        """Begin to serve a model; raises `GraftError` if it has no tokenizer or a shared corpus does not fit."""
        if engine.tokenizer is None:
            raise ApiError(500, "the model has no tokenizer: a server needs one", kind=SERVER)
        self.shelf.check(engine)
        self.service = Service(engine, max_requests=self.settings.max_requests)

    def warm(self) -> None:
        """Make ready what the first request of its kind would wait for: grammars of a large vocabulary take seconds."""
        if self.service is not None:
            with suppress(GraftError):  # whoever asks for one is told
                self.service.engine.grammars.compile(Grammar.json_object())

    def close(self) -> None:
        """End all answers."""
        self.is_draining = True
        if self.service is not None:
            self.service.close()

    def check_ready(self) -> Service:
        """Return the service; raises `ApiError` while the model is loading or the server ends."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", kind=SERVER, code="shutting_down")
        if self.service is None:
            raise ApiError(503, "the model is loading: try again later", kind=SERVER, code="loading")
        return self.service

    @property
    def engine(self) -> Engine:
        """The engine; an `ApiError` while it is loading."""
        return self.check_ready().engine

    def check_model(self, name: str | None) -> str:
        """Return the name an answer bears; raises `ApiError` for a model that is not served."""
        if name is not None and name not in self.settings.names:
            said = f"the model {name!r} is not served here: expected {' or '.join(self.settings.names)}"
            raise ApiError(404, said, param="model", code="model_not_found")
        return name or self.settings.names[0]

    async def with_tokenizer(self, act: Callable[[], T]) -> T:
        """Run something that uses the tokenizer, in a thread and alone."""
        service = self.check_ready()

        def alone() -> T:
            with service.tokenizing:
                return act()

        return await run_in_threadpool(alone)

    def room_for(self, prompt_ids: Sequence[int], wanted: int | None) -> int:
        """Return how many tokens an answer may have; raises `ApiError` if the prompt leaves no room.

        `wanted`: so many were asked for; else as many as `new_tokens` allows and fit.
        """
        engine, pool = self.engine, self.engine.pool
        room = engine.max_context - len(prompt_ids)
        if room < (wanted != 0):
            said = f"the prompt has {len(prompt_ids)} tokens: expected fewer than {engine.max_context + (wanted == 0)}"
            raise ApiError(400, f"{said}, the context limit", code="context_length_exceeded")
        if wanted is not None:
            return min(wanted, room)
        rows = pool.num_chunks * pool.chunk_rows - engine.config.max_nodes - 1
        return max(1, min(self.settings.new_tokens, room, rows - len(prompt_ids)))

    def references(self, extras: Extras, tenant: str | None, prediction: str | None = None) -> References:
        """Return what a request may copy from; raises `ApiError` for corpora that are not its tenant's."""
        config = self.engine.config
        shares = bool(config.history_tokens or config.prefix_cache)
        return References(
            prediction=extras.prediction if prediction is None else prediction,
            documents=titled(extras.documents),
            corpora=self.shelf.find(extras.corpora, tenant),
            tenant=tenant if shares else None,
        )

    def deadline(self, extras: Extras) -> float | None:
        """Return after how many seconds a request ends: the server's limit or its own, whichever is less."""
        limits = [one for one in (self.settings.request_seconds, extras.deadline) if one is not None]
        return min(limits, default=None)

    def predicted(self, text: Any) -> tuple[int, ...]:
        """Return the token ids of a prediction; the caller holds the tokenizer."""
        return tuple(self.engine.encode(text)) if text else ()

    def count(self, body: Sampled, num_prompts: int) -> int:
        """Return how many answers there are to be for each prompt; raises `ApiError` if that is too many."""
        n, most = body.n or 1, min(self.settings.max_choices, self.settings.max_requests)
        if n * num_prompts > most:
            raise ApiError(400, f"{num_prompts} prompts x n = {n}: expected at most {most} answers", param="n")
        return n

    async def submit(self, jobs: Sequence[Job]) -> list[Follower]:
        """Hand in all jobs of one request, or none of them; raises `ApiError` if there is no room."""
        service = self.check_ready()
        try:
            if service.num_requests + len(jobs) > self.settings.max_requests:
                raise Busy(f"{service.num_requests} answers are on their way already: try again later")
            return await run_in_threadpool(self._submit, service, jobs)
        except Busy:
            self.metrics.refused()
            raise

    def _submit(self, service: Service, jobs: Sequence[Job]) -> list[Follower]:
        followers = list[Follower]()
        for job in jobs:
            named(job.structure.param or "", partial(service.engine.grammars.compile, job.params.grammar))
        try:
            for job in jobs:
                ticket = service.submit(
                    job.prompt_ids, job.params, references=job.references, policy=job.policy, deadline=job.deadline
                )
                followers.append(Follower(job, ticket, service.engine.tokenizer, self._on_round))
        except BaseException:
            for follower in followers:
                follower.ticket.cancel()
            raise
        return followers

    def _on_round(self, clock: Clock, num_tokens: int) -> None:
        self.metrics.round(clock.asked, clock.tick(), num_tokens)


def desk_of(request: Any) -> Desk:
    """Return the desk of the app that a request came to."""
    desk = request.app.state.desk
    assert isinstance(desk, Desk)
    return desk


def tenant_of(request: Any) -> str | None:
    """Return whose request it is."""
    return getattr(request.state, "tenant", None)
