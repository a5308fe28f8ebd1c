"""Four prompts that cover what users do, built from text every machine has: Python's own library and our LICENSE.

rewrite: give a whole file back with one change. quote: answer by quoting a document. new_file: begin a file that
belongs to a few others. chat: nothing to copy. Knows no engine.
"""

import inspect
import shlex
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

REWRITE = "Rename the method `{old}` to `{new}` everywhere and give the complete file back, without comments on it."
QUESTIONS = (
    "Quote, word for word and each with its section number, the passages of the licence that say (1) what a "
    "contributor grants about patents, (2) under which conditions copies may be redistributed, and (3) that there is "
    "no warranty."
)


def messages(task: str) -> list[dict[str, str]]:
    """Return the chat messages of a task; `TASKS` names them."""
    return [{"role": "user", "content": TASKS[task]()}]


def prompt_ids(task: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a task's prompt, through the chat template where the tokenizer has one."""
    chat = messages(task)
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(chat[0]["content"] + "\n\nAnswer:\n")["input_ids"])
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(ids["input_ids"])


def _rewrite() -> str:
    source = inspect.getsource(shlex)
    return f"Here is the file shlex.py:\n```python\n{source}```\n" + REWRITE.format(old="get_token", new="next_token")


def _rewrite_short() -> str:
    source = inspect.getsource(textwrap.TextWrapper)[:6000]
    return f"Here is a class:\n```python\n{source}\n```\n" + REWRITE.format(old="_split", new="split_text")


def _quote() -> str:
    root = Path(__file__).resolve().parent.parent
    license_text = next(p for p in (root / "LICENSE", Path("LICENSE")) if p.exists()).read_text()
    return f"Document:\n{license_text}\n\n{QUESTIONS}"


def _new_file() -> str:
    files = [f"# {name}.py\n{inspect.getsource(import_module(name))}" for name in ("bisect", "sched", "queue")]
    listing = "\n\n".join(files)
    return (
        f"These are files of one project:\n```python\n{listing}\n```\nWrite a new file `boundedset.py` in that style: "
        "a thread-safe sorted set with a maximum size, built on bisect and threading, with docstrings."
    )


def _chat() -> str:
    return "Explain to a gardener how compost heats up, and what to do when it stays cold. Use everyday words."


TASKS: dict[str, Callable[[], str]] = {
    "rewrite": _rewrite,
    "quote": _quote,
    "new_file": _new_file,
    "chat": _chat,
    "rewrite_short": _rewrite_short,
}
