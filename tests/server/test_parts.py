"""The parts a server is made of, each by itself: keys, settings, door, errors, messages, templates, marks, shapes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longgraft.config import GraftError, TokenLogprob
from longgraft.request import StageError
from longgraft.server.bodies import ChatRequest, File, Message
from longgraft.server.errors import ApiError, api_error, of_validation
from longgraft.server.filling import filling
from longgraft.server.keys import Keys, read_keys
from longgraft.server.messages import plain_message, render, template_options
from longgraft.server.scores import TokenTexts, chat_logprobs, completion_logprobs, echo_logprobs, joined
from longgraft.server.settings import ServerSettings
from longgraft.service import Busy, Closed
from tests.server import live
from tests.small_tokenizers import cleaning, sentencepiece

# Keys and settings --------------------------------------------------------------------------------------------------


def test_keys_stand_for_tenants() -> None:
    keys = Keys([("ann", "one"), ("ann", "two"), ("bob", "three")])
    assert [keys.tenant_of(key) for key in (b"one", b"two", b"three")] == ["ann", "ann", "bob"]
    assert keys.tenant_of(b"") is None and keys.tenant_of(b"on") is None and keys.tenant_of(b"ONE") is None
    assert keys and not Keys() and Keys().tenant_of(b"one") is None
    assert "one" not in repr(vars(keys)) and b"one" not in repr(vars(keys)).encode()


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("longgraft.server.keys.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys = Keys([("ann", "one"), ("bob", "two"), ("eve", "three")])
    for key in (b"one", b"nobody's"):
        compared.clear()
        keys.tenant_of(key)
        assert len(compared) == 3 and {len(one) for pair in compared for one in pair} == {32}


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who  key\nann abc\n\nbob\tdef # note\n")
    keys = read_keys(["xyz"], str(file))
    assert [keys.tenant_of(key) for key in (b"abc", b"def", b"xyz")] == ["ann", "bob", "default"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann\n", "line 1"),
        ("ann a b\n", "line 1"),
        ("../x key\n", "tenant"),
        ("ann same\nbob same\n", "another tenant's"),
        ("# nothing\n", "no keys"),
        (b"\xff\xff", "UTF-8"),
    ],
)
def test_wrong_key_files(tmp_path: Path, text: str | bytes, said: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(GraftError, match=said):
        read_keys(file=str(file))
    with pytest.raises(GraftError, match="cannot be read"):
        read_keys(file=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"names": ()},
        {"names": ("",)},
        {"max_requests": 0},
        {"max_body_bytes": 0},
        {"new_tokens": 0},
        {"max_corpora": -1},
        {"ping_seconds": 0},
        {"drain_seconds": float("nan")},
        {"request_seconds": 0},
    ],
)
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(GraftError):
        ServerSettings(**{"names": ("tiny",), **wrong})


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError(404, "lost"), 404),
        (Busy("full"), 429),
        (Closed("closed"), 503),
        (StageError("broken"), 500),
        (GraftError("wrong"), 400),
        (ZeroDivisionError("inner matters"), 500),
    ],
)
def test_every_error_has_a_status_and_openais_shape(error: Exception, status: int) -> None:
    found = api_error(error)
    assert found.status == found.response().status_code == status
    assert set(found.values()["error"]) == {"message", "type", "param", "code"}
    assert "inner matters" not in found.message


def test_half_a_character_in_a_message_is_no_second_error() -> None:
    assert "?" in ApiError(400, "you said \ud800").values()["error"]["message"]
    assert ApiError(400, "you said \ud800").response().status_code == 400


def test_forms_a_field_may_have_are_one_mistake() -> None:
    both = [{"loc": ("body", "prompt", "str"), "msg": "a text"}, {"loc": ("body", "prompt", "list"), "msg": "a list"}]
    assert of_validation(both).message == "prompt: a text or a list" and of_validation(both).param == "prompt"
    more = [*both, {"loc": ("body", "n"), "msg": "a number"}]
    assert "1 more" in of_validation(more).message


# Chats --------------------------------------------------------------------------------------------------------------


def chat(**more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": live.CHAT, **more})


def test_messages_as_templates_expect_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = Message.model_validate({"role": "user", "content": parts, "name": "me", "weight": None})
    assert plain_message(message) == {"role": "user", "content": "a\nb", "name": "me"}
    assert plain_message(Message(role="developer"))["content"] == ""


def test_templates_options() -> None:
    tokenizer = live.tokenizer()
    assert template_options(chat(), tokenizer) == {"continue_final_message": False, "add_generation_prompt": True}
    assert template_options(chat(chat_template_kwargs={"mood": "gay"}), tokenizer)["mood"] == "gay"
    for wrong in ({"chat_template_kwargs": {"tokenize": False}}, {"chat_template_kwargs": {"conversation": []}},
                  {"continue_final_message": True, "add_generation_prompt": True}):  # fmt: skip
        with pytest.raises(ApiError):
            template_options(chat(**wrong), tokenizer)


def test_no_template_is_said() -> None:
    with pytest.raises(ApiError, match="no chat template"):
        render(sentencepiece(), [Message(role="user", content="x")])


# Filling in ---------------------------------------------------------------------------------------------------------


def test_models_that_cannot_fill_in_say_so() -> None:
    for tokenizer in (cleaning(), sentencepiece()):
        with pytest.raises(ApiError, match="no tokens for filling in"):
            filling(SimpleNamespace(tokenizer=tokenizer), "a", "b")  # type: ignore[arg-type]


def test_names_of_tokens_in_what_is_filled_in_are_text() -> None:
    tokenizer = live.tokenizer()
    engine: Any = SimpleNamespace(tokenizer=tokenizer, encode=list)
    file = File(text="<|fim_prefix|>", filename="<|file_sep|>")
    ids, ends = filling(engine, "<|fim_suffix|>", "<|end|>", [file])
    counts = [ids.count(tokenizer.convert_tokens_to_ids(name)) for name in live.FIM]
    assert counts == [1, 1, 1, 1, 2] and 1 not in ids
    assert set(ends) == {tokenizer.convert_tokens_to_ids(name) for name in live.FIM}


# Log-probabilities and forms ----------------------------------------------------------------------------------------


def test_parts_of_characters_are_bytes() -> None:
    texts = TokenTexts(live.tokenizer())
    ids = live.tokenizer()("🦖")["input_ids"]
    assert bytes(byte for token in ids for byte in texts.bytes(token)).decode() == "🦖"
    assert texts.text(ids[0]).startswith("bytes:\\x")
    fallback = TokenTexts(sentencepiece())
    ids = sentencepiece()("🦖", add_special_tokens=False)["input_ids"][1:]
    assert bytes(byte for token in ids for byte in fallback.bytes(token)).decode() == "🦖"


def test_shapes_of_log_probabilities() -> None:
    texts = TokenTexts(live.tokenizer())
    first, second = live.tokenizer()(" the")["input_ids"][0], live.tokenizer()("a")["input_ids"][0]
    known = [TokenLogprob(first, -0.5, ((first, -0.5), (second, float("-inf")))), TokenLogprob(second, -1.0)]
    chats = chat_logprobs(texts, known)["content"]
    assert [one["token"] for one in chats] == [" the", "a"] and chats[0]["bytes"] == list(b" the")
    assert chats[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert completion_logprobs(texts, known, 7) == {
        "tokens": [" the", "a"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{" the": -0.5, "a": -9999.0}, {}],
        "text_offset": [7, 11],
    }
    assert completion_logprobs(texts, [], 0)["text_offset"] == []


def test_log_probabilities_of_an_echo() -> None:
    texts = TokenTexts(live.tokenizer())
    ids = live.tokenizer()("<|start|> thea")["input_ids"]
    rest = [TokenLogprob(ids[1], -0.5, ((ids[1], -0.5), (ids[1], -3.0))), TokenLogprob(ids[2], -1.0)]
    found = echo_logprobs(texts, ids, [None, *rest], len(" thea"))
    assert found == {
        "tokens": ["<|start|>", " the", "a"],
        "token_logprobs": [None, -0.5, -1.0],
        "top_logprobs": [None, {" the": -0.5}, {}],  # of two with one text the likelier
        "text_offset": [0, 5, 5],
    }
    both = joined(found, completion_logprobs(texts, rest[1:], 5))
    assert both["tokens"] == [*found["tokens"], "a"] and both["text_offset"][-1] == 5
