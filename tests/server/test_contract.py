"""What the served OpenAPI document promises, held against the server by schemathesis. Slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longgraft.server.run import Server
from tests.server import live
from tests.server.live import CHAT, chat_ids, client, http, plain

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow

PATHS = {
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize",
    "/tokenizer_info", "/infill", "/completion", "/health", "/version", "/metrics", "/v1/longgraft/corpora",
    "/v1/longgraft/corpora/{name}",
}  # fmt: skip
# Whatever comes in, nothing breaks, and what comes back is what the document says.
EXAMPLES = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    shelf: Path = tmp_path_factory.mktemp("shelf")
    with live.serving(shelf=shelf, new_tokens=8, request_seconds=2.0, max_requests=200) as opened:
        yield opened


def test_the_document_names_every_endpoint(server: Server) -> None:
    with http(server) as sender:
        document = sender.get("/openapi.json").json()
    assert set(document["paths"]) == PATHS
    for methods in document["paths"].values():
        for one in methods.values():
            assert "422" not in one["responses"], one


def test_the_document_is_kept(server: Server) -> None:
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.errors import Unsatisfiable

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    checks = schemathesis.checks
    wanted = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    seen: list[tuple[str, int]] = []
    for result in schema.get_all_operations():
        operation = result.ok()

        def asks(case: Any) -> None:
            if isinstance(case.body, dict):  # answers may be long, but not here
                case.body = case.body | {name: 4 for name in ("max_tokens", "n_predict") if name in case.body}
            response = case.call(timeout=60)
            seen.append((case.operation.path, response.status_code))
            case.validate_response(response, checks=wanted)

        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            quick = [Phase.explicit, Phase.generate]
            test = schemathesis_test(operation.as_strategy(generation_mode=mode), asks)
            test = settings(
                max_examples=EXAMPLES, deadline=None, phases=quick, suppress_health_check=list(HealthCheck)
            )(test)
            try:
                test()
            except Unsatisfiable:  # what takes no input cannot be asked wrongly
                assert mode is schemathesis.GenerationMode.NEGATIVE and operation.body.items == []
    assert {path for path, _ in seen} >= PATHS - {"/v1/models/{name}"} and {status for _, status in seen} >= {200, 400}
    live.settled(server)
    answer = client(server).chat.completions.create(model="tiny", messages=CHAT, max_tokens=6)
    assert answer.choices[0].message.content == plain(chat_ids(CHAT), max_new_tokens=6).text


def schemathesis_test(strategy: Any, asks: Any) -> Any:
    """Return a hypothesis test of one operation."""
    from hypothesis import given

    @given(case=strategy)
    def test(case: Any) -> None:
        asks(case)

    return test
