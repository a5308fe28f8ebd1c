"""One server for all tests that need no other, which leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

for part in ("fastapi", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(part)

from longgraft.server.run import Server  # noqa: E402
from tests import engines  # noqa: E402
from tests.server import live  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with live.serving(shelf=tmp_path_factory.mktemp("shelf"), max_body_bytes=1 << 20) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the server has no request and no chunk of one."""
    yield
    if "server" in request.fixturenames:
        live.settled(request.getfixturevalue("server"))
