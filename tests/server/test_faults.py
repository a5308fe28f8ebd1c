"""Clients that leave, lie, overflow and collide: one clear error each, others unaffected, nothing left behind."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from longgraft.config import GraftError
from longgraft.server.run import Server, bound
from longgraft.server.settings import ServerSettings
from tests.server import live
from tests.server.live import CHAT, PROMPT, chat_ids, client, http, idle, plain, wait_for

ENDLESS: dict[str, Any] = {"messages": CHAT, "max_tokens": 1500, "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with live.serving(max_body_bytes=100_000, max_requests=4, max_choices=4, ping_seconds=0.2) as opened:
        yield opened


def raw(server: Server, data: bytes, read: bool = True) -> bytes:
    """Send bytes as they are and return what comes until the connection ends."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        answer = b""
        while read and (part := connection.recv(65536)):
            answer += part
        return answer


def posted(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_when_the_client_leaves(server: Server, stream: bool) -> None:
    service = server.desk.service
    assert service is not None
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(posted("/v1/chat/completions", body))
        if stream:
            assert b"200 OK" in connection.recv(4096)
        wait_for(lambda: service.num_running == 1)
        assert plain_is_served(server)
    begin = time.monotonic()
    wait_for(lambda: idle(server))
    assert time.monotonic() - begin < 20  # 1,500 tokens take longer


def plain_is_served(server: Server) -> bool:
    answer = client(server).chat.completions.create(model="tiny", messages=CHAT, max_tokens=6)
    return answer.choices[0].message.content == plain(chat_ids(CHAT), max_new_tokens=6).text


def test_all_answers_of_a_request_end_with_its_client(server: Server) -> None:
    body = json.dumps({**ENDLESS, "n": 3, "stream": True}).encode()
    service = server.desk.service
    assert service is not None
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(posted("/v1/chat/completions", body))
        wait_for(lambda: service.num_requests == 3)
    live.settled(server)


def test_no_room_is_said_at_once_and_room_comes_back(server: Server) -> None:
    service = server.desk.service
    assert service is not None
    with client(server).chat.completions.create(model="tiny", stream=True, n=4, **ENDLESS):
        wait_for(lambda: service.num_requests == 4)
        with pytest.raises(openai.RateLimitError) as caught:
            client(server).chat.completions.create(model="tiny", messages=CHAT, max_tokens=2)
        assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "rate_limit_exceeded"
    live.settled(server)
    assert plain_is_served(server)


def malformed(number: int) -> list[bytes]:
    """Bodies that are no requests, each in its own way."""
    whole, chance = json.dumps({"messages": CHAT, "max_tokens": 4, "prompt": PROMPT}).encode(), random.Random(7)
    fixed = [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b'{"messages": "\xc3\x28"}',
        b"NaN",
        b"[" * 50_000,
        b"1" * 9000,
    ]
    fixed += [b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800"}', b"{}" * 3]
    fixed += [b'{"messages": 3, "prompt": 3.5}', b'{"prompt": {"a": 1e999}}', b'{"messages": [null], "prompt": [null]}']
    fixed += [b'{"messages": [{"role": "user"}], "prompt": "x", "max_tokens": 1e400}']
    fixed += [b'{"messages": [{"role": "", "content": "x"}], "prompt": "x", "temperature": NaN}']
    while len(fixed) < number:
        cut = bytearray(whole[: chance.randrange(1, len(whole) - 1)])
        cut[chance.randrange(len(cut))] = chance.choice(b'\x00"{}[]:\xff')
        fixed.append(bytes(cut))
    return fixed


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("number", [17, pytest.param(200, marks=pytest.mark.slow)])
def test_malformed_bodies(server: Server, path: str, number: int) -> None:
    with http(server) as sender:
        for body in malformed(number):
            response = sender.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400, (body[:80], response.text)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error" and error["message"]
    assert plain_is_served(server)


def test_bodies_that_are_too_large(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    large = b" " * 200_000
    with http(server) as sender:
        for content in (large, endless()):
            response = sender.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 413 and response.json()["error"]["type"] == "invalid_request_error"
    assert plain_is_served(server)


@pytest.mark.parametrize(
    ("length", "status"), [(b"200000", 413), (b"9" * 23, 400), (b"-1", 400), (b"two", 400), (b"2, 3", 400)]
)
def test_a_length_that_is_a_lie_is_refused(
    server: Server, length: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longgraft.server.door.PATIENCE", 0.1)  # so long what was announced is waited for
    answer = raw(server, posted("/v1/completions", b"{}").replace(b"Length: 2", b"Length: " + length))
    assert status_of(answer) == status and b"connection: close" in answer.lower()


def test_a_body_that_never_comes_is_no_request(server: Server) -> None:
    service = server.desk.service
    assert service is not None
    raw(server, posted("/v1/completions", b'{"prompt": "x"').replace(b"Length: 14", b"Length: 15"), read=False)
    assert plain_is_served(server) and service.num_requests == 0


def test_no_http_at_all(server: Server) -> None:
    answer = raw(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
    assert status_of(answer) == 400 and plain_is_served(server)


def test_an_error_of_the_engine_is_one_requests_and_a_500(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.desk.service
    assert service is not None
    opening = service.engine.open

    def broken(prompt_ids: Any, params: Any, **options: Any) -> Any:
        if params.max_new_tokens == 13:
            raise RuntimeError("out of order")
        return opening(prompt_ids, params, **options)

    monkeypatch.setattr(service.engine, "open", broken)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="out of order"):
            client(server).chat.completions.create(model="tiny", messages=CHAT, max_tokens=13, stream=stream)
    assert plain_is_served(server)


def test_an_error_in_the_middle_of_a_stream_is_an_event(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.desk.service
    assert service is not None
    forward, count = service.engine.target.forward, [0]

    def failing(*segments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > 4:
            raise RuntimeError("memory fault")
        return forward(*segments, **options)

    monkeypatch.setattr(service.engine.target, "forward", failing)
    with pytest.raises(openai.APIError, match="memory fault"):
        for _ in client(server).chat.completions.create(model="tiny", stream=True, **ENDLESS):
            pass
    monkeypatch.undo()
    assert plain_is_served(server)


def test_a_long_silence_is_filled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.desk.service
    assert service is not None
    forward = service.engine.target.forward

    def slow(*segments: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return forward(*segments, **options)

    monkeypatch.setattr(service.engine.target, "forward", slow)
    with http(server) as sender:
        response = sender.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "stream": True})
    assert ": ping\n\n" in response.text and live.events(response)[-1] == "[DONE]"


def test_characters_split_over_tokens_arrive_whole(server: Server) -> None:
    """A model that may say nothing but the bytes of one emoji, one byte a token and one token a round."""
    tokenizer = live.tokenizer()
    word = tokenizer("🦖", add_special_tokens=False)["input_ids"]
    assert len(word) > 2
    bias = {str(token): 100 for token in word}
    extras = {"longgraft": {"policy": "plain"}}
    options: Any = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 24,
        "logit_bias": bias,
        "temperature": 1.0,
        "seed": 3,
    }
    expected = plain(chat_ids(CHAT), max_new_tokens=24, logit_bias=dict.fromkeys(word, 100.0), temperature=1.0, seed=3)
    pieces = []
    for chunk in client(server).chat.completions.create(stream=True, extra_body=extras, **options):
        pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == expected.text
    whole = [piece for piece in pieces if "🦖" in piece]
    assert expected.text.count("🦖") == sum(piece.count("🦖") for piece in whole)


def test_a_deadline_ends_an_answer_with_what_there_is(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model="tiny", extra_body={"longgraft": {"deadline": 0.3}}, **ENDLESS
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.model_extra is not None
    assert choice.model_extra["longgraft"]["finish_reason"] == "deadline"
    assert answer.usage is not None and answer.usage.completion_tokens < 1500


# Beginning and end --------------------------------------------------------------------------------------------------


def test_a_port_in_use() -> None:
    with bound("127.0.0.1", 0) as taken, pytest.raises(GraftError, match="cannot be listened on"):
        bound("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("not a host", 0), ("256.1.1.1", 0)])
def test_an_address_that_is_none(host: str, port: int) -> None:
    with pytest.raises(GraftError):
        bound(host, port)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def missing() -> Any:
        raise GraftError("the model 'nowhere' was not found")

    with pytest.raises(GraftError, match="nowhere"):
        Server(ServerSettings(("tiny",)), bound("127.0.0.1", 0)).run(missing)


def test_while_it_loads_it_says_so() -> None:
    loaded = threading.Event()

    def slowly() -> Any:
        loaded.wait(30)
        return live.tiny_engine()

    server = Server(ServerSettings(("tiny",)), bound("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=(slowly,))
    thread.start()
    try:
        with http(server) as sender:
            for response in (sender.get("/health"), sender.post("/completion", json={"prompt": "x"})):
                assert response.status_code == 503 and response.json()["error"]["code"] == "loading"
                assert response.headers["retry-after"] == "1"
            loaded.set()
            wait_for(lambda: sender.get("/health").status_code == 200)
    finally:
        server.stop()
        thread.join(60)


def test_answers_under_way_are_finished_before_the_server_ends() -> None:
    expected = plain(chat_ids(CHAT), max_new_tokens=60)
    with live.serving() as server:
        stream = client(server).chat.completions.create(model="tiny", messages=CHAT, max_tokens=60, stream=True)
        text = next(stream).choices[0].delta.content or ""
        server.stop()
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == expected.text


def test_an_answer_that_takes_too_long_is_cut_when_the_server_ends() -> None:
    with live.serving(drain_seconds=1) as server:
        stream, pieces = client(server).chat.completions.create(model="tiny", stream=True, **ENDLESS), []
        pieces.append(next(stream))
        server.stop()
        # Some releases of the client let the transport's error through, others wrap it.
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)) as caught:
            pieces += stream
        assert "peer closed connection" in str(caught.value.__cause__ or caught.value)
        assert not any(piece.choices[0].finish_reason for piece in pieces)
