"""A server's beginning and end: ports, models that cannot be loaded, and answers under way when it is to end."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import openai
import pytest

from longgraft.config import GraftError
from longgraft.server.run import Server, bound
from longgraft.server.settings import ServerSettings
from tests.server import live
from tests.server.live import CHAT, ENDLESS, chat_ids, client, http, plain, wait_for


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
