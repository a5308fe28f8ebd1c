"""Prompts whose parts are token ids: what the chat template says round a message, and texts taken as they are.

Knows tokenizers, no engine. The one idea: **the parts are encoded apart**. So a prompt's first part has the same tokens
whatever follows, which is what reused prefixes need; and a document that holds the name of a special token
("<|im_end|>") is read as those characters and ends no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longgraft.config import GraftError
from longgraft.template import has_template, template_ids, templated

# Stands in the template where the message's text comes. No blanks: templates strip them.
MARK = "MESSAGE-TEXT-GOES-HERE"
# What follows a message where there is no template.
ANSWER = "\n\nAnswer:\n"


@dataclass(frozen=True, slots=True)
class Frame:
    """Token ids before and after the one message of a chat, up to where the answer begins."""

    head: tuple[int, ...]
    tail: tuple[int, ...]


def frame_of(tokenizer: Any) -> Frame:
    """Return the frame of a user's message by the tokenizer's chat template; without one, a plain question's."""
    if not has_template(tokenizer):
        return Frame(beginning(tokenizer), tuple(text_ids(tokenizer, ANSWER)))
    text = templated(tokenizer, [{"role": "user", "content": MARK}])
    if text.count(MARK) != 1:
        raise GraftError(f"the chat template writes a message {text.count(MARK)} times: expected once")
    head, tail = text.split(MARK)
    return Frame(*(tuple(template_ids(tokenizer, part)) for part in (head, tail)))


def beginning(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that every text begins with: a BOS, or none."""
    return tuple(tokenizer("")["input_ids"])


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return a text's token ids; names of special tokens in it are characters like others."""
    if not text:
        return []
    text = text.encode("utf-8", "replace").decode()  # half characters, as an odd shell may give them
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
