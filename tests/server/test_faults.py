"""Clients that leave, lie, overflow and collide: one clear error each, others unaffected, nothing left behind."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from longgraft.server.run import Server
from tests.server import live
from tests.server.live import CHAT, ENDLESS, PROMPT, chat_ids, client, http, plain, wait_for


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
        (ticket,) = service._requests
    output = ticket.result(60)
    assert output.finish_reason == "cancelled" and len(output.token_ids) < ENDLESS["max_tokens"]


def test_a_client_that_leaves_before_the_first_event_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with live.serving() as opened:  # its pings come too late to find out by
        service = opened.desk.service
        assert service is not None
        forward, has_begun, goes_on = service.engine.target.forward, threading.Event(), threading.Event()

        def held(*segments: Any, **options: Any) -> Any:
            has_begun.set()
            assert goes_on.wait(60)
            return forward(*segments, **options)

        monkeypatch.setattr(service.engine.target, "forward", held)
        try:
            body = json.dumps({**ENDLESS, "stream": True}).encode()
            host, port = opened.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(posted("/v1/chat/completions", body))
                assert has_begun.wait(30)
            wait_for(lambda: service._orders.qsize() > 0, 10)  # the order to cancel it
        finally:
            goes_on.set()


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


def test_a_fault_of_the_server_in_the_middle_of_a_stream_is_in_its_log(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("inner matters")

    monkeypatch.setattr("longgraft.server.openai_form.ChatForm.closing", broken)
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    try:
        with http(server) as sender:
            asked = {"messages": CHAT, "max_tokens": 4, "stream": True}
            *_, error, last = live.events(sender.post("/v1/chat/completions", json=asked))
        assert last == "[DONE]" and json.loads(error)["error"]["code"] is None and "inner matters" not in error
        wait_for(lambda: "inner matters" in caplog.text)
    finally:
        logger.removeHandler(caplog.handler)


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
    """A model that may say nothing but the bytes of one emoji in any order, one byte a token and one token a round."""
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
    assert set(expected.text) - {"\ufffd"}  # some characters came whole, from several rounds each


def test_a_deadline_ends_an_answer_with_what_there_is(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model="tiny", extra_body={"longgraft": {"deadline": 0.3}}, **ENDLESS
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.model_extra is not None
    assert choice.model_extra["longgraft"]["finish_reason"] == "deadline"
    assert answer.usage is not None and answer.usage.completion_tokens < 1500
