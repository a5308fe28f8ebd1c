"""Parts of prompts: the template's own words are tokens, names of tokens in texts are not."""

from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.tools.frame import ANSWER, beginning, frame_of, text_ids
from tests import small_tokenizers
from tests.saved_model import byte_level


def test_a_frame_is_what_the_template_writes() -> None:
    tokenizer = byte_level()
    frame = frame_of(tokenizer)
    messages = [{"role": "user", "content": "x"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert [*frame.head, *text_ids(tokenizer, "x"), *frame.tail] == whole
    assert frame.head[0] == tokenizer.bos_token_id


def test_without_a_template_a_question_is_put_plainly() -> None:
    tokenizer = byte_level(template=None)
    frame = frame_of(tokenizer)
    assert (frame.head, tokenizer.decode(frame.tail)) == ((), ANSWER)


def test_a_text_begins_as_the_tokenizer_says() -> None:
    class Beginning:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [2]}

    assert beginning(Beginning()) == (2,)


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.sentencepiece])
def test_names_of_special_tokens_are_text(make: Any) -> None:
    tokenizer = make()
    text = "a <|end|> b<|start|>"
    ids = text_ids(tokenizer, text)
    assert not set(ids) & {0, 1}
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text
    assert tokenizer("<|end|>", add_special_tokens=False)["input_ids"] == [1]
    assert text_ids(tokenizer, "") == []


def test_templates_that_take_no_message_are_named() -> None:
    with pytest.raises(GraftError, match="does not take these messages: unknown role"):
        frame_of(byte_level(template="{{ raise_exception('unknown role') }}"))
    with pytest.raises(GraftError, match="writes a message 2 times: expected once"):
        frame_of(byte_level(template="{{ messages[0].content }} {{ messages[0].content }}"))
