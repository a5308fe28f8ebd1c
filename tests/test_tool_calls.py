"""Tool calls in answers: read alike however the text is cut; what is no call stays text."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.tool_calls import ToolCall, ToolCallStream, gathered, parse, style_of

PARIS = '{"city": "Paris", "days": [1, {"a": "}\\""}]}'
HERMES = {
    "one": (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", [("weather", PARIS)]),
    "text before": (
        f'Let me look.\n\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n',
        "Let me look.",
        [("weather", PARIS)],
    ),
    "two, and text between and after": (
        'a <tool_call>{"name":"f","arguments":{}}</tool_call>\n b \n<tool_call>\n{"name": "g", "parameters": '
        '{"x": "</tool_call>"}}\n</tool_call>\nc ',
        "abc ",
        [("f", "{}"), ("g", '{"x": "</tool_call>"}')],
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"é": 1}, "name": "f"}</tool_call>', "", [("f", '{"é": 1}')]
    ),
    "more keys": ('<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>x', "x", [("f", "{}")]),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    "name with an escape": ('<tool_call>{"name": "f\\u00e9\\"", "arguments": {}}</tool_call>', "", [('fé"', "{}")]),
    "next tag instead of the closing one": (
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    "cut before the name": ('hm <tool_call>\n{"na', 'hm <tool_call>\n{"na', []),
    "no object": ("<tool_call>\nprint(1)\n</tool_call> so", "<tool_call>\nprint(1)\n</tool_call> so", []),
    "not a call": ('<tool_call>{"answer": 3}</tool_call>', '<tool_call>{"answer": 3}</tool_call>', []),
    "no JSON": ("<tool_call>{'name': 'f'}</tool_call>!", "<tool_call>{'name': 'f'}</tool_call>!", []),
    "arguments of a wrong kind": (
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        [],
    ),
    "text alone": ("  a < b, <tool, {x}\n", "  a < b, <tool, {x}\n", []),
    "a list": ('<tool_call>[{"name": "f"}]</tool_call>', '<tool_call>[{"name": "f"}]</tool_call>', []),
    "nothing": ("", "", []),
    "tag alone": ("<tool_call>", "<tool_call>", []),
}  # fmt: skip
LLAMA = {
    "one": ('{"name": "weather", "parameters": ' + PARIS + "}", "", [("weather", PARIS)]),
    "marked": ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    "two": (
        '\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}\n',
        "",
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    "two on lines": ('{"name": "f", "parameters": {}}\n{"name": "g", "arguments": {}}', "", [("f", "{}"), ("g", "{}")]),
    "type first": ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    "an object that is the answer": ('  {"city": "Paris"} is it', '  {"city": "Paris"} is it', []),
    "text": ('I call {"name": "f", "parameters": {}}', 'I call {"name": "f", "parameters": {}}', []),
    "code": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "text after": ('{"name": "f", "parameters": {}} done', "done", [("f", "{}")]),
    "white space alone": (" \n", " \n", []),
    "half a mark": ("<|pyth", "<|pyth", []),
    "cut before the name": (' {"na', ' {"na', []),
}  # fmt: skip
CASES = [("hermes", name) for name in HERMES] + [("llama", name) for name in LLAMA]


def case(style: str, name: str) -> tuple[str, str, list[ToolCall]]:
    text, content, calls = (HERMES if style == "hermes" else LLAMA)[name]
    return text, content, [ToolCall(*call) for call in calls]


@pytest.mark.parametrize(("style", "name"), CASES)
def test_whole_answers(style: str, name: str) -> None:
    text, content, calls = case(style, name)
    assert parse(text, style) == (content, calls)


@pytest.mark.parametrize(("style", "name"), CASES)
def test_letter_by_letter(style: str, name: str) -> None:
    text, content, calls = case(style, name)
    stream = ToolCallStream(style)
    pieces = [piece for letter in text for piece in stream.push(letter)] + stream.finish()
    assert gathered(pieces) == (content, calls)
    assert stream.num_calls == len(calls)
    assert all(bool(piece.text) != (piece.index is not None) for piece in pieces)


def test_a_call_is_told_when_its_name_is_known_and_grows_as_it_comes() -> None:
    stream = ToolCallStream("hermes")
    assert stream.push('Hi. <tool_call>\n{"name": "f", "argum')[0].text == "Hi."
    assert [piece.name for piece in stream.push('ents": {')] == ["f", None]
    assert [piece.arguments for piece in stream.push('"a": "long')] == ['"a": "long']
    assert [piece.arguments for piece in stream.push(' text"}}\n</tool')] == [' text"}']
    assert stream.push("_call>") == [] and stream.finish() == []


def test_text_waits_no_longer_than_it_must() -> None:
    stream = ToolCallStream("hermes")
    assert [piece.text for piece in stream.push("a <")] == ["a"]
    assert [piece.text for piece in stream.push("b>")] == [" <b>"]
    assert ToolCallStream("llama").push("Hello") != []


PARTS = st.sampled_from(
    [
        *'<tool_call>#</tool_call>#{"name": "f", "arguments": {#"a": "}#"#}#}}#\n# #;#x#<#\\#{#<tool#['.split("#"),
        *'{"name": "g", "parameters": #{"arguments": {}, "name": "h"}#<|python_tag|>'.split("#"),
    ]
)


@settings(deadline=None, max_examples=400)
@given(st.lists(PARTS, max_size=12), st.lists(st.integers(0, 60), max_size=8), st.sampled_from(["hermes", "llama"]))
@example(["<tool_call>", '{"name": "f", "arguments": {', "}}", "</tool_call>", "\n", " "], [50], "hermes")
def test_cuts_change_nothing_and_nothing_is_lost(parts: list[str], cuts: list[int], style: str) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    stream, pieces = ToolCallStream(style), []
    for begin, end in pairwise(places):
        pieces += stream.push(text[begin:end])
    pieces += stream.finish()
    content, calls = gathered(pieces)
    assert (content, calls) == parse(text, style)
    if not calls:
        assert content == text
    for call in calls:
        assert call.name in "fgh"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=150)
@given(
    st.text(min_size=1, max_size=6),
    st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_any_arguments_come_back(name: str, arguments: dict[str, object], is_ascii: bool, is_llama: bool) -> None:
    style, key = ("llama", "parameters") if is_llama else ("hermes", "arguments")
    body = json.dumps({"name": name, key: arguments}, ensure_ascii=is_ascii)
    content, calls = parse(body if is_llama else f"<tool_call>\n{body}\n</tool_call>", style)
    assert content == "" and [call.name for call in calls] == [name]
    assert json.loads(calls[0].arguments) == arguments


TEMPLATES = {
    "hermes": 'a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <f>, ...}',
    "llama": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    "coder": "<tool_call>\n<function=example>\n<parameter=x>",
    "glm": "<tool_call>{name}<arg_key>{k}</arg_key>",
    "none": "{{ messages }}",
}


@pytest.mark.parametrize(("name", "style"), [("hermes", "hermes"), ("llama", "llama"), ("coder", None), ("glm", None)])
def test_styles_of_templates(name: str, style: str | None) -> None:
    assert style_of(TEMPLATES[name]) == style
    assert style_of(TEMPLATES["none"]) is None and style_of(None) is None


def test_an_unknown_style_is_one_sentence() -> None:
    with pytest.raises(GraftError, match="expected one of hermes, llama"):
        parse("", "xml")
