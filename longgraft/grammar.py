"""What an answer must look like: a declaration, made once and given to any number of requests.

Knows no tokenizer and no matcher (`longgraft.matcher` compiles it), so that a bad one is one sentence where it is
written. The one idea: everything becomes one Lark text, because Lark can hold a JSON schema, a regular expression and
the free text that may come before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longgraft.config import GraftError

KINDS = ("json_schema", "regex", "lark", "gbnf", "template")
# White space where JSON allows it: enough for deep indentation, but no model can loop in it.
WHITESPACE = {"whitespace_pattern": r"[ \t\r\n]{1,64}"}
# Without: what `json.dumps` writes, and most models.
DENSE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Any text that is no special token, and what may stand between a lead and what it leads to.
TEXT, GAP = r"/(.|\n)*/", r"/[ \t\r\n]{0,8}/"
# The id of the token that a text is by itself, and that no other tokens spell; None where there is no such token.
Special = Callable[[str], int | None]
# Brackets round fixed words in a template, and round those that end any text: letters that no text has a use for.
_MARKS, _UNTIL = "\ue000\ue001", "\ue002\ue003"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an answer; make one with `json_schema`, `json_object`, `regex`, `lark` or `gbnf`.

    `source`: the schema as JSON, the expression, the text in Lark or GBNF, or a template: Lark rules for `answer` in
    which fixed words are `marked` (or `until` them any text comes), as only the tokenizer says how they are written.
    `whitespace`: whether JSON may have white space between its tokens; without it fewer tokens are free, so more of
    them are drafted without a model. `lead`: what ends the free text that comes first (`</think>`); None: none comes.
    """

    kind: str
    source: str
    whitespace: bool = True
    lead: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GraftError(f"grammar of kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        _check_text("source", self.source)
        if self.lead is not None:
            _check_text("lead", self.lead)
            if self.says_all:
                raise GraftError("a grammar in Lark or GBNF says itself what comes first: leave lead out")

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, *, whitespace: bool = True, lead: str | None = None
    ) -> Grammar:
        """Any JSON that a schema (a mapping, or its JSON text) allows; `GraftError` for what is no schema at all."""
        return cls("json_schema", schema_text(schema), whitespace, lead)

    @classmethod
    def json_object(cls, *, whitespace: bool = True, lead: str | None = None) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace, lead=lead)

    @classmethod
    def regex(cls, pattern: str, *, lead: str | None = None) -> Grammar:
        """Any text that a regular expression matches as a whole (the syntax of Rust's regex crate)."""
        return cls("regex", pattern, True, lead)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Any text of a Lark grammar, in llguidance's dialect."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """Any text of a grammar in llama.cpp's GBNF, whose rules are written with `::=`."""
        return cls("gbnf", text)

    @classmethod
    def rules(cls, text: str) -> Grammar:
        """Any text of a grammar, be it in Lark or in GBNF."""
        return cls.gbnf(text) if re.search(r"(?m)^\s*[\w-]+\s*::=", text) else cls.lark(text)

    @property
    def says_all(self) -> bool:
        """Whether the text is a whole grammar, what comes first included."""
        return self.kind in ("lark", "gbnf")

    def lark_text(self, special: Special) -> str:
        """Return it as Lark for a tokenizer; GBNF as it is."""
        if self.says_all:
            return self.source
        if self.kind == "json_schema":
            answer = f"answer: {json_rule(json.loads(self.source), self.whitespace)}"
        elif self.kind == "regex":
            answer = f"answer: /{_slashed(self.source)}/"
        else:
            answer = _unmarked(self.source, special)
        if self.lead is None:
            return f"start: answer\n{answer}"
        return f"start: lead GAP answer\n{lead_rule('lead', self.lead, special)}GAP: {GAP}\n{answer}"


def schema_text(schema: Any) -> str:
    """Return a JSON schema as JSON text; `GraftError` if it is none."""
    try:
        value = json.loads(schema, parse_constant=_refuse_constant) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping | bool):
            raise GraftError(f"a JSON schema is a {type(value).__name__}: expected an object")
        return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain)
    except GraftError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise GraftError(f"a JSON schema is not JSON: {error}") from error


def json_rule(schema: Any, whitespace: bool) -> str:
    """Return the part of a Lark rule that a JSON schema is. What the schema says under `x-guidance` is respected."""
    value = {"not": {}} if schema is False else {} if schema is True else dict(schema)
    own = value.get("x-guidance")
    value["x-guidance"] = {**(WHITESPACE if whitespace else DENSE), **(own if isinstance(own, Mapping) else {})}
    return "%json " + json.dumps(value, ensure_ascii=False)


def lead_rule(name: str, end: str, special: Special) -> str:
    """Return the Lark rule `name`: any text up to where `end` comes for the first time.

    An `end` that is a token of its own cannot be spelled otherwise, and the text before it may begin with the token
    that it closes (`<think>` for `</think>`).
    """
    text = f"{name.upper()}_TEXT"
    if special(end) is None:
        return f"{name}[lazy]: {text} {quoted(end)}\n{text}: {TEXT}\n"
    opening = end.replace("/", "", 1) if end.startswith("</") else ""
    begin = f"{word(opening, special)}? " if opening and special(opening) is not None else ""
    return f"{name}: {begin}{text} {word(end, special)}\n{text}: {TEXT}\n"


def word(text: str, special: Special) -> str:
    """Return a fixed text as part of a Lark rule."""
    token_id = special(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def marked(text: str) -> str:
    """Return a fixed text as part of a template's rule."""
    return text.join(_MARKS)


def until(text: str) -> str:
    """Return any text up to where `text` comes for the first time, as part of a template's rule."""
    return text.join(_UNTIL)


def _unmarked(source: str, special: Special) -> str:
    rules = dict[str, str]()

    def named(found: re.Match[str]) -> str:
        name = f"until_{len(rules)}"
        rules[name] = lead_rule(name, found[1], special)
        return name

    source = re.sub("{}(.*?){}".format(*_UNTIL), named, source)
    source = re.sub("{}(.*?){}".format(*_MARKS), lambda found: word(found[1], special), source)
    return "\n".join([source, *rules.values()]) if rules else source


def quoted(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    """Return a regular expression as it is written between slashes."""
    escaped = re.sub(r"\\.|/", lambda found: found[0] if found[0] != "/" else r"\/", pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise GraftError(f"grammar: {name} is {text!r}: expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GraftError(f"grammar: half a character at place {error.start} of its {name}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")
