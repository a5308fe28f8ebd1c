"""A chat's messages through the model's own template.

Knows messages and a tokenizer's template; no engine and no endpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from longgraft.server.bodies import ChatRequest, Message
from longgraft.server.errors import ApiError

# What OpenAI's newer models call the role that templates know as system.
ROLES = {"developer": "system"}
JOINT = "\n"


def render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> list[int]:
    """Return token ids of messages; raises `ApiError` for what the template does not take."""
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
    from jinja2 import TemplateError

    plain = [plain_message(message) for message in messages]
    try:
        encoded = tokenizer.apply_chat_template(plain, return_dict=True, **options)
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        said = str(error).encode("utf-8", "replace").decode()
        raise ApiError(400, f"the chat template does not take these messages: {said}", param="messages") from error
    return [int(token_id) for token_id in encoded["input_ids"]]


def plain_message(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: text in one piece, nothing that is null."""
    values = message.model_dump(exclude_none=True)
    values["role"] = ROLES.get(message.role, message.role)
    content = message.content
    values["content"] = JOINT.join(part.text for part in content) if isinstance(content, list) else content or ""
    return values


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
