"""Grammars of tool calls: what a choice allows, and that a model under them calls a tool as its schema says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from longgraft.config import GraftError, SamplingParams
from longgraft.grammar import Grammar
from longgraft.tool_calls import parse
from longgraft.tool_grammar import tool_grammar
from tests import engines
from tests.engines import engine_for, prompt_of
from tests.grammars import EOS, TAGS, allowed, fits, text_of, tokenizer
from tests.models import VOCAB
from tests.small_tokenizers import byte_level

pytest.importorskip("llguidance")
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/few"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FLAT = {**WEATHER, "properties": {"city": WEATHER["properties"]["city"], "days": WEATHER["$defs"]["few"]}}  # type: ignore[index]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo", "days": 1}}'


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def may_be(grammar: Grammar | None, text: str) -> bool:
    """Whether a text is a whole answer."""
    assert grammar is not None
    tokens: list[int] = []
    for token in tokenizer()(text)["input_ids"]:
        if not allowed(grammar, tokens)[token]:
            return False
        tokens.append(token)
    return bool(allowed(grammar, tokens)[EOS])


CHOICES: list[tuple[Any, str, dict[str, Any], list[str], list[str]]] = [
    ("required", "hermes", {}, [CALL, NOW, f"{CALL}\n{NOW}"], ["", "text", f"x{CALL}", f"{CALL}\n", CALL[:-1]]),
    ("required", "hermes", {"parallel": False}, [CALL, NOW], [f"{CALL}\n{NOW}"]),
    (NAMED, "hermes", {}, [CALL, f"{CALL}\n{CALL}"], [NOW]),
    ("auto", "hermes", {}, ["", "Hello {\n", CALL, f"So: {CALL}", f"{CALL} and\n{NOW}!"], ["<tool_call>", CALL[:40]]),
    ("auto", "hermes", {"parallel": False}, ["a", f"b{CALL}c"], [f"{CALL}{NOW}"]),
    (None, "hermes", {}, ["a"], ["<tool_call>no"]),
    ("required", "llama", {}, [LLAMA, '{"name": "now", "parameters": {}}'], [f"{LLAMA};{LLAMA}", CALL, "a"]),
    (NAMED, "llama", {}, [LLAMA], ['{"name": "now", "parameters": {}}', LLAMA.replace("1", "77")]),
    ("required", "hermes", {"lead": "</think>"}, [f"<think>a</think>\n\n{CALL}", f"</think>{CALL}"], [CALL, "<think>"]),
]


@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_what_a_choice_allows(number: int) -> None:
    choice, style, options, right, wrong = CHOICES[number]
    grammar = tool_grammar(TOOLS, choice, style, **options)
    for text in right:
        assert may_be(grammar, text), text
    for text in wrong:
        assert not may_be(grammar, text), text


def test_nothing_is_asked_for() -> None:
    for tools, choice, style in ((TOOLS, "none", "hermes"), ([], None, "hermes"), ([], "auto", "hermes")):
        assert tool_grammar(tools, choice, style) is None
    assert tool_grammar(TOOLS, "auto", "llama") is None


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
def test_a_model_calls_as_the_schema_says(choice: Any) -> None:
    params = SamplingParams(
        temperature=1.0, seed=4, top_k=0, max_new_tokens=160, eos_token_ids=(EOS,),
        grammar=tool_grammar(TOOLS, choice, "hermes", parallel=False),
        logit_bias={tokenizer().get_vocab()["<tool_call>"]: 9.0},
    )  # fmt: skip
    outputs = [
        engine_for("llama", tokenizer(), policy=policy).generate(prompt_of(60), params)
        for policy in ("plain", "adaptive")
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    content, calls = parse(text_of(outputs[0].token_ids), "hermes")
    assert len(calls) == 1 and (content == "" or choice == "auto")
    value = json.loads(calls[0].arguments)
    assert calls[0].name == "now" or fits(value, FLAT)
    if choice != "auto":
        assert outputs[0].finish_reason == "eos" and outputs[1].stats["accepted_by_source"]["grammar"] > 10


def test_a_tag_that_is_no_token_is_spelled() -> None:
    words = byte_level(VOCAB)
    assert not set(TAGS) & words.get_vocab().keys()
    params = SamplingParams(
        temperature=0.0, max_new_tokens=200, eos_token_ids=(EOS,),
        grammar=tool_grammar(TOOLS, NAMED, "hermes", parallel=False),
    )  # fmt: skip
    output = engine_for("llama", words).generate(prompt_of(60), params)
    text = words.decode(output.token_ids, skip_special_tokens=True)
    assert [call.name for call in parse(text, "hermes")[1]] == ["weather"]
    bias = dict.fromkeys(words("<tool_call>\n")["input_ids"], 12.0)
    free = SamplingParams(
        temperature=0.9, seed=2, max_new_tokens=120, eos_token_ids=(EOS,), logit_bias=bias,
        grammar=tool_grammar(TOOLS, "auto", "hermes"),
    )  # fmt: skip
    outputs = [
        engine_for("llama", words, policy=policy).generate(prompt_of(60), free) for policy in ("plain", "adaptive")
    ]
    assert outputs[0].token_ids == outputs[1].token_ids


@pytest.mark.parametrize(
    ("tools", "choice", "named"),
    [
        ([{"type": "function"}], "auto", "functions with a name"),
        (["f"], "auto", "functions with a name"),
        ([{"function": {"name": ""}}], "auto", "functions with a name"),
        ([{"function": {"name": "f", "parameters": [1]}}], "auto", "tool f: a JSON schema is a list"),
        (TOOLS, {"type": "function", "function": {"name": "rain"}}, r"one of the tools \(weather, now\)"),
        (TOOLS, "always", "expected none, auto, required"),
        (TOOLS, 3, "expected none, auto, required"),
        ([], "required", "no tools"),
        ([], NAMED, "no tools"),
    ],
)
def test_what_is_refused(tools: Any, choice: Any, named: str) -> None:
    with pytest.raises(GraftError, match=named):
        tool_grammar(tools, choice, "hermes")


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(GraftError, match="style 'xml'"):
        tool_grammar(TOOLS, "auto", "xml")
