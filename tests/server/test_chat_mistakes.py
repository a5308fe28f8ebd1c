"""What chats are refused, each by a sentence that names the field, and what is ignored."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from longgraft.server.run import Server
from tests.server.live import CHAT, client, http

LONG = "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps."


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 1000}}, "logit_bias"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, None),
        ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"colour": "red"}}, "structured_outputs.colour"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"functions": [{"name": "f"}]}, None),
        ({"chat_template": "{{ 1 }}"}, None),
        ({"skip_special_tokens": False}, None),
        ({"prompt_logprobs": 0}, None),
        ({"longgraft": {"policy": "magic"}}, "longgraft.policy"),
        ({"longgraft": {"colour": True}}, "longgraft.colour"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
def test_mistakes_are_named(server: Server, sent: dict[str, Any], param: str | None) -> None:
    with http(server) as sender:
        response = sender.post("/v1/chat/completions", json={"messages": CHAT, **sent})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error" and error["message"]
    assert param is None or error["param"] == param


def test_a_model_that_is_not_served(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as caught:
        client(server).chat.completions.create(model="gpt-9", messages=CHAT)
    assert caught.value.code == "model_not_found"


def test_a_prompt_that_is_too_long(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        client(server).chat.completions.create(model="tiny", messages=[{"role": "user", "content": LONG * 100}])
    assert caught.value.code == "context_length_exceeded"


def test_fields_nobody_knows_are_ignored_and_neutral_ones_are_fine(server: Server) -> None:
    sent = {"messages": CHAT, "max_tokens": 4, "user": "me", "store": False, "whatever": [1], "tools": []}
    sent |= {"response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"], "functions": []}
    sent |= {"skip_special_tokens": True, "use_beam_search": False, "bad_words": None, "chat_template_kwargs": {}}
    with http(server) as sender:
        response = sender.post("/v1/chat/completions", json=sent)
    assert response.status_code == 200, response.text
