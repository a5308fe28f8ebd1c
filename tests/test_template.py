"""Chat templates: what they make is what transformers makes, and what they refuse is one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.template import has_template, template_ids, templated
from tests.saved_model import byte_level

CHAT = [{"role": "user", "content": "the cat"}]


def test_ids_are_transformers_own() -> None:
    tokenizer = byte_level()
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
    ):
        known = tokenizer.apply_chat_template(CHAT, return_dict=True, **options)["input_ids"]
        more: dict[str, Any] = {"add_generation_prompt": False} | options
        assert template_ids(tokenizer, templated(tokenizer, CHAT, **more)) == list(known)


def test_an_answer_begins_unless_said_otherwise() -> None:
    assert templated(byte_level(), CHAT).endswith("assistant: ")
    assert templated(byte_level(template="{{ mood }}"), CHAT, mood="gay") == "gay"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('half \ud800') }}", "half ?"),
        ("{{ messages[3].content.x }}", "does not take these messages"),
        ("{% if %}", "does not take these messages"),
        (None, "no chat template"),
    ],
)
def test_what_is_not_taken_is_said(template: str | None, said: str) -> None:
    tokenizer = byte_level(template=template)
    assert has_template(tokenizer) == (template is not None)
    with pytest.raises(GraftError) as caught:
        templated(tokenizer, CHAT)
    assert said in str(caught.value)
