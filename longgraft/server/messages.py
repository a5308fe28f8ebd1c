"""A chat's messages through the model's own template.

Knows messages and a tokenizer's template; no engine and no endpoint.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from longgraft.config import GraftError
from longgraft.server.bodies import ChatRequest, Message
from longgraft.server.errors import ApiError
from longgraft.template import NO_TEMPLATE, has_template, templated

# What OpenAI's newer models call the role that templates know as system.
ROLES = {"developer": "system"}
JOINT = "\n"


def render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    """Return what the template makes of messages; raises `ApiError` for what it does not take."""
    if not has_template(tokenizer):
        raise ApiError(400, f"{NO_TEMPLATE}: use /v1/completions", param="messages")
    try:
        return templated(tokenizer, [plain_message(message) for message in messages], **options)
    except GraftError as error:
        raise ApiError(400, str(error), param="messages") from error


def plain_message(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: text in one piece, nothing that is null."""
    values = message.model_dump(exclude_none=True)
    values["role"] = ROLES.get(message.role, message.role)
    content = message.content
    values["content"] = JOINT.join(part.text for part in content) if isinstance(content, list) else content or ""
    for call in values.get("tool_calls", ()):
        call["function"]["arguments"] = _read(call["function"]["arguments"])
    return values


def _read(arguments: Any) -> Any:
    """Return a call's arguments as templates expect them: what the JSON text says, or the text where it is none."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def template_options(body: ChatRequest, tokenizer: Any) -> dict[str, Any]:
    """Return how a chat request wants its template rendered; its variables may not be the tokenizer's options."""
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    options = dict(body.chat_template_kwargs or {})
    if taken := sorted(own & options.keys()):
        raise ApiError(400, f"chat_template_kwargs holds {taken[0]}: expected variables of the template alone")
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise ApiError(400, "continue_final_message and add_generation_prompt exclude each other: leave one out")
    return options | {
        "continue_final_message": goes_on,
        "add_generation_prompt": not goes_on if body.add_generation_prompt is None else body.add_generation_prompt,
    }
