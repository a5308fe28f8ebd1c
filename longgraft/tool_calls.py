"""Tool calls in a model's text: how a chat template wants them written, a grammar that makes them so, and reading them.

Knows text alone; no server, no model, no tokenizer. Two styles: `hermes` (Qwen, Hermes: a JSON object between
`<tool_call>` and `</tool_call>`, any number of them, with text before) and `llama` (Llama 3: the answer is the object).
The one idea: **nothing is lost**. What cannot be read as a call is text of the answer, unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longgraft.config import GraftError
from longgraft.grammar import TEXT, Grammar, json_rule, marked, quoted, schema_text

STYLES = ("hermes", "llama")
OPEN, CLOSE, PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"
ARGUMENTS = {"hermes": "arguments", "llama": "parameters"}
# Templates that use the same tag around something that is no JSON object (Qwen3-Coder, GLM 4.5).
_OTHERS = ("<function=", "<arg_key>")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


def style_of(chat_template: str | None) -> str | None:
    """Return the style in which a chat template has the model write calls; None for any other, or none at all."""
    template = chat_template or ""
    if any(other in template for other in _OTHERS):
        return None
    if OPEN in template:
        return "hermes"
    return "llama" if re.search(r'\{\\?"name\\?": .{1,40}\\?"parameters\\?":', template) else None


# Grammars -----------------------------------------------------------------------------------------------------------


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], choice: Any, style: str, *, parallel: bool = True, lead: str | None = None
) -> Grammar | None:
    """Return what makes an answer's calls fit `tools` (OpenAI's list), None if `choice` asks for nothing.

    `choice`: OpenAI's `tool_choice`. `required` and a named function: calls and nothing else. `auto`: text, and calls
    where the model begins one (`hermes`; in the other style nobody can say where that is). `parallel`: more than one
    call. `lead`: what ends a thought before the answer. Raises `GraftError` for tools that are none.
    """
    if style not in STYLES:
        raise GraftError(f"tool calls of style {style!r}: expected one of {', '.join(STYLES)}")
    functions = [_function(tool) for tool in tools]
    name = _chosen(choice, [name for name, _ in functions])
    if not functions or name == "none" or (name == "auto" and style == "llama"):
        return None
    if name not in ("auto", "required"):
        functions = [(own, schema) for own, schema in functions if own == name[1:]]
    rules = "".join(f"{_rule(number, style, *one)}\n" for number, one in enumerate(functions))
    calls = "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))
    return Grammar("template", f"{_answer(name, style, parallel)}\n{calls}\n{rules}", whitespace=False, lead=lead)


def _answer(name: str, style: str, parallel: bool) -> str:
    """Return the rule of the whole answer: the calls, with their tags and what may stand between them."""
    if style == "llama":
        return "answer: call"
    tagged = f'tagged: "\\n" call "\\n" {marked(CLOSE)}'
    if name != "auto":
        more = f'("\\n" {marked(OPEN)} tagged)*' if parallel else ""
        return f"answer: {marked(OPEN)} tagged {more}\n{tagged}"
    times = "*" if parallel else "?"
    return f"answer: (begin tagged){times} ANY\nbegin: {marked(OPEN, before='ANY')}\nANY: {TEXT}\n{tagged}"


def _rule(number: int, style: str, name: str, schema: str) -> str:
    begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{ARGUMENTS[style]}": '
    return f'call_{number}: {quoted(begin)} {json_rule(json.loads(schema), False)} "}}"'


def _function(tool: Any) -> tuple[str, str]:
    """Return a tool's name and the schema of its arguments, as JSON text."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise GraftError(f"tools holds {str(tool)[:80]}: expected functions with a name")
    parameters = function.get("parameters")
    try:
        return name, schema_text({"type": "object", "properties": {}} if parameters is None else parameters)
    except GraftError as error:
        raise GraftError(f"tool {name}: {error}") from None


def _chosen(choice: Any, names: Sequence[str]) -> str:
    """Return `none`, `auto` or `required`, or = and the name of a function."""
    if choice in (None, "none", "auto", "required"):
        return choice or ("auto" if names else "none")
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise GraftError(
            f"tool_choice is {str(choice)[:80]}: expected none, auto, required or one of {', '.join(names)}"
        )
    return f"={name}"


# Reading ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What became known of an answer: `text` of it, or (`index` not None) a call's `name` or more of its `arguments`."""

    text: str = ""
    index: int | None = None
    name: str | None = None
    arguments: str = ""


def parse(text: str, style: str) -> tuple[str, list[ToolCall]]:
    """Return what of a whole answer is text, and its calls."""
    stream = ToolCallStream(style)
    content, names, arguments = list[str](), list[str](), list[str]()
    for piece in [*stream.push(text), *stream.finish()]:
        if piece.index is None:
            content.append(piece.text)
        elif piece.name is not None:
            names.append(piece.name)
            arguments.append(piece.arguments)
        else:
            arguments[piece.index] += piece.arguments
    return "".join(content), [ToolCall(*pair) for pair in zip(names, arguments)]


class ToolCallStream:
    """Reads calls from text as it comes; all pieces together say the same however the text was cut.

    A call is told as soon as its name is known, its arguments as they come. White space round calls is left out.
    """

    def __init__(self, style: str) -> None:
        if style not in STYLES:
            raise GraftError(f"tool calls of style {style!r}: expected one of {', '.join(STYLES)}")
        self._is_tagged = style == "hermes"
        self.num_calls = 0
        self._held = ""
        self._state = "text" if self._is_tagged else "start"
        self._brackets = _Brackets()
        self._seen = 0

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what is known now."""
        self._held += text
        return self._read(is_end=False)

    def finish(self) -> list[Piece]:
        """Return the rest, when no more text comes. A call that was cut off keeps what it has."""
        pieces = self._read(is_end=True)
        if self._held and self._state != "tail":
            pieces.append(Piece(self._held))
        self._held = ""
        return pieces

    def _read(self, is_end: bool) -> list[Piece]:
        pieces = list[Piece]()
        states = {
            "text": self._text,
            "start": self._start,
            "head": self._head,
            "arguments": self._more,
            "tail": self._tail,
        }
        while True:
            before = self._state, len(self._held)
            pieces += states[self._state](is_end) if self._state != "rest" else self._rest()
            if before == (self._state, len(self._held)):
                return pieces

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _rest(self) -> list[Piece]:
        return [Piece(self._take(len(self._held)))] if self._held else []

    def _text(self, is_end: bool) -> list[Piece]:
        """Between tags: text, but for white space before a tag, and what may become one."""
        at = self._held.find(OPEN)
        if at >= 0:
            text = self._take(at).rstrip()
            self._begin()
            return [Piece(text)] if text else []
        if is_end and self.num_calls and not self._held.strip():
            self._held = ""
        keep = 0 if is_end else next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
        text = self._held[: len(self._held) - keep]
        text = self._take(len(text if is_end else text.rstrip()))
        if self.num_calls and text and not is_end:
            text = text if text.strip() else ""
        return [Piece(text)] if text else []

    def _start(self, is_end: bool) -> list[Piece]:
        """Where, without tags, a call may begin."""
        mark = self._held.lstrip(" \t\r\n;" if self.num_calls else None)
        if not mark or (PYTHON.startswith(mark) and mark != PYTHON and not is_end):
            self._held = "" if self.num_calls and is_end else self._held
            return []
        if not mark.startswith((PYTHON, "{")):
            self._state = "rest"
            return []
        self._begin()
        return []

    def _begin(self) -> None:
        self._state, self._brackets, self._seen = "head", _Brackets(), 0

    def _head(self, is_end: bool) -> list[Piece]:
        """A call whose name is not known yet. Where the name does not come first, all of the object is waited for."""
        body_at = self._body_at()
        body = self._held[body_at:]
        if found := _HEAD.match(body):
            self._take(body_at + found.end())
            self._state, self._brackets = "arguments", _Brackets()
            return [self._new(json.loads(found[1]), "")]
        size = self._brackets.feed(body[self._seen :])
        end, self._seen = self._seen + (size or 0), len(body)
        if size is not None:
            return self._whole(body_at + end, body[:end])
        close = self._held.find(CLOSE, body_at) if self._is_tagged and not self._brackets.depth else -1
        if close >= 0:
            self._state = "text"
            return [Piece(self._take(close + len(CLOSE)))]
        return []

    def _body_at(self) -> int:
        """Return where the object begins in the held text, behind its tag."""
        for tag in (OPEN,) if self._is_tagged else (PYTHON,):
            at = self._held.find(tag)
            if at >= 0 and not self._held[:at].strip(" \t\r\n;"):
                return at + len(tag)
        return 0 if self._is_tagged else len(self._held) - len(self._held.lstrip(" \t\r\n;"))

    def _whole(self, end: int, text: str) -> list[Piece]:
        """A whole object that does not begin with the name, or is no call at all."""
        try:
            value = json.loads(text)
            name = value["name"]
            own = value["arguments"] if "arguments" in value else value["parameters"]
        except (ValueError, KeyError, TypeError, RecursionError):
            name, own = None, None
        if isinstance(name, str) and isinstance(own, dict | str):
            self._take(end)
            self._state = "tail" if self._is_tagged else "start"
            return [self._new(name, own if isinstance(own, str) else json.dumps(own, ensure_ascii=False))]
        if self._is_tagged:
            close = self._held.find(CLOSE, end)
            if close < 0:
                return []
            end = close + len(CLOSE)
        self._state = "text" if self._is_tagged else "rest"
        return [Piece(self._take(end))]

    def _new(self, name: str, arguments: str) -> Piece:
        self.num_calls += 1
        return Piece("", self.num_calls - 1, name, arguments)

    def _more(self, is_end: bool) -> list[Piece]:
        """The arguments of a call, to their closing bracket."""
        size = self._brackets.feed(self._held)
        text = self._take(len(self._held) if size is None else size)
        if size is not None:
            self._state, self._brackets = "tail", _Brackets(depth=1)
        return [Piece("", self.num_calls - 1, None, text)] if text else []

    def _tail(self, is_end: bool) -> list[Piece]:
        """What closes a call."""
        if not self._is_tagged:
            size = self._brackets.feed(self._held)
            self._take(len(self._held) if size is None else size)
            self._state = "tail" if size is None else "start"
            return []
        ends = [(at, tag) for tag in (CLOSE, OPEN) if (at := self._held.find(tag)) >= 0]
        if ends:
            at, tag = min(ends)
            self._take(at + len(tag) if tag == CLOSE else at)
            self._state = "text"
        return []


@dataclass
class _Brackets:
    """Finds where a JSON object or list ends, piece by piece."""

    depth: int = 0
    is_string: bool = False
    is_escaped: bool = False

    def feed(self, text: str) -> int | None:
        """Take more text; return how much of it belongs to the value, once it ends."""
        for at, letter in enumerate(text):
            if self.is_escaped:
                self.is_escaped = False
            elif self.is_string:
                self.is_escaped = letter == "\\"
                self.is_string = letter != '"'
            elif letter == '"':
                self.is_string = self.depth > 0
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]" and self.depth:
                self.depth -= 1
                if not self.depth:
                    return at + 1
        return None
