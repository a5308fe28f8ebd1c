"""Declarations of grammars: what they become, and what is refused where it is written."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.grammar import Grammar, lead_rule, marked, schema_text, word


def never(text: str) -> int | None:
    return None


def always(text: str) -> int | None:
    return len(text)


def schema_in(lark: str) -> Any:
    return json.loads(lark[lark.index("%json ") + 6 :])


def test_equal_declarations_are_one_key() -> None:
    one = Grammar.json_schema({"type": "object", "a": 1})
    assert one == Grammar.json_schema('{"type": "object", "a": 1}') and hash(one) == hash(one)
    assert one == Grammar.json_schema(MappingProxyType({"type": "object", "a": 1}))
    assert len({one, Grammar.json_schema({"type": "object", "a": 1}, whitespace=False), Grammar.json_object()}) == 3


def test_white_space_is_bounded_or_none_unless_the_schema_says() -> None:
    free, dense = (schema_in(Grammar.json_object(whitespace=is_free).lark_text(never)) for is_free in (True, False))
    assert "{1,64}" in free["x-guidance"]["whitespace_pattern"] and free["type"] == "object"
    assert dense["x-guidance"] == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    own = Grammar.json_schema({"x-guidance": {"item_separator": ";"}}, whitespace=False).lark_text(never)
    assert schema_in(own)["x-guidance"]["item_separator"] == ";"


@pytest.mark.parametrize(("schema", "means"), [(True, {}), (False, {"not": {}}), ("true", {}), ({}, {})])
def test_schemas_that_are_no_objects(schema: Any, means: Any) -> None:
    made = schema_in(Grammar.json_schema(schema).lark_text(never))
    assert {name: value for name, value in made.items() if name != "x-guidance"} == means


@pytest.mark.parametrize(
    ("pattern", "lark"),
    [("a/b", r"/a\/b/"), (r"a\/b", r"/a\/b/"), (r"\\/", r"/\\\//"), ("a\nb", r"/a\nb/")],
)
def test_expressions_between_slashes(pattern: str, lark: str) -> None:
    assert Grammar.regex(pattern).lark_text(never) == f"start: answer\nanswer: {lark}"


def test_leads_are_spelled_or_special() -> None:
    assert 'lead[lazy]: LEAD_TEXT "</think>"' in lead_rule("lead", "</think>", never)
    assert lead_rule("lead", "</think>", always).startswith("lead: <[7]>? LEAD_TEXT <[8]>\n")
    only_end = lead_rule("lead", "</think>", lambda text: 8 if text == "</think>" else None)
    assert only_end.startswith("lead: LEAD_TEXT <[8]>\n")
    assert lead_rule("lead", "<|message|>", always).startswith("lead: LEAD_TEXT <[11]>\n")
    assert word('a"b', never) == r'"a\"b"' and word("<a>", always) == "<[3]>"


def test_templates_leave_words_to_the_tokenizer() -> None:
    template = Grammar("template", f"answer: {marked('<a>')} X {marked('<bb>')}\nX: /x/", lead="END")
    assert "answer: <[3]> X <[4]>\n" in template.lark_text(always)
    spelled = template.lark_text(never)
    assert 'answer: "<a>" X "<bb>"\n' in spelled and spelled.startswith("start: lead GAP answer\nlead[lazy]:")


def endless() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Grammar.json_schema("{"), "JSON schema is not JSON"),
        (lambda: Grammar.json_schema("3"), "is a int: expected an object"),
        (lambda: Grammar.json_schema([1]), "is a list: expected an object"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema(None), "is a NoneType"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema({"a": float("nan")}), "JSON schema is not JSON"),
        (lambda: Grammar.json_schema('{"a": NaN}'), "NaN is not a number"),
        (lambda: Grammar.json_schema({"a": {1, 2}}), "it holds a set"),
        (lambda: Grammar.json_schema(endless()), "JSON schema is not JSON"),
        (lambda: Grammar.json_schema("[" * 100_000), "JSON schema is not JSON"),
        (lambda: Grammar.json_schema({"a": "\ud800"}), "half a character"),
        (lambda: Grammar.regex(""), "source is ''"),
        (lambda: Grammar.regex(3), "source is 3"),  # type: ignore[arg-type]
        (lambda: Grammar.lark("\udcff"), "half a character at place 0 of its source"),
        (lambda: Grammar.regex("a", lead=""), "lead is ''"),
        (lambda: Grammar("lark", "start: A", lead="x"), "leave lead out"),
        (lambda: Grammar("gbnf", 'root ::= "a"', lead="x"), "leave lead out"),
        (lambda: Grammar("ebnf", "x"), "kind 'ebnf'"),
    ],
)
def test_what_is_refused(make: Any, named: str) -> None:
    with pytest.raises(GraftError) as caught:
        make()
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_text_of_a_schema_keeps_its_order_and_characters() -> None:
    assert schema_text({"b": 1, "a": "é"}) == '{"b": 1, "a": "é"}'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('root ::= "a" | b\nb ::= [0-9]+', "gbnf"),
        ('# what is asked for\n  root-rule ::= "a"', "gbnf"),
        ('start: "a" | B\nB: /[0-9]+/', "lark"),
        ('start: NAME "::=" NAME\nNAME: /[a-z]+/', "lark"),
    ],
)
def test_rules_are_known_by_how_they_are_written(text: str, kind: str) -> None:
    assert Grammar.rules(text) == Grammar(kind, text) and Grammar.rules(text).says_all
