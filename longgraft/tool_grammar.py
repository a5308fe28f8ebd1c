"""A grammar that makes tool calls fit their tools: each with a known name, and arguments as its schema says.

Knows OpenAI's lists of tools and the styles of `longgraft.tool_calls`; no tokenizer and no model. The one idea: all
round the arguments is fixed text, so a call costs the model little more than its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longgraft.config import GraftError
from longgraft.grammar import TEXT, Grammar, json_rule, marked, quoted, schema_text, until
from longgraft.tool_calls import CLOSE, OPEN, check_style

ARGUMENTS = {"hermes": "arguments", "llama": "parameters"}


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], choice: Any, style: str, *, parallel: bool = True, lead: str | None = None
) -> Grammar | None:
    """Return what makes an answer's calls fit `tools` (OpenAI's list); None if `choice` asks for nothing.

    `choice`: OpenAI's `tool_choice`. `required` or one function: calls and nothing else. `auto` (also None): text, and
    calls where the model begins one; in style `llama` nothing says where that is, so None. `parallel`: several calls;
    `llama` has one in any case. `lead`: what ends a thought before the answer. Raises `GraftError` for tools that are
    none, and for a choice that is not among them.
    """
    check_style(style)
    functions = dict(_function(tool) for tool in tools)
    wanted = _wanted(choice, functions)
    if not functions or wanted == "none" or (wanted == "auto" and style == "llama"):
        return None
    if wanted not in ("auto", "required"):
        functions = {name: functions[name] for name in [choice["function"]["name"]]}
    rules = [_rule(number, style, *one) for number, one in enumerate(functions.items())]
    calls = "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))
    return Grammar("template", "\n".join([_answer(wanted, style, parallel), calls, *rules]), False, lead)


def _answer(wanted: str, style: str, parallel: bool) -> str:
    """Return the rule of the whole answer: calls, their tags, and what may stand between them."""
    if style == "llama":
        return "answer: call"
    tagged = f'tagged: "\\n" call "\\n" {marked(CLOSE)}'
    if wanted == "auto":
        return f"answer: ({until(OPEN)} tagged){'*' if parallel else '?'} text\ntext: ANY\nANY: {TEXT}\n{tagged}"
    more = f' ("\\n" {marked(OPEN)} tagged)*' if parallel else ""
    return f"answer: {marked(OPEN)} tagged{more}\n{tagged}"


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


def _wanted(choice: Any, names: Mapping[str, str]) -> str:
    """Return `none`, `auto`, `required` or `one`."""
    if choice is None or choice in ("none", "auto"):
        return choice or "auto"
    if choice == "required" and names:
        return "required"
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if isinstance(function, Mapping) and function.get("name") in names:
        return "one"
    known = ", ".join(names) or "no tools"
    raise GraftError(f"tool_choice is {str(choice)[:80]}: expected none, auto, required or one of the tools ({known})")
