"""The load test counts what clients see: on a tiny server, for a moment."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest

for part in ("fastapi", "uvicorn", "httpx", "openai"):
    pytest.importorskip(part)

from longgraft.eval.bench_server import Tally, load, requests_of, servers  # noqa: E402
from tests import engines  # noqa: E402
from tests.server import live  # noqa: E402


def test_requests_are_the_same_every_time_and_of_mixed_lengths() -> None:
    first, again = (list(islice(requests_of(3), 12)) for _ in range(2))
    assert first == again and first != list(islice(requests_of(4), 12))
    assert len({one["max_tokens"] for one in first}) > 1


def test_a_moment_of_load() -> None:
    with engines.one_thread(), live.serving() as server:
        tally = asyncio.run(load(server.url, "tiny", 3, 0.5))
        wrong = asyncio.run(load(server.url, "nobody", 1, 0.1))
    found = tally.summary()
    assert found["errors"] == 0, found["first_error"]
    assert found["answers"] >= 3 and found["tokens_per_s"] > 0
    assert found["first_p99_ms"] >= found["first_p50_ms"] > 0 and found["between_p50_ms"] > 0
    assert "404" in wrong.summary()["first_error"] and wrong.answers == 0


def test_nothing_seen_is_no_number() -> None:
    assert Tally().summary()["first_p50_ms"] is None
    assert [command[0] for command in servers("M", "float32", 2).values()]
