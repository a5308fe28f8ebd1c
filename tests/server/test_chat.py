"""Chats through OpenAI's own client: what comes is what plain decoding says, whole or round by round."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from longgraft.server.run import Server
from tests.server import live
from tests.server.live import CHAT, chat_ids, client, http, plain

LONG = "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps."


def test_an_answer_is_plain_decodings(server: Server) -> None:
    answer = client(server).chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=12)
    expected = plain(chat_ids(CHAT), max_new_tokens=12)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint and answer.created > 1_700_000_000
    usage = answer.usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_len, 12)
    assert usage.total_tokens == expected.prompt_len + 12
    assert usage.completion_tokens_details.accepted_prediction_tokens == 0


@pytest.mark.parametrize("temperature", [0.9, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_stream_has_one_chunk_a_round_and_the_same_text(server: Server, temperature: float) -> None:
    options: Any = {"max_tokens": 20, "temperature": temperature, "seed": 7}
    expected = plain(chat_ids(CHAT), max_new_tokens=20, temperature=temperature, seed=7)
    stream = client(server).chat.completions.create(
        model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    first, *rounds, last, closing = chunks
    assert first.choices[0].delta.role == "assistant" and not first.choices[0].delta.content
    assert "".join(c.choices[0].delta.content or "" for c in rounds) == expected.text
    assert all(c.usage is None and c.choices[0].finish_reason is None for c in [first, *rounds])
    ours = last.choices[0].model_extra
    assert last.choices[0].finish_reason == "length" and ours is not None
    # One more than rounds where text was held back until the end.
    assert ours["longgraft"]["rounds"] <= len(rounds) <= ours["longgraft"]["rounds"] + 1
    assert closing.choices == [] and closing.usage is not None and closing.usage.completion_tokens == 20
    assert closing.model_extra is not None and closing.model_extra["metrics"]["time_to_first_token_ms"] > 0
    assert len({c.id for c in chunks}) == 1


def test_n_answers_are_the_samples_of_one_seed(server: Server) -> None:
    options: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 16, "temperature": 1.0, "seed": 11, "n": 3}
    answer = client(server).chat.completions.create(**options)
    expected = [
        plain(chat_ids(CHAT), max_new_tokens=16, temperature=1.0, seed=11, sample_index=number).text
        for number in range(3)
    ]
    assert [choice.message.content for choice in answer.choices] == expected and len(set(expected)) > 1
    assert answer.usage is not None and answer.usage.completion_tokens == 48
    assert answer.usage.prompt_tokens == len(chat_ids(CHAT))
    texts = ["", "", ""]
    for chunk in client(server).chat.completions.create(stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_a_drawn_seed_is_told_and_gives_the_same_again(server: Server) -> None:
    options: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 16, "temperature": 1.0}
    first = client(server).chat.completions.create(**options)
    assert first.choices[0].model_extra is not None
    again = client(server).chat.completions.create(seed=first.choices[0].model_extra["longgraft"]["seed"], **options)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert 0 <= first.choices[0].model_extra["longgraft"]["seed"] < 2**53


def test_a_negative_seed_is_a_seed(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=12, temperature=1.0, seed=-1
    )
    expected = plain(chat_ids(CHAT), max_new_tokens=12, temperature=1.0, seed=2**64 - 1)
    assert answer.choices[0].message.content == expected.text


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stop_strings_end_before_themselves_also_across_rounds(server: Server, stream: bool) -> None:
    whole = plain(chat_ids(CHAT), max_new_tokens=30)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 6]
    expected = plain(chat_ids(CHAT), max_new_tokens=30, stop=(stop,))
    options: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 30, "stop": ["never said", stop]}
    if stream:
        chunks = list(client(server).chat.completions.create(stream=True, **options))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client(server).chat.completions.create(**options).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    assert (text, reason) == (expected.text, "stop") and stop not in text and whole.text.startswith(text)


def test_tokens_that_stop(server: Server) -> None:
    whole = plain(chat_ids(CHAT), max_new_tokens=30)
    end = whole.token_ids[10]
    expected = plain(chat_ids(CHAT), max_new_tokens=30, eos_token_ids=(end,))
    answer = client(server).chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=30, extra_body={"stop_token_ids": [end]}
    )
    assert answer.choices[0].message.content == expected.text and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("sent", "params"),
    [
        ({"presence_penalty": 1.5, "frequency_penalty": -0.5}, {"presence_penalty": 1.5, "frequency_penalty": -0.5}),
        ({"logit_bias": {"70": 100, "80": -100.0}}, {"logit_bias": {70: 100.0, 80: -100.0}}),
        pytest.param({"top_p": 0.7, "temperature": 1.2, "seed": 3}, {"top_p": 0.7, "temperature": 1.2, "seed": 3},
                     marks=pytest.mark.slow),
        ({"extra_body": {"top_k": 5, "min_p": 0.01}, "temperature": 1.0, "seed": 4},
         {"top_k": 5, "min_p": 0.01, "temperature": 1.0, "seed": 4}),
        ({"extra_body": {"repetition_penalty": 1.3, "top_k": -1}}, {"repetition_penalty": 1.3, "top_k": 0}),
    ],
)  # fmt: skip
def test_sampling_fields(server: Server, sent: dict[str, Any], params: dict[str, Any]) -> None:
    answer = client(server).chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, **sent)
    assert answer.choices[0].message.content == plain(chat_ids(CHAT), max_new_tokens=12, **params).text


def test_log_probabilities(server: Server) -> None:
    options: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    expected = plain(chat_ids(CHAT), max_new_tokens=20, logprobs=3)
    whole = client(server).chat.completions.create(**options).choices[0].logprobs
    assert whole is not None and whole.content is not None and len(whole.content) == 20
    for one, known in zip(whole.content, expected.logprobs):
        assert one.logprob == pytest.approx(known.logprob, abs=1e-6)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([value for _, value in known.top], abs=1e-6)
    assert bytes(byte for one in whole.content for byte in one.bytes or []).decode(errors="replace") == expected.text
    streamed = []
    for chunk in client(server).chat.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [one.model_dump() for one in streamed] == [one.model_dump() for one in whole.content]


def test_a_prediction_is_counted_and_changes_nothing(server: Server) -> None:
    # A model that may say one word says it again and again.
    word = live.tokenizer()(" the")["input_ids"]
    assert len(word) == 1
    expected = plain(chat_ids(CHAT), max_new_tokens=20, logit_bias={word[0]: 100.0})
    answer = client(server).chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_tokens=20,
        logit_bias={str(word[0]): 100},
        prediction={"type": "content", "content": [{"type": "text", "text": " the" * 15 + "emoji"}]},
    )
    assert answer.choices[0].message.content == expected.text == " the" * 20
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 15
    assert details.rejected_prediction_tokens == len(live.tokenizer()("emoji")["input_ids"])


def test_extra_fields(server: Server) -> None:
    expected = plain(chat_ids(CHAT), max_new_tokens=20)
    extras = {"documents": {"answer.md": expected.text}, "spans": True, "metrics": "detailed"}
    answer = client(server).chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=20, extra_body={"longgraft": extras}
    )
    choice, root = answer.choices[0], answer.model_extra
    assert choice.message.content == expected.text and choice.model_extra is not None and root is not None
    ours, drafting = choice.model_extra["longgraft"], root["metrics"]["speculative_decoding"]
    assert ours["sources"]["document"] > 0 and "answer.md" in {span["file"] for span in ours["spans"]}
    assert sum(ours["sources"].values()) == 20
    assert sum(drafting["acceptance_histogram"].values()) == drafting["num_spec_steps"]
    assert sum(drafting["per_step_accepted"]) == drafting["num_accepted_draft_tokens"]
    assert sum(drafting["per_step_drafted"]) == drafting["num_draft_tokens"]
    mean = 1 + drafting["num_accepted_draft_tokens"] / drafting["num_spec_steps"]
    assert drafting["mean_acceptance_length"] == pytest.approx(mean)


def test_policies_and_silence(server: Server) -> None:
    extras = {"policy": "plain", "metrics": "none"}
    answer = client(server).chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=12, extra_body={"longgraft": extras}
    )
    assert answer.choices[0].message.content == plain(chat_ids(CHAT), max_new_tokens=12).text
    assert "longgraft" not in (answer.choices[0].model_extra or {}) and "metrics" not in (answer.model_extra or {})


def test_a_second_question_finds_the_first_ones_rows(server: Server) -> None:
    messages = [{"role": "user", "content": LONG * 16}]
    cached = []
    for _ in range(2):
        answer = client(server).chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[0] < 100 and cached[1] > 500


def test_parts_roles_and_template_variables(server: Server) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "The quick"}, {"type": "text", "text": "brown fox"}]},
    ]
    known = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick\nbrown fox"}]
    answer = client(server).chat.completions.create(
        model="gpt-tiny", messages=messages, max_tokens=12, extra_body={"chat_template_kwargs": {"mood": "gay"}}
    )
    assert answer.choices[0].message.content == plain(chat_ids(known, mood="gay"), max_new_tokens=12).text
    assert answer.model == "gpt-tiny"


def test_an_answer_that_goes_on_where_a_message_ends(server: Server) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "jumps over"}]
    options = {"continue_final_message": True, "return_dict": True}
    ids = live.tokenizer().apply_chat_template(messages, **options)["input_ids"]
    answer = client(server).chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, extra_body={"continue_final_message": True}
    )
    assert answer.choices[0].message.content == plain(ids, max_new_tokens=8).text


def test_every_event_is_one_json_document(server: Server) -> None:
    with http(server) as sender:
        response = sender.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 30, "stream": True})
    *data, last = live.events(response)
    assert last == "[DONE]" and response.headers["content-type"].startswith("text/event-stream")
    assert all(json.loads(one)["object"] == "chat.completion.chunk" for one in data)


async def _many(server: Server, number: int) -> list[str]:
    import asyncio

    sender = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    asker = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=sender)

    async def ask(seed: int) -> str:
        answer = await asker.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=8, temperature=1.0, seed=seed
        )
        return answer.choices[0].message.content or ""

    async with asker:
        return list(await asyncio.gather(*(ask(seed) for seed in range(number))))


def test_many_at_once_are_as_alone(server: Server) -> None:
    import asyncio

    found = asyncio.run(_many(server, 6))
    assert found == [plain(chat_ids(CHAT), max_new_tokens=8, temperature=1.0, seed=seed).text for seed in range(6)]
