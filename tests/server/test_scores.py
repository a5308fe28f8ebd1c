"""Prompts that are scored, as evaluation suites ask: token ids in, the model's log-probabilities out, every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longgraft.server.run import Server
from tests.engines import model_of
from tests.server import live
from tests.server.live import PROMPT, client, http, plain

IDS = [live.tokenizer()(text)["input_ids"] for text in (PROMPT * 4, "The quick brown fox", PROMPT)]


def expected(ids: list[int]) -> Any:
    """The log-probabilities that transformers itself has for a text. [len, V]"""
    with torch.no_grad():
        logits = model_of()(input_ids=torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("stream", [False, True])
def test_twice_the_same_and_as_transformers_says(server: Server, stream: bool) -> None:
    """As lm-evaluation-harness asks; the second time the prefix is in the cache."""
    options: Any = {"model": "tiny", "prompt": IDS, "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1234}
    found = []
    for _ in range(2):
        scores: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        tops: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        chunks = client(server).completions.create(temperature=0, stream=stream, **options)
        for chunk in chunks if stream else [chunks]:
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    scores[choice.index] += choice.logprobs.token_logprobs
                    tops[choice.index] += choice.logprobs.top_logprobs
        found.append((scores, tops))
    assert found[0] == found[1]
    for number, ids in enumerate(IDS):
        known = expected(ids)
        assert len(scores[number]) == len(tops[number]) == len(ids) + 1
        assert scores[number][0] is None and tops[number][0] is None
        own = known[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
        assert scores[number][1:-1] == pytest.approx(own, abs=1e-9)
        best = known.max(-1).values.tolist()
        assert [max(top.values()) for top in tops[number][1:]] == pytest.approx(best, abs=1e-9)
        # What the harness calls greedy.
        is_greedy = [value == max(top.values()) for value, top in zip(scores[number][1:-1], tops[number][1:-1])]
        assert is_greedy == (known[:-1].argmax(-1) == torch.tensor(ids[1:])).tolist()


def test_a_prompt_alone_is_scored(server: Server) -> None:
    answer = client(server).completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=3)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (PROMPT, "length") and choice.logprobs is not None
    ids = IDS[2]
    assert choice.logprobs.tokens is not None and "".join(choice.logprobs.tokens) == PROMPT
    assert choice.logprobs.text_offset == [len("".join(choice.logprobs.tokens[:at])) for at in range(len(ids))]
    assert choice.logprobs.token_logprobs is not None and len(choice.logprobs.token_logprobs) == len(ids)
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_the_answer_goes_on_behind_the_prompt(server: Server) -> None:
    answer = client(server).completions.create(model="tiny", prompt=PROMPT, max_tokens=5, echo=True, logprobs=2)
    after = plain(PROMPT, max_new_tokens=5, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT + after.text and logprobs is not None
    assert logprobs.token_logprobs is not None and logprobs.text_offset is not None
    assert logprobs.token_logprobs[-5:] == pytest.approx([one.logprob for one in after.logprobs], abs=1e-9)
    assert logprobs.text_offset[-5] == len(PROMPT)


def test_a_prompt_as_long_as_the_context_can_be_scored_but_not_continued(server: Server) -> None:
    ids = (IDS[0] * 40)[:2048]
    with http(server) as sender:
        asked = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
        whole = sender.post("/v1/completions", json=asked)
        more = sender.post("/v1/completions", json=asked | {"max_tokens": 1})
        longer = sender.post("/v1/completions", json=asked | {"prompt": [*ids, 3]})
    assert len(whole.json()["choices"][0]["logprobs"]["token_logprobs"]) == 2048
    for refused in (more, longer):
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
