"""Answers with a form through OpenAI's own client: JSON, guided text and tool calls, as plain decoding writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance")

from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.grammar import Grammar
from longgraft.server.run import Server
from longgraft.tool_calls import parse
from longgraft.tool_grammar import tool_grammar
from tests import grammars
from tests.engines import cost_of, model_of
from tests.server import live
from tests.server.live import CHAT, client, http

TEMPLATE = """
{%- if tools %}Tools: {{ tools | tojson }} call with <tool_call>
{% endif %}{%- for m in messages %}<|start|>{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<|start|>assistant: {% if thinks %}<think>{% endif %}{% endif %}"""
THINKING = TEMPLATE + "{# closed by </think> #}"
DAYS: dict[str, Any] = {"enum": ["today", "tomorrow"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"day": DAYS}, "required": ["day"], "additionalProperties": False}}}
    for name in ("weather", "news")
]  # fmt: skip
# A model that wants to call a tool, and to end once it has.
EAGER = {"logit_bias": {str(grammars.tokenizer().convert_tokens_to_ids("<tool_call>")): 100, str(grammars.EOS): 50}}


def tokenizer(template: str = TEMPLATE) -> Any:
    made = grammars.tokenizer()
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with live.serving(Engine(model_of(), tokenizer(), EngineConfig(), cost=cost_of(0.03))) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine(model_of(), tokenizer(), EngineConfig(policy="plain", prefix_cache=False), cost=cost_of(0.03))


@pytest.fixture(autouse=True)
def usual_template() -> Iterator[None]:
    yield
    tokenizer()


def said(alone: Engine, grammar: Grammar | None, tools: Any = None, **params: Any) -> Any:
    """What plain decoding says under a grammar."""
    options = {"tools": tools} if tools else {}
    ids = tokenizer(alone.tokenizer.chat_template).apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=True, **options
    )["input_ids"]
    ends = (grammars.EOS,) if grammar is not None else None
    return alone.generate(ids, SamplingParams(grammar=grammar, eos_token_ids=ends, **params))


def ask(server: Server, **sent: Any) -> Any:
    return client(server).chat.completions.create(**{"model": "tiny", "messages": CHAT, "max_tokens": 60, **sent})


PERSON_SAID: Any = {
    "type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": grammars.PERSON}
}  # fmt: skip
DENSE = {"json": grammars.PERSON, "disable_any_whitespace": True}
LARK = 'start: "yes" | "no" /[!]+/'
GBNF = 'root ::= "yes" | "no" [!]+'
FORMS: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": PERSON_SAID}, Grammar.json_schema(grammars.PERSON)),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"extra_body": {"guided_regex": "[ab]{3}/c"}}, Grammar.regex("[ab]{3}/c")),
    ({"extra_body": {"structured_outputs": DENSE}},
     Grammar.json_schema(grammars.PERSON, whitespace=False)),
    ({"extra_body": {"structured_outputs": {"grammar": LARK}}}, Grammar.lark(LARK)),
    ({"extra_body": {"structured_outputs": {"grammar": GBNF}}}, Grammar.gbnf(GBNF)),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "grammar"), FORMS, ids=["schema", "object", "regex", "dense", "lark", "gbnf"])
@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_an_answer_in_a_form(
    server: Server, alone: Engine, sent: dict[str, Any], grammar: Grammar, temperature: float
) -> None:
    choice = ask(server, temperature=temperature, seed=5, **sent).choices[0]
    expected = said(alone, grammar, max_new_tokens=60, temperature=temperature, seed=5)
    assert choice.message.content == expected.text
    assert choice.finish_reason == ("stop" if expected.finish_reason == "eos" else "length")
    if choice.finish_reason == "stop" and "response_format" in sent:
        assert isinstance(json.loads(choice.message.content), dict)


def test_a_schema_is_kept_whatever_is_drawn(server: Server) -> None:
    form = {"structured_outputs": DENSE}
    for choice in ask(server, extra_body=form, temperature=1.5, seed=3, n=3, max_tokens=200).choices:
        assert choice.finish_reason == "stop"
        assert grammars.fits(json.loads(choice.message.content), grammars.PERSON)


def test_completions_and_choices_have_forms_too(server: Server) -> None:
    words = ["very good", 'quite "bad"\n']
    answer = client(server).completions.create(
        model="tiny", prompt="The film is", max_tokens=40, extra_body={"structured_outputs": {"choice": words}}
    )
    assert answer.choices[0].text in words and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("sent", "grammar"),
    [
        ({"grammar": GBNF}, Grammar.gbnf(GBNF)),
        ({"json_schema": grammars.PERSON}, Grammar.json_schema(grammars.PERSON)),
        ({"grammar": "", "json_schema": None}, None),
    ],
)
def test_llama_cpps_completions_have_forms_too(
    server: Server, alone: Engine, sent: dict[str, Any], grammar: Grammar | None
) -> None:
    asked = {"prompt": "The film is", "n_predict": 60, "temperature": 0}
    with http(server) as sender:
        answer = sender.post("/completion", json={**asked, **sent})
    params = SamplingParams(grammar=grammar, eos_token_ids=(grammars.EOS,), max_new_tokens=60, temperature=0.0)
    expected = alone.generate("The film is", params)
    assert answer.status_code == 200, answer.text
    if grammar is not None:  # else the model says itself where it ends
        assert answer.json()["content"] == expected.text


def test_llama_cpps_forms_that_are_none(server: Server) -> None:
    bad = {"grammar": "root ::= nowhere"}, {"json_schema": {"type": "strnig"}}, {"grammar": GBNF, "json_schema": {}}
    with http(server) as sender:
        for sent, named in zip(bad, ("nowhere", "strnig", "exclude each other")):
            answer = sender.post("/completion", json={"prompt": "x", **sent})
            assert answer.status_code == 400 and named in answer.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "news"}}])
def test_calls_that_must_come(server: Server, alone: Engine, choice: Any) -> None:
    answer = ask(server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices[0]
    grammar = tool_grammar(TOOLS, choice, "hermes", parallel=False)
    expected = parse(said(alone, grammar, TOOLS, max_new_tokens=60).text, "hermes")[1]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == (expected[0].name, expected[0].arguments)
    assert call.type == "function" and call.id.startswith("call_")
    assert choice == "required" or call.function.name == "news"
    assert json.loads(call.function.arguments)["day"] in DAYS["enum"]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_streamed_answer_adds_up_to_the_whole_one(server: Server, parallel: bool) -> None:
    sent: dict[str, Any] = {"tools": TOOLS, "temperature": 1.0, "seed": 4, "max_tokens": 140, **EAGER}
    sent["parallel_tool_calls"] = parallel
    whole = ask(server, **sent).choices[0]
    calls: dict[int, dict[str, Any]] = {}
    text, reason, names = "", None, 0
    for chunk in ask(server, stream=True, **sent):
        (choice,) = chunk.choices
        text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            one = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            names += call.function.name is not None
            one["arguments"] += call.function.arguments
    assert (text or None, reason) == (whole.message.content, whole.finish_reason)
    found = [(one["name"], one["arguments"]) for _, one in sorted(calls.items())]
    assert found == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    ids = {one["id"] for one in calls.values()}
    assert names == len(calls) == len(ids) and all(ids)
    assert len(calls) > 1 if parallel else len(calls) == 1
    assert reason == ("length" if parallel else "tool_calls")


def test_free_text_beside_tools(server: Server, alone: Engine) -> None:
    """Without a call the answer is text; with `none` the tools are only shown."""
    ban = {str(grammars.tokenizer().convert_tokens_to_ids("<tool_call>")): -100}
    free = ask(server, tools=TOOLS, logit_bias=ban, max_tokens=12).choices[0]
    expected = said(
        alone,
        tool_grammar(TOOLS, "auto", "hermes"),
        TOOLS,
        max_new_tokens=12,
        logit_bias={int(token): -100.0 for token in ban},
    )
    assert free.message.content == expected.text and not free.message.tool_calls
    none = ask(server, tools=TOOLS, tool_choice="none", max_tokens=12).choices[0]
    assert none.message.content == said(alone, None, TOOLS, max_new_tokens=12).text


def test_calls_and_their_results_in_a_chat(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"day": "today"}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]}]  # fmt: skip
    with http(server) as sender:
        ids = sender.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = tokenizer().decode(ids)
    assert 'assistant: <tool_call>{"day": "today"}</tool_call>' in text.replace("\n", "") and "tool: rain" in text
    assert ask(server, messages=messages, tools=TOOLS, max_tokens=4).usage.completion_tokens == 4


def test_a_thought_before_the_form_is_told_apart(server: Server) -> None:
    """The template knows thoughts: they come first, outside the schema, and are no part of the content."""
    tokenizer(THINKING)
    end = grammars.tokenizer().convert_tokens_to_ids("</think>")
    sent: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 90, "logit_bias": {str(end): 6}}
    form = {"structured_outputs": DENSE}
    message = ask(server, extra_body=form, **sent).choices[0].message
    assert grammars.fits(json.loads(message.content), grammars.PERSON)
    thought = message.model_extra["reasoning_content"]
    assert thought and "think>" not in thought
    pieces = [chunk.choices[0].delta for chunk in ask(server, stream=True, extra_body=form, **sent)]
    assert "".join(piece.content or "" for piece in pieces) == message.content
    assert "".join((piece.model_extra or {}).get("reasoning_content", "") for piece in pieces) == thought
    off = form | {"chat_template_kwargs": {"enable_thinking": False}}
    assert "reasoning_content" not in ask(server, extra_body=off, **sent).choices[0].message.model_extra


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "weather"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sports"}}}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
         "messages.0.tool_calls.0.function.name"),
    ],
)  # fmt: skip
def test_mistakes(server: Server, sent: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **sent)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_a_template_without_calls_is_named(server: Server) -> None:
    tokenizer(live.TEMPLATE)
    with pytest.raises(openai.BadRequestError, match="no tool calls that can be read") as caught:
        ask(server, tools=TOOLS)
    assert caught.value.param == "tools"


def test_an_answer_that_may_not_end_has_no_form(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="EOS"):
        ask(server, response_format={"type": "json_object"}, extra_body={"ignore_eos": True})


def test_the_first_grammar_is_made_at_start() -> None:
    with live.serving(Engine(model_of(), tokenizer(), EngineConfig(), cost=cost_of(0.03))) as fresh:
        live.wait_for(lambda: Grammar.json_object() in fresh.desk.engine.grammars._kept)
