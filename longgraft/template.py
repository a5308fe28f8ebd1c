"""Chat templates: messages become a prompt as the model's own template says.

Knows a tokenizer's template; no engine and no options. The one place that renders one, so that whatever a template does
not take is one sentence, whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longgraft.config import GraftError

NO_TEMPLATE = "this model's tokenizer has no chat template"


def has_template(tokenizer: Any) -> bool:
    """Say whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def templated(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """Return the text a tokenizer's chat template makes of messages, up to where an answer begins.

    `options`: of `apply_chat_template` (`tools`, `continue_final_message` ...) and the template's own variables.
    Raises `GraftError` if there is no template or it does not take these messages.
    """
    if not has_template(tokenizer):
        raise GraftError(NO_TEMPLATE)
    from jinja2 import TemplateError

    options = {"add_generation_prompt": True, "tokenize": False} | options
    try:
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        said = str(error).encode("utf-8", "replace").decode()
        raise GraftError(f"the chat template does not take these messages: {said}") from error


def template_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of what a template made: it writes the tokens that texts begin with itself."""
    return [int(token_id) for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]]
