"""What a server says of itself, and its tokenizer from afar."""

from __future__ import annotations

import pytest

from longgraft import __version__
from longgraft.server.run import Server
from tests.server import live
from tests.server.live import CHAT, PROMPT, chat_ids, client, http


def test_health_version_and_models(server: Server) -> None:
    with http(server) as sender:
        assert sender.get("/health").json() == {"status": "ok"}
        assert sender.get("/version").json() == {"version": __version__}
    models = client(server).models.list().data
    assert [one.id for one in models] == ["tiny", "gpt-tiny"]
    one = client(server).models.retrieve("tiny")
    assert one.model_extra is not None and one.model_extra["max_model_len"] == 2048


def test_tokens_there_and_back(server: Server) -> None:
    ids = live.tokenizer()(PROMPT)["input_ids"]
    with http(server) as sender:
        there = sender.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
        assert (there["tokens"], there["count"], there["max_model_len"]) == (ids, len(ids), 2048)
        assert "".join(there["token_strs"]).replace("Ġ", " ").replace("Ċ", "\n") == PROMPT
        assert sender.post("/tokenize", json={"content": PROMPT}).json()["tokens"] == ids
        assert sender.post("/tokenize", json={"messages": CHAT}).json()["tokens"] == chat_ids(CHAT)
        back = sender.post("/detokenize", json={"tokens": ids}).json()
        assert back["prompt"] == back["content"] == PROMPT
        info = sender.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>" and info["chat_template"] == live.TEMPLATE


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "content": "b"}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": CHAT, "tools": [{}]}),
        ("/tokenize", {"content": "a", "with_pieces": True}),
        ("/detokenize", {"tokens": [320]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {}),
    ],
)
def test_mistakes(server: Server, path: str, sent: dict[str, object]) -> None:
    with http(server) as sender:
        response = sender.post(path, json=sent)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_places(server: Server) -> None:
    with http(server) as sender:
        lost, wrong = sender.get("/v1/nothing"), sender.get("/v1/completions")
    assert lost.status_code == 404 and "/v1/nothing" in lost.json()["error"]["message"]
    assert wrong.status_code == 405 and wrong.json()["error"]["message"] and wrong.headers["allow"] == "POST"


def test_numbers_add_up(server: Server) -> None:
    def numbers() -> dict[str, float]:
        with http(server) as sender:
            lines = [line for line in sender.get("/metrics").text.splitlines() if line and line[0] != "#"]
        found: dict[str, float] = {}
        for line in lines:
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0]] = found.get(name.split("{")[0], 0.0) + float(value)
        return found

    before = numbers()
    client(server).completions.create(model="tiny", prompt=PROMPT, max_tokens=12, n=2)
    after = numbers()

    def grown(name: str) -> float:
        return after.get(f"longgraft:{name}", 0.0) - before.get(f"longgraft:{name}", 0.0)

    assert grown("generation_tokens_total") == 24 and grown("request_success_total") == 2
    assert (
        grown("prompt_tokens_total")
        == grown("prefix_cache_queries_total")
        == 2 * len(live.tokenizer()(PROMPT)["input_ids"])
    )
    accepted = grown("spec_decode_num_accepted_tokens_total")
    assert accepted == grown("spec_decode_num_accepted_tokens_per_pos_total")
    assert grown("spec_decode_num_draft_tokens_total") >= accepted
    assert accepted + grown("rounds_total") >= 24 > accepted
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 2
    assert after["longgraft:num_requests_running"] == after["longgraft:num_requests_waiting"] == 0
    assert after["longgraft:kv_cache_usage_perc"] == 0 and not any(name.startswith("vllm") for name in after)
