"""Where a prompt comes from: an option, a file, stdin, or a chat's messages through the model's own template.

And which options make no sense together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longgraft.config import GraftError
from longgraft.report.checks import check_report
from longgraft.template import NO_TEMPLATE, has_template, template_ids, templated

if TYPE_CHECKING:
    from longgraft.engine import Engine
    from longgraft.references import References


def read_prompt(prompt: str | None, file: str | None, chat: str | None) -> str | list[Any]:
    """Return the prompt's text, or a chat's messages, from the one option that was given."""
    given = [name for name, v in (("--prompt", prompt), ("--prompt-file", file), ("--chat", chat)) if v is not None]
    if len(given) != 1:
        came = f"got {' and '.join(given)}" if given else "got none"
        raise GraftError(f"expected one of --prompt, --prompt-file and --chat, {came}")
    if chat is not None:
        return messages_of(chat, read_file(chat))
    text = prompt if prompt is not None else read_file(str(file))
    if not text:
        raise GraftError(f"{given[0]} is empty: expected some text")
    return text


def read_file(name: str) -> str:
    """Return the text of a file, or of stdin for `-`."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise GraftError(f"{name}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise GraftError(f"{name}: not UTF-8 text (byte {error.start}); convert it first") from error


def read_references(
    prediction: str | None, documents: Sequence[str] | None, corpora: Sequence[str] | None
) -> References:
    """Return what else may be copied from: files read, corpora named. Empty files are none."""
    from longgraft.references import References

    return References(
        prediction=read_file(prediction) if prediction is not None else None,
        documents={name: read_file(name) for name in documents or ()},
        corpora=tuple(corpora or ()),
    )


def refuse_stdin_twice(*files: str | None) -> None:
    """Refuse options that would read stdin more than once: whoever came second would find it empty."""
    if files.count("-") > 1:
        raise GraftError("- is given for more than one file: stdin can be read once")


def refuse_unshown(chosen: dict[str, Any]) -> None:
    """Refuse what nothing would show, and a report that cannot be written."""
    if chosen["logprobs"] is not None and not (chosen["as_json"] or chosen["report"]):
        raise GraftError("--logprobs is shown in the JSON line and in the report: add --json or --report FILE")
    if chosen["compare_plain"] and not chosen["report"]:
        raise GraftError("--compare-plain is shown in the report: add --report FILE")
    if chosen["report"] is not None:
        check_report(chosen["report"])


def messages_of(name: str, text: str) -> list[Any]:
    """Return the messages in a JSON text, checked for their shape."""
    try:
        messages = json.loads(text)
    except json.JSONDecodeError as error:
        raise GraftError(f"{name}: not JSON ({error})") from error
    is_right = isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    if not is_right:
        raise GraftError(f'{name}: expected a list of messages, like [{{"role": "user", "content": "..."}}]')
    return list(messages)


def encode(engine: Engine, source: str | list[Any]) -> list[int]:
    """Return the token ids of a text or, through the tokenizer's chat template, of messages."""
    if isinstance(source, str):
        return engine.encode(source)
    if not has_template(engine.tokenizer):
        raise GraftError(f"{NO_TEMPLATE}: use --prompt or --prompt-file")
    return engine.encode(template_ids(engine.tokenizer, templated(engine.tokenizer, source)))
