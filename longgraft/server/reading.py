"""An answer's text as a chat client reads it: the thought before it, text, and tool calls.

Knows text and the styles of tool calls; no tokens and no chunks. The one idea: **one reader for both ways**. A whole
answer is all pieces of its stream together, so both say the same.
"""

from __future__ import annotations

import uuid
from typing import Any

from longgraft.server.structure import Structure
from longgraft.tool_calls import Piece, ToolCallStream, before_mark, gathered

SPACE = " \t\r\n"


class AnswerReader:
    """Turns the text of one answer into deltas of OpenAI's chats, piece by piece."""

    def __init__(self, structure: Structure) -> None:
        self._thought = Thought(structure.lead) if structure.lead else None
        self._calls = ToolCallStream(structure.style) if structure.style else None
        self._ids: list[str] = []

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._calls.num_calls if self._calls is not None else 0

    def push(self, text: str, is_end: bool = False) -> list[dict[str, Any]]:
        """Take more text, or the last of it; return what it adds to the message."""
        deltas = []
        if self._thought is not None:
            thought, text = self._thought.push(text, is_end)
            deltas += [{"reasoning_content": thought}] if thought else []
        if self._calls is None:
            return [*deltas, {"content": text}] if text else deltas
        pieces = self._calls.push(text) + (self._calls.finish() if is_end else [])
        return deltas + [self._delta(piece) for piece in pieces]

    def whole(self, text: str) -> dict[str, Any]:
        """Return the message of a whole answer."""
        thought, calls = "", list[dict[str, Any]]()
        if self._thought is not None:
            thought, text = self._thought.push(text, True)
        if self._calls is not None:
            text, found = gathered(self._calls.push(text) + self._calls.finish())
            calls = [_call(one.name, one.arguments, self._id(number)) for number, one in enumerate(found)]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        message |= {"reasoning_content": thought} if thought else {}
        return message | ({"tool_calls": calls} if calls else {})

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.index is None:
            return {"content": piece.text}
        if piece.name is None:
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}
        return {"tool_calls": [{"index": piece.index, **_call(piece.name, piece.arguments, self._id(piece.index))}]}

    def _id(self, number: int) -> str:
        while len(self._ids) <= number:
            self._ids.append(f"call_{uuid.uuid4().hex[:24]}")
        return self._ids[number]


def _call(name: str, arguments: str, known_as: str) -> dict[str, Any]:
    return {"id": known_as, "type": "function", "function": {"name": name, "arguments": arguments}}


class Thought:
    """Tells what a model thinks before its answer from the answer itself. `end`: what closes the thought."""

    def __init__(self, end: str) -> None:
        self._end, self._begin = end, end.replace("/", "", 1)
        self._held, self._is_over, self._is_begun, self._is_answering = "", False, False, False

    def push(self, text: str, is_end: bool) -> tuple[str, str]:
        """Take more text; return what is known now of the thought and of the answer, without the marks round them."""
        self._held += text
        if self._is_over:
            return "", self._answer()
        if not self._is_begun:
            held = self._held.lstrip(SPACE)
            if not is_end and self._begin.startswith(held):
                return "", ""
            if not (held := held.removeprefix(self._begin).lstrip(SPACE)):
                return "", ""
            self._held, self._is_begun = held, True
        thought, mark, answer = self._held.partition(self._end)
        if mark:
            self._is_over, self._held = True, answer
            return thought.rstrip(SPACE), self._answer()
        given = thought if is_end else before_mark(thought, self._end)
        self._held = thought[len(given) :]
        return given, ""

    def _answer(self) -> str:
        """Return the answer's text; white space before it is left out."""
        text, self._held = self._held, ""
        if not self._is_answering:
            text = text.lstrip(SPACE)
            self._is_answering = bool(text)
        return text
