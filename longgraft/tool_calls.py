"""Reads tool calls from a model's text, as it comes.

Knows text alone; no server, no model, no tokenizer. Two styles: `hermes` (Qwen, Hermes: a JSON object between
`<tool_call>` and `</tool_call>`, any number of them, among text) and `llama` (Llama 3: the answer is the object).
The one idea: **nothing is lost**. What cannot be read as a call is text of the answer, unchanged.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from longgraft.config import GraftError

STYLES = ("hermes", "llama")
OPEN, CLOSE, PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"
# Templates that use the same tag around something that is no JSON object (Qwen3-Coder, GLM 4.5).
_OTHERS = ("<function=", "<arg_key>")
_LLAMA = re.compile(r'\{\\?"name\\?": .{1,40}\\?"parameters\\?":')
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_SPACE = " \t\r\n"


def style_of(chat_template: str | None) -> str | None:
    """Return the style in which a chat template has the model write calls; None for any other, or none at all."""
    template = chat_template or ""
    if any(other in template for other in _OTHERS):
        return None
    if OPEN in template:
        return "hermes"
    return "llama" if _LLAMA.search(template) else None


def check_style(style: str) -> None:
    """Raise `GraftError` for anything but the name of a style."""
    if style not in STYLES:
        raise GraftError(f"tool calls of style {style!r}: expected one of {', '.join(STYLES)}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What became known of an answer: `text` of it, or, of call `index`, its `name` or more of its `arguments`."""

    text: str = ""
    index: int | None = None
    name: str | None = None
    arguments: str = ""


def parse(text: str, style: str) -> tuple[str, list[ToolCall]]:
    """Return what of a whole answer is text, and its calls."""
    stream = ToolCallStream(style)
    return gathered([*stream.push(text), *stream.finish()])


def gathered(pieces: list[Piece]) -> tuple[str, list[ToolCall]]:
    """Return what all pieces of an answer are together."""
    names, arguments = list[str](), list[str]()
    for piece in pieces:
        if piece.name is not None:
            names.append(piece.name)
            arguments.append("")
        if piece.index is not None:
            arguments[piece.index] += piece.arguments
    return "".join(piece.text for piece in pieces), [ToolCall(*pair) for pair in zip(names, arguments)]


def before_mark(text: str, mark: str) -> str:
    """Return what of a text comes before an end of it that may become a mark, and before white space there."""
    keep = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - keep].rstrip(_SPACE)


class ToolCallStream:
    """Reads an answer piece by piece; all pieces together say the same however the text was cut.

    A call is told as soon as its name is known, then its arguments as they come. White space round calls is left out.
    """

    def __init__(self, style: str) -> None:
        check_style(style)
        self._is_tagged = style == "hermes"
        self.num_calls = 0
        self._held = ""
        self._tag = ""  # what stood before a call whose name is not known yet
        self._state = self._text if self._is_tagged else self._start
        self._is_fresh = False  # only white space came since the last call
        self._brackets, self._seen = _Brackets(), 0

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what is known now."""
        self._held += text
        return self._read(is_end=False)

    def finish(self) -> list[Piece]:
        """Return the rest, when no more text comes. A call that was cut off keeps the arguments it has."""
        pieces = self._read(is_end=True)
        is_unread = self._state == self._head or (self._state == self._start and not self.num_calls)
        rest, self._held = (self._tag + self._held if is_unread else ""), ""
        return [*pieces, Piece(rest)] if rest else pieces

    def _read(self, is_end: bool) -> list[Piece]:
        pieces = list[Piece]()
        while True:
            state, size = self._state, len(self._held)
            pieces += state(is_end)
            if (state, size) == (self._state, len(self._held)):
                return pieces

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _text(self, is_end: bool) -> list[Piece]:
        """Between tags: text; what may become a tag, and white space before it, waits."""
        at = self._held.find(OPEN)
        if self._is_fresh:
            self._held = self._held.lstrip(_SPACE)
            at = self._held.find(OPEN)
        if at >= 0:
            text = self._held[:at].rstrip(_SPACE)
            self._take(len(text))
            self._begin(self._take(at - len(text) + len(OPEN)))
        elif is_end:
            text = self._take(len(self._held))
        else:
            text = self._take(len(before_mark(self._held, OPEN)))
        self._is_fresh = self._is_fresh and not text
        return [Piece(text)] if text else []

    def _start(self, is_end: bool) -> list[Piece]:
        """Where, without tags, a call may begin."""
        body = self._held.lstrip(_SPACE + ";" if self.num_calls else _SPACE)
        if not body or (PYTHON.startswith(body) and body != PYTHON and not is_end):
            return []
        is_marked = body.startswith(PYTHON)
        if is_marked or body.startswith("{"):
            before = len(self._held) - len(body) + is_marked * len(PYTHON)
            self._begin(self._take(before))
        else:
            self._held = body if self.num_calls else self._held
            self._state = self._rest
        return []

    def _rest(self, is_end: bool) -> list[Piece]:
        """No call comes any more."""
        return [Piece(self._take(len(self._held)))] if self._held else []

    def _begin(self, tag: str) -> None:
        self._state, self._tag, self._brackets, self._seen = self._head, tag, _Brackets(), 0

    def _head(self, is_end: bool) -> list[Piece]:
        """A call whose name is not known yet. Where it does not come first, all of the object is waited for."""
        if found := _HEAD.match(self._held):
            self._take(found.end())
            self._state, self._brackets = self._arguments, _Brackets()
            return [self._new(json.loads(found[1]))]
        if not (body := self._held.lstrip(_SPACE)):
            return []
        if not body.startswith("{"):
            return self._no_call(0)
        size = self._brackets.feed(self._held[self._seen :])
        end, self._seen = self._seen + (size or 0), len(self._held)
        return [] if size is None else self._whole(end)

    def _whole(self, end: int) -> list[Piece]:
        """An object that does not begin with the name, or is no call at all."""
        try:
            value = json.loads(self._held[:end])
            name, own = value["name"], value["arguments"] if "arguments" in value else value["parameters"]
        except (ValueError, KeyError, RecursionError):
            return self._no_call(end)
        if not isinstance(name, str) or not isinstance(own, dict | str):
            return self._no_call(end)
        self._take(end)
        self._state = self._tail
        return [self._new(name, own if isinstance(own, str) else json.dumps(own, ensure_ascii=False))]

    def _no_call(self, end: int) -> list[Piece]:
        """Give the text back: up to the closing tag, or, without tags, all of it."""
        if self._is_tagged:
            close = self._held.find(CLOSE, end)
            if close < 0:
                self._seen = end
                return []
            self._state = self._text
            return [Piece(self._tag + self._take(close + len(CLOSE)))]
        self._state = self._rest
        return [Piece(self._tag)] if self._tag else []

    def _new(self, name: str, arguments: str = "") -> Piece:
        self.num_calls += 1
        self._is_fresh = True
        return Piece("", self.num_calls - 1, name, arguments)

    def _arguments(self, is_end: bool) -> list[Piece]:
        """The arguments of a call, to their closing bracket."""
        size = self._brackets.feed(self._held)
        text = self._take(len(self._held) if size is None else size)
        if size is not None:
            self._state, self._brackets = self._close, _Brackets(depth=1)
        return [Piece("", self.num_calls - 1, None, text)] if text else []

    def _close(self, is_end: bool) -> list[Piece]:
        """What is left of a call's object behind its arguments."""
        size = self._brackets.feed(self._held)
        self._take(len(self._held) if size is None else size)
        self._state = self._close if size is None else self._tail
        return []

    def _tail(self, is_end: bool) -> list[Piece]:
        """What closes a call: its tag, unless the next one begins before it."""
        if not self._is_tagged:
            self._state = self._start
        elif ends := [(at, tag) for tag in (CLOSE, OPEN) if (at := self._held.find(tag)) >= 0]:
            at, tag = min(ends)
            self._take(at + len(tag) if tag == CLOSE else at)
            self._state = self._text
        return []


@dataclass
class _Brackets:
    """Finds where a JSON object ends, piece by piece."""

    depth: int = 0
    is_string: bool = False
    is_escaped: bool = False

    def feed(self, text: str) -> int | None:
        """Take more text; return how much of it belongs to the object, once it ends."""
        for at, letter in enumerate(text):
            if self.is_escaped:
                self.is_escaped = False
            elif self.is_string:
                self.is_escaped = letter == "\\"
                self.is_string = letter != '"'
            elif letter == '"':
                self.is_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if not self.depth:
                    return at + 1
        return None
