"""Prompts of four kinds, any length: `rewrite` a file, a `new_file` of a repository, `quote` a document, `chat`.

Built from text every Python brings along (its library's sources and its language reference), so that two machines with
one Python build the same prompts; or taken from trace files. Knows tokenizers; no model and no engine.

A prompt is a question with background in front of it, and length is made by background: the most lines of it that
still fit. `variant` begins the background elsewhere, so that several seeds are several prompts.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longgraft.config import GraftError
from longgraft.eval.fitting import CHARACTERS_PER_TOKEN, Messages, Prompt, asked, encode, filled
from longgraft.eval.traces import lines_of

# A trace stands for a length it differs from by less than this factor.
NEAR = 1.5
# Which family of trace records (`eval/traces.py`) is which task.
FAMILIES = {"code_edit": "rewrite", "repo_completion": "new_file", "doc_qa": "quote", "translation_or_chat": "chat"}
# By size; the first that is long enough is rewritten.
FILES = ("sched", "shlex", "textwrap", "configparser", "argparse", "typing", "_pydecimal")
REPOSITORY = (
    "locks queues mixins futures timeouts taskgroups runners streams subprocess tasks events base_events".split()
)
CHATS = (
    "Explain to a gardener how compost heats up, and what to do when it stays cold. Use everyday words.",
    "My sister opens a small bakery. Which five mistakes do new bakers make with sourdough, and why? Be vivid.",
    "Tell a bedtime story for a child about a lighthouse keeper who is afraid of the dark.",
)


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a trace file that belongs to a task."""

    task: str
    name: str
    prompt: str


def build(task: str, context: int, tokenizer: Any, variant: int = 0, traces: Sequence[Record] = ()) -> Prompt:
    """Return a prompt of at most `context` tokens, from the nearest trace of that task or from Python's own text.

    Raises `GraftError` where the question alone is longer or the text too short. `suites` checks what is asked for.
    """
    if found := _from_traces(task, context, tokenizer, variant, traces):
        return found
    lines, ask = TASKS[task](context, variant)
    return Prompt(task, context, filled(task, context, lines, lambda part: encode(ask(part), tokenizer)), "python")


def read_records(paths: Iterable[str]) -> list[Record]:
    """Read the records of trace files that belong to one of the tasks; raises `GraftError` where there are none."""
    records = []
    for path in paths:
        for number, line in lines_of(path):
            try:
                values = json.loads(line)
                task = FAMILIES.get(values["family"])
                text = str(values["prompt"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise GraftError(f"trace file {path}, line {number}: expected family and prompt ({error})") from None
            if task and text:
                records.append(Record(task, str(values.get("id", f"{path}:{number}")), text))
    if not records:
        raise GraftError(f"the trace files hold no record of {', '.join(FAMILIES)}")
    return records


def _from_traces(task: str, context: int, tokenizer: Any, variant: int, traces: Sequence[Record]) -> Prompt | None:
    """Return the variant-th nearest trace in length that is near enough and not longer, if there is one."""
    found = []
    for record in traces:
        # Two cheap bounds first: tokens are between an eighth of the characters and their number.
        if record.task != task or not context / NEAR <= len(record.prompt) <= context * CHARACTERS_PER_TOKEN:
            continue
        ids = encode(asked(record.prompt), tokenizer)
        distance = abs(math.log(len(ids) / context))
        if len(ids) <= context and distance < math.log(NEAR):
            found.append((distance, record.name, ids))
    found.sort(key=lambda one: one[:2])
    return Prompt(task, context, found[variant % len(found)][2], found[variant % len(found)][1]) if found else None


def source_of(module: str) -> str:
    """Return a library module's source."""
    try:
        return inspect.getsource(importlib.import_module(module))
    except (OSError, TypeError, ImportError) as error:
        raise GraftError(f"the source of Python's module {module} is not here ({error}); give trace files") from None


def _rewrite(context: int, variant: int) -> tuple[list[str], Callable[[Sequence[str]], Messages]]:
    """One file, cut at a line; the edit renames the name it defines that it uses most, or else its commonest word."""
    fitting = [name for name in FILES if len(source_of(name)) > 5 * context] or [FILES[-1]]
    name = fitting[variant % len(fitting)]

    def ask(part: Sequence[str]) -> Messages:
        text = "\n".join(part)
        defined = re.findall(r"^ *(?:def|class) (\w{4,})", text, re.MULTILINE)
        uses = Counter(re.findall(r"\w+", text))
        old = max(sorted(set(defined or [w for w in uses if len(w) > 4])), key=lambda word: uses[word], default="main")
        return asked(
            f"Here is the file {name}.py:\n```python\n{text}\n```\nRename `{old}` to `{old}_renamed` everywhere "
            "and give the complete file back, without comments on it."
        )

    return source_of(name).splitlines(), ask


def _new_file(context: int, variant: int) -> tuple[list[str], Callable[[Sequence[str]], Messages]]:
    """Several files of one package, the last one cut; a file that is not among them is asked for."""
    start = variant % len(REPOSITORY)
    names = REPOSITORY[start:] + REPOSITORY[:start]
    lines = [line for name in names for line in _file(f"asyncio.{name}")]

    def ask(part: Sequence[str]) -> Messages:
        listing = "\n".join(part)
        return asked(
            f"These are files of one package:\n```python\n{listing}\n```\nWrite its new file `asyncio/turnstile.py` in "
            "that style: a class that lets at most a number of tasks through in a span of time, with docstrings."
        )

    return lines, ask


def _file(module: str) -> list[str]:
    return [f"# {module.replace('.', '/')}.py", *source_of(module).splitlines(), ""]


def reference() -> list[tuple[str, str]]:
    """Return Python's language reference as (topic, text), in the order of the topics' names."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise GraftError("this Python lacks pydoc_data, its language reference; give trace files") from None
    return sorted((str(name), str(text)) for name, text in topics.items())


def turned(variant: int) -> list[tuple[str, str]]:
    """Return the reference from another topic on, for each variant."""
    topics = reference()
    start = 7 * variant % len(topics)
    return topics[start:] + topics[:start]


def _quote(context: int, variant: int) -> tuple[list[str], Callable[[Sequence[str]], Messages]]:
    """A document of numbered sections; the answer quotes the middle ones."""
    lines = []
    for number, (topic, text) in enumerate(turned(variant), 1):
        lines += [f"## Section {number}: {topic}", *text.splitlines(), ""]

    def ask(part: Sequence[str]) -> Messages:
        shown = [line[3:] for line in part if line.startswith("## Section ")]
        middle = shown[len(shown) // 3 : len(shown) // 3 + 2] or ["the document"]
        return asked(
            "Document:\n"
            + "\n".join(part)
            + f"\n\nQuote, word for word, the first paragraphs of {' and of '.join(middle)}, "
            "and say after each quote in one sentence what it means."
        )

    return lines, ask


def _chat(context: int, variant: int) -> tuple[list[str], Callable[[Sequence[str]], Messages]]:
    """A long conversation about something else, then a question whose answer copies nothing of it."""
    lines = []
    for topic, text in turned(variant):
        lines += [f"{_TURN}{topic}", *text.splitlines()]

    def ask(part: Sequence[str]) -> Messages:
        messages: Messages = []
        for line in part:
            if line.startswith(_TURN):
                question = f"What does Python's language reference say under {line.removeprefix(_TURN)}?"
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "It says:"}]
            else:
                messages[-1]["content"] += f"\n{line}"
        question = ("Thank you. Now something else. " if messages else "") + CHATS[variant % len(CHATS)]
        return [*messages, *asked(question)]

    return lines, ask


_TURN = "\x00turn "
TASKS: dict[str, Callable[[int, int], tuple[list[str], Callable[[Sequence[str]], Messages]]]] = {
    "rewrite": _rewrite,
    "new_file": _new_file,
    "quote": _quote,
    "chat": _chat,
}
