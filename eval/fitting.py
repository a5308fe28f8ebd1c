"""Prompts of a length: messages become token ids, and as much background as still fits is put in front of a question.

Knows tokenizers; no task, no model and no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longgraft.config import GraftError

Messages = list[dict[str, str]]
# A built prompt must reach this share of the length asked for, or there was not enough text.
FILLED = 0.8
# More characters a token than any tokenizer makes of these texts: what lies beyond is not tokenised at all.
CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's `token_ids`, and where its text came from: `python`, a trace's id, an item of a suite.

    `answers`: texts that a right answer holds, where they are known.
    """

    task: str
    context: int
    token_ids: tuple[int, ...]
    source: str
    answers: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Return 12 hex digits that differ between prompts."""
        return hashlib.sha256(repr(self.token_ids).encode()).hexdigest()[:12]


def asked(text: str) -> Messages:
    """Return one message of a user."""
    return [{"role": "user", "content": text}]


def encode(messages: Messages, tokenizer: Any) -> tuple[int, ...]:
    """Return token ids of messages: through the chat template where there is one that takes them, else as one text."""
    if getattr(tokenizer, "chat_template", None):
        for attempt in (messages, asked(flat(messages))):
            try:
                found = tokenizer.apply_chat_template(
                    attempt, add_generation_prompt=True, tokenize=True, return_dict=True
                )
            except Exception as error:  # a template raises what it likes; the last attempt's reason is told
                reason = error
                continue
            return tuple(found["input_ids"])
        raise GraftError(f"the chat template does not take a user's message: {reason}") from reason
    return tuple(tokenizer(flat(messages) + "\n\nAnswer:\n", verbose=False)["input_ids"])


def flat(messages: Messages) -> str:
    """Return messages as one text; one message is its own."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in messages)


def most(high: int, context: int, tokens_of: Callable[[int], tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """Return the largest count up to `high` whose tokens are at most `context`, and these; (-1, ()) if not even 0."""
    low = -1
    best: tuple[int, ...] = ()
    while low < high:
        middle = (low + high + 1) // 2
        ids = tokens_of(middle)
        if len(ids) <= context:
            low, best = middle, ids
        else:
            high = middle - 1
    return low, best


def filled(
    task: str, context: int, lines: Sequence[str], tokens_of: Callable[[Sequence[str]], tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the tokens of the most lines that still fit; raises `GraftError` if the question alone does not.

    So does a text that is too short for the length.
    """
    bare = tokens_of(lines[:0])
    if len(bare) > context:
        raise GraftError(f"task {task}: its question alone is {len(bare)} tokens; expected a context of at least that")
    count, best = most(_within(lines, context * CHARACTERS_PER_TOKEN), context, lambda n: tokens_of(lines[:n]))
    best = best or bare
    if len(best) < FILLED * context and count == len(lines):
        raise GraftError(f"task {task}: there is text for {len(best)} tokens; expected a context of at most that")
    return best


def _within(lines: Sequence[str], characters: int) -> int:
    """Return how many lines lie within so many characters."""
    total = 0
    for number, line in enumerate(lines):
        total += len(line) + 1
        if total > characters:
            return number
    return len(lines)
