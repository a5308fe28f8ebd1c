"""The application: endpoints, errors and the door before them. Knows no socket and no signal."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from longgraft import __version__
from longgraft.server import about, chat, completions, corpora, errors, llama
from longgraft.server.desk import Desk
from longgraft.server.door import Door


class App(FastAPI):
    """An app whose document says what mistakes become here: 400, not FastAPI's 422."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        document = super().openapi()
        for methods in document["paths"].values():
            for one in methods.values():
                one["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def create_app(desk: Desk) -> FastAPI:
    """Return the application on a desk; when it ends, so do all answers."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(desk.close)

    app = App(
        title="longgraft",
        version=__version__,
        description="The same answers, sooner.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.desk, app.state.started = desk, int(time.time())
    for part in (chat, completions, llama, about, corpora):
        app.include_router(part.router)
    errors.install(app)
    app.add_middleware(Door, keys=desk.settings.keys, max_body_bytes=desk.settings.max_body_bytes)
    return app
