"""Answers that must have a form: `response_format`, guided decoding and `tools`, as one declaration for the engine.

Knows what clients ask for, grammars and the styles of tool calls; no tokenizer's words and no endpoint. The one idea:
what holds an answer to its form and what reads it afterwards are decided together, in one `Structure`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from longgraft.config import GraftError
from longgraft.grammar import Grammar, quoted
from longgraft.server.bodies import ChatRequest, LlamaRequest
from longgraft.server.errors import ApiError
from longgraft.server.fields import Guided, Sampled
from longgraft.tool_calls import CLOSE, OPEN, style_of
from longgraft.tool_grammar import tool_grammar

FORMATS = ("text", "json_object", "json_schema")
THOUGHT = "</think>"
# Fields of the template by which clients switch thinking off.
SWITCHES = ("enable_thinking", "thinking")
NO_CALLS = "this model's chat template writes no tool calls that can be read here: expected those of Hermes or Llama 3"


@dataclass(frozen=True, slots=True)
class Structure:
    """How an answer is held to a form and read.

    `grammar`: None for free text. `param`: the field that asks for it. `style`: of the tool calls that are read in the
    answer (None: none are). `lead`: what ends a thought before the answer (None: no thought is told apart).
    """

    grammar: Grammar | None = None
    param: str | None = None
    style: str | None = None
    lead: str | None = None


PLAIN = Structure()
# Makes a grammar, given what ends the thought before it.
Make = Callable[[str | None], Grammar]


def structure_of(body: Sampled, lead: str | None = None) -> Structure:
    """Return the form that a request asks for by `response_format` or guided decoding; `ApiError` for a bad one."""
    return _structure(_asked(body), lead)


def llama_structure(body: LlamaRequest) -> Structure:
    """Return the form that a request to llama.cpp's endpoints asks for."""
    asked = dict[str, Make]()
    if body.json_schema is not None:
        asked["json_schema"] = _guided("json", body.json_schema, True)
    if body.grammar:
        gbnf = body.grammar
        asked["grammar"] = lambda lead: Grammar.gbnf(gbnf)
    return _structure(asked, None)


def _structure(asked: dict[str, Make], lead: str | None) -> Structure:
    if not asked:
        return PLAIN
    if len(asked) > 1:
        raise ApiError(400, f"{' and '.join(asked)} exclude each other: leave one out", param=list(asked)[1])
    ((param, make),) = asked.items()
    grammar = named(param, lambda: make(lead))
    return Structure(grammar, param, None, None if grammar.says_all else lead)


def chat_structure(body: ChatRequest, tokenizer: Any, lead: str | None) -> Structure:
    """Return the form of a chat's answer, tool calls included.

    What a tokenizer calls special is left out of texts: such marks hold an answer to its form but are not read in it.
    """
    unseen = set(tokenizer.all_special_tokens)
    free = structure_of(body, lead)
    if free.lead in unseen:
        free = replace(free, lead=None)
    if not body.tools or body.tool_choice == "none":
        # It is said of a choice without tools that it names none.
        named("tool_choice", lambda: tool_grammar([], body.tool_choice, "hermes"))
        return free
    if free.grammar is not None:
        raise ApiError(400, f"{free.param} and tools exclude each other: leave one out, or set tool_choice to none",
                       param=free.param)  # fmt: skip
    style = style_of(tokenizer.chat_template)
    if style is None or (style == "hermes" and not unseen.isdisjoint((OPEN, CLOSE))):
        raise ApiError(400, NO_CALLS, param="tools", code="unsupported_parameter")
    tools, parallel = body.tools, body.parallel_tool_calls is not False
    named("tools", lambda: tool_grammar(tools, "auto", style))
    grammar = named("tool_choice", lambda: tool_grammar(tools, body.tool_choice, style, parallel=parallel, lead=lead))
    return Structure(grammar, "tools", style, None if lead in unseen else lead)


def lead_of(chat_template: str | None, prompt: str, variables: dict[str, Any]) -> str | None:
    """Return what ends the thought that an answer begins with; None where it begins with none.

    `prompt`: the end of the chat as the template wrote it. A template that knows thoughts, and has not closed one
    there already, leaves it to the model to think first.
    """
    if THOUGHT not in (chat_template or "") or any(variables.get(name) is False for name in SWITCHES):
        return None
    return None if prompt.rstrip().endswith(THOUGHT) else THOUGHT


def named(param: str, make: Callable[[], Any]) -> Any:
    """Return what `make` makes; its mistakes are those of a field."""
    try:
        return make()
    except GraftError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error


def _asked(body: Sampled) -> dict[str, Make]:
    """Return what asks for a form, by field; usually nothing or one."""
    asked = _format(body.response_format)
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            asked[f"guided_{name}"] = _guided(name, value, True)
    guided = body.structured_outputs or Guided()
    for name in ("json", "regex", "choice", "grammar"):
        value = guided.json_ if name == "json" else getattr(guided, name)
        if value is not None:
            asked[f"structured_outputs.{name}"] = _guided(name, value, not guided.disable_any_whitespace)
    if guided.json_object:
        asked["structured_outputs.json_object"] = lambda lead: Grammar.json_object(lead=lead)
    return asked


def _format(response_format: dict[str, Any] | None) -> dict[str, Make]:
    kind = "text" if response_format is None else response_format.get("type")
    if kind not in FORMATS:
        expected = f"expected {', '.join(FORMATS)}"
        raise ApiError(400, f"response_format.type is {kind!r}: {expected}", param="response_format.type")
    if kind == "json_object":
        return {"response_format": lambda lead: Grammar.json_object(lead=lead)}
    if kind == "text" or response_format is None:
        return {}
    declared = response_format.get("json_schema")
    if not isinstance(declared, dict) or not isinstance(declared.get("schema", {}), dict):
        said = "response_format.json_schema: expected an object with a name and a schema"
        raise ApiError(400, said, param="response_format.json_schema")
    schema = declared.get("schema", {"type": "object"})
    return {"response_format": lambda lead: Grammar.json_schema(schema, lead=lead)}


def _guided(name: str, value: Any, whitespace: bool) -> Make:
    if name == "json":
        return lambda lead: Grammar.json_schema(value, whitespace=whitespace, lead=lead)
    if name == "regex":
        return lambda lead: Grammar.regex(value, lead=lead)
    if name == "grammar":
        return lambda lead: Grammar.rules(value)
    return lambda lead: Grammar("template", "answer: " + " | ".join(map(quoted, value)), True, lead)
