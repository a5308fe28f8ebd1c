"""Corpora over the network and tenants: everybody copies from what is theirs and what is shared, and sees no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from longgraft.server.keys import Keys
from longgraft.server.run import Server
from tests.server import live
from tests.server.live import CHAT, chat_ids, client, http, plain

JSON = {"Content-Type": "application/json"}
HOME = "/v1/longgraft/corpora"
KEYS = Keys([("ann", "key-of-ann"), ("bob", "key-of-bob"), ("bob", "second-key-of-bob")])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


def words() -> dict[int, float]:
    """A bias towards tokens that are words, so that an answer's text is read as the same tokens."""
    names = {token_id: name for name, token_id in live.tokenizer().get_vocab().items()}
    return {token_id: 100.0 for token_id, name in sorted(names.items()) if name[0] == "Ġ" and name[1:].isalpha()}


@pytest.fixture(scope="module")
def shared_text() -> str:
    return str(plain(chat_ids(CHAT), max_new_tokens=20, logit_bias=words()).text)


@pytest.fixture(scope="module")
def server(shelf: Path, shared_text: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    shared = live.corpus(tmp_path_factory.mktemp("shared"), "x" + shared_text)
    with live.serving(keys=KEYS, shelf=shelf, corpora=(shared,), max_corpora=2) as opened:
        yield opened


def of(server: Server, key: str) -> httpx.Client:
    return http(server, headers={"Authorization": f"Bearer {key}"})


def names(asker: httpx.Client) -> list[str]:
    return [row["id"] for row in asker.get(HOME).json()["data"]]


def test_bringing_using_and_removing(server: Server, shared_text: str) -> None:
    bias: Any = {str(token_id): value for token_id, value in words().items()}
    with of(server, "key-of-ann") as ann:
        made = ann.post(HOME, json={"name": "mine", "documents": {"a/b.html": "x" + shared_text, "..": "<b>"}})
        assert made.status_code == 200, made.text
        assert made.json()["documents"] == 2 and made.json()["shared"] is False and made.json()["tokens"] > 0
        assert names(ann) == ["shared", "mine"] and ann.get(f"{HOME}/mine").json() == made.json()
        answer = client(server, "key-of-ann").chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=20,
            logit_bias=bias,
            extra_body={"longgraft": {"corpora": ["mine"], "spans": True}},
        )
        assert answer.choices[0].message.content == shared_text and answer.choices[0].model_extra is not None
        ours = answer.choices[0].model_extra["longgraft"]
        assert ours["sources"]["corpus"] > 0 and "a/b.html" in {span["file"] for span in ours["spans"]}
        assert ann.delete(f"{HOME}/mine").json() == {"id": "mine", "object": "corpus", "deleted": True}
        assert names(ann) == ["shared"]


def test_tenants_do_not_see_one_another(server: Server) -> None:
    with of(server, "key-of-ann") as ann, of(server, "key-of-bob") as bob, of(server, "second-key-of-bob") as again:
        ann.post(HOME, json={"name": "secret", "documents": ["what Ann knows"]})
        assert names(bob) == ["shared"]
        for response in (bob.get(f"{HOME}/secret"), bob.delete(f"{HOME}/secret"), _asks(bob, ["secret"])):
            assert response.status_code == 404 and response.json()["error"]["code"] == "corpus_not_found"
        bob.post(HOME, json={"name": "secret", "documents": ["what Bob knows"]})
        assert names(again) == ["shared", "secret"] and _asks(again, ["secret"]).status_code == 200
        bob.delete(f"{HOME}/secret")
        assert names(ann) == ["shared", "secret"]
        ann.delete(f"{HOME}/secret")


def test_rows_are_not_shared_between_tenants(server: Server) -> None:
    """The same long prompt: read anew by the other tenant, found by the same one."""
    messages: Any = [{"role": "user", "content": "The lazy dog sleeps. " * 40}]
    cached = []
    for key in ("key-of-ann", "key-of-bob", "second-key-of-bob"):
        usage = client(server, key).chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
    assert max(cached[:2]) < 20 and cached[2] > 300


@pytest.mark.parametrize(
    "name",
    ["../escape", "..", ".", "a/b", "/etc", "", ".hidden", "~root", "a" * 101, "mi\x00ne", "shared", "-", "a\\b"],
)
def test_names_stay_in_their_folder(server: Server, shelf: Path, name: str) -> None:
    before = sorted(shelf.parent.rglob("*"))
    with of(server, "key-of-ann") as ann:
        made = ann.post(HOME, json={"name": name, "documents": ["text"]})
        assert made.status_code == 400
        assert name == "shared" or _asks(ann, [name]).status_code == 404
        if name and name.isprintable() and name != "shared":
            assert ann.delete(f"{HOME}/{quote(name, safe='')}").status_code in (404, 405)
    assert sorted(shelf.parent.rglob("*")) == before


def test_shared_ones_are_used_unless_others_are_named(server: Server, shared_text: str) -> None:
    def sources(extras: dict[str, Any]) -> dict[str, int]:
        answer = client(server, "key-of-bob").chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=20,
            logit_bias={str(token_id): bias for token_id, bias in words().items()},
            extra_body={"longgraft": extras},
        )
        assert answer.choices[0].message.content == shared_text and answer.choices[0].model_extra is not None
        return dict(answer.choices[0].model_extra["longgraft"]["sources"])

    # Without the corpus first: afterwards the tenant's own answer could be copied instead.
    assert sources({"corpora": []}).get("corpus", 0) == 0
    assert sources({})["corpus"] > 8 and sources({"corpora": ["shared"]})["corpus"] > 8


def test_limits_and_refusals(server: Server) -> None:
    with of(server, "key-of-bob") as bob:
        assert bob.delete(f"{HOME}/shared").status_code == 403
        for number in range(3):
            made = bob.post(HOME, json={"name": f"c{number}", "documents": ["some text"]})
            assert made.status_code == (200 if number < 2 else 400)
        assert made.json()["error"]["code"] == "too_many_corpora"
        assert bob.post(HOME, json={"name": "c0", "documents": ["other text"]}).status_code == 200
        for wrong in ({}, [], {"": "text"}, {"n" * 300: "text"}, {"a": 3}, {"\ud800": "a"}, ["\ud800"]):
            response = bob.post(HOME, content=json.dumps({"name": "c0", "documents": wrong}), headers=JSON)
            assert response.status_code == 400, wrong
        for number in range(2):
            bob.delete(f"{HOME}/c{number}")


def test_one_is_built_at_a_time(server: Server) -> None:
    lock = server.desk.shelf._building
    with of(server, "key-of-bob") as bob, lock:
        made = bob.post(HOME, json={"name": "late", "documents": ["text"]})
        assert made.status_code == 429 and made.headers["retry-after"] and "late" not in names(bob)


def test_keys(server: Server) -> None:
    with http(server) as sender:
        assert sender.get("/health").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "key-of-ann"},
            {"x-api-key": "é".encode()},
        ):
            response = sender.get("/v1/models", headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert sender.get("/metrics").status_code == sender.post("/completion", json={}).status_code == 401
        for headers in ({"Authorization": "bearer key-of-ann"}, {"x-api-key": "key-of-bob"}):
            assert sender.get("/v1/models", headers=headers).status_code == 200


def _asks(asker: httpx.Client, corpora: list[str]) -> httpx.Response:
    sent = {"messages": CHAT, "max_tokens": 4, "longgraft": {"corpora": corpora}}
    return asker.post("/v1/chat/completions", json=sent)
