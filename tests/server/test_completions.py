"""Completions through OpenAI's own client: every form of prompt, echo, log-probabilities, and filling in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longgraft.server.run import Server
from tests.server import live
from tests.server.live import PROMPT, client, http, plain


def ids_of(text: str) -> list[int]:
    return list(live.tokenizer()(text)["input_ids"])


@pytest.mark.parametrize("prompt", [PROMPT, ids_of(PROMPT)], ids=["text", "ids"])
def test_text_and_token_ids(server: Server, prompt: Any) -> None:
    answer = client(server).completions.create(model="tiny", prompt=prompt)
    expected = plain(PROMPT, max_new_tokens=16)
    assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


@pytest.mark.parametrize("as_ids", [False, True])
def test_lists_of_prompts(server: Server, as_ids: bool) -> None:
    prompts: Any = [PROMPT, "The lazy dog", "emoji: "]
    sent: Any = [ids_of(one) for one in prompts] if as_ids else prompts
    answer = client(server).completions.create(model="tiny", prompt=sent, max_tokens=8, n=2, temperature=1.0, seed=2)
    expected = [
        plain(prompt, max_new_tokens=8, temperature=1.0, seed=2, sample_index=number).text
        for prompt in prompts
        for number in range(2)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None and answer.usage.prompt_tokens == sum(len(ids_of(one)) for one in prompts)


def test_a_stream(server: Server) -> None:
    expected = plain(PROMPT, max_new_tokens=24)
    chunks = list(client(server).completions.create(model="tiny", prompt=PROMPT, max_tokens=24, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: Server, stream: bool) -> None:
    expected = PROMPT + plain(PROMPT, max_new_tokens=6).text
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "echo": True}
    if stream:
        text = "".join(c.choices[0].text for c in client(server).completions.create(stream=True, **options))
    else:
        text = client(server).completions.create(**options).choices[0].text
    assert text == expected


def test_log_probabilities(server: Server) -> None:
    answer = client(server).completions.create(model="tiny", prompt=PROMPT, max_tokens=6, logprobs=2)
    expected = plain(PROMPT, max_new_tokens=6, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert found.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-6)
    assert found.tokens is not None and found.text_offset is not None
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == 6
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)


def test_filling_in(server: Server) -> None:
    prefix, suffix = "def scale(", "\n    return values"
    tokenizer = live.tokenizer()
    pre, suf, mid = (tokenizer.convert_tokens_to_ids(token) for token in live.FIM[:3])
    ids = [pre, *ids_of(prefix), suf, *ids_of(suffix), mid]
    ends = tuple(tokenizer.convert_tokens_to_ids(token) for token in live.FIM)
    answer = client(server).completions.create(model="tiny", prompt=prefix, suffix=suffix, max_tokens=12)
    assert answer.choices[0].text == plain(ids, max_new_tokens=12, eos_token_ids=ends).text


def test_no_tokens_at_all(server: Server) -> None:
    answer = client(server).completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PROMPT, "length")


@pytest.mark.parametrize(
    "sent",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [5000]},
        {"prompt": [-1]},
        {"prompt": {"text": "x"}},
        {"prompt": ["a", [1]]},
        {"prompt": "a", "suffix": "b", "echo": True},
        {"prompt": [1, 2], "suffix": "b"},
        {"prompt": "a", "best_of": 3},
        {"prompt": ["a"] * 40},
        {"prompt": "a", "logprobs": True},
        {"prompt": "\ud800"},
        {"prompt": "a", "stop": "\ud800"},
    ],
)
def test_mistakes(server: Server, sent: dict[str, Any]) -> None:
    with http(server) as sender:
        # Written with escapes, or half a character would not leave the client.
        response = sender.post(
            "/v1/completions", content=json.dumps(sent), headers={"Content-Type": "application/json"}
        )
    assert response.status_code == 400 and response.json()["error"]["message"], response.text
