"""Answers that must have a form: `response_format` and `tools`.

Knows what clients ask for. The engine has no grammars yet, so everything but plain text is refused, by name; what a
grammar will need from a request passes through these two functions.
"""

from __future__ import annotations

from typing import Any

from longgraft.server.errors import ApiError

FORMATS = ("text", "json_object", "json_schema")


def grammar_of(response_format: dict[str, Any] | None) -> None:
    """Return what holds an answer to its form; None for plain text. Raises `ApiError` for what cannot be had."""
    if response_format is None:
        return
    kind = response_format.get("type")
    if kind not in FORMATS:
        expected = f"expected {', '.join(FORMATS)}"
        raise ApiError(400, f"response_format.type is {kind!r}: {expected}", param="response_format.type")
    if kind != "text":
        said = f"response_format {kind} is not supported by this server: ask for text"
        raise ApiError(400, said, param="response_format", code="unsupported_parameter")


def tools_of(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> None:
    """Return the tools an answer may call; None if there are none. Raises `ApiError` for what cannot be had."""
    if tools and choice != "none":
        said = "tools are not supported by this server: leave them out, or set tool_choice to none"
        raise ApiError(400, said, param="tools", code="unsupported_parameter")
    if not tools and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice asks for a tool, but there are no tools", param="tool_choice")
