"""Tasks of the benchmark by name: its own kinds, and the suites of others. `specbench:FOLDER`, `needle`, `git:DIR` ...

A name is a kind, a part of it behind a slash where wanted, and where its data lie behind a colon; without that, a
small sample of our own. What data a task was made of stands in its label (`git@1a2b3c4/edit`), so that a folder of
results never mixes two. Knows tokenizers; no model and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from longgraft.config import GraftError
from longgraft.eval.fitting import Prompt, encode, most
from longgraft.eval.policy_tasks import TASKS, Record, build
from longgraft.eval.suite_files import Item, Parts, longbench, longspec, specbench
from longgraft.eval.suite_git import history
from longgraft.eval.suite_needles import NEEDLES, needle

# (context, tokenizer, seed) -> the prompt of that seed, or None where the task has no further one.
Task = Callable[[int, Any, int], Prompt | None]
# Where the data of a suite lie (None: our sample) -> a digest of them, and its parts.
KINDS: dict[str, Callable[[str | None], tuple[str, Parts]]] = {
    "specbench": specbench,
    "longbench": longbench,
    "longspec": longspec,
    "git": history,
}
FEWEST_TOKENS = 64
PIECE = 80
CUT = "\n[...]\n"


class Items:
    """A task made of items that are what they are: seed n is the n-th that fits into the context.

    An item whose background may be cut always fits: of its background, beginning and end stay. Others are taken
    longest first, so that a context is filled, if `longest_first`.
    """

    def __init__(self, name: str, items: Sequence[Item], longest_first: bool) -> None:
        self.name, self.items, self.longest_first = name, items, longest_first
        self._whole: list[tuple[Item, tuple[int, ...]]] = []

    def __call__(self, context: int, tokenizer: Any, seed: int) -> Prompt | None:
        """Return the prompt of a seed, None where fewer items fit."""
        if not self._whole:
            self._whole = [(item, encode(item.ask(item.background), tokenizer)) for item in self.items]
        fitting = [(item, ids) for item, ids in self._whole if len(ids) <= context or item.background]
        if self.longest_first:
            fitting.sort(key=lambda one: -len(one[1]))
        if seed >= len(fitting):
            return None
        item, ids = fitting[seed]
        if len(ids) > context:
            ids = self._cut(item, context, tokenizer)
        return Prompt(self.name, context, ids, item.name, item.answers)

    def _cut(self, item: Item, context: int, tokenizer: Any) -> tuple[int, ...]:
        """Return tokens of an item whose background lost its middle."""
        text = item.background
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]

        def part(count: int) -> tuple[int, ...]:
            head, tail = pieces[: (count + 1) // 2], pieces[len(pieces) - count // 2 :]
            return encode(item.ask("".join(head) + CUT + "".join(tail)), tokenizer)

        count, ids = most(len(pieces) - 1, context, part)
        if count < 0:
            raise GraftError(f"task {self.name}, {item.name}: its question alone is longer than {context} tokens")
        return ids


def open_tasks(specs: Sequence[str], traces: Sequence[Record] = ()) -> dict[str, Task]:
    """Return tasks by label, in the order asked for; raises `GraftError` for one that is unknown or has no data."""
    tasks: dict[str, Task] = {}
    for spec in specs:
        for label, task in _opened(spec, traces).items():
            if label in tasks:
                raise GraftError(f"task {label} is asked for twice")
            tasks[label] = task
    return tasks


def check_spec(spec: str) -> None:
    """Raise `GraftError` for a task whose kind is unknown; reads nothing."""
    kind, part, where = _split(spec)
    own = {*TASKS, *NEEDLES}
    if kind not in own and kind not in KINDS:
        raise GraftError(
            f"task {spec!r} is not known; expected some of {', '.join([*TASKS, *NEEDLES])}, or one of "
            f"{', '.join(KINDS)} with :FOLDER behind it where its data are not our sample"
        )
    if kind in own and (part or where):
        raise GraftError(f"task {spec!r}: {kind} has neither parts nor a folder")


def _split(spec: str) -> tuple[str, str, str | None]:
    head, colon, where = spec.partition(":")
    kind, _, part = head.partition("/")
    if colon and not where:
        raise GraftError(f"task {spec!r}: expected a folder or a hub id behind the colon")
    return kind, part, where or None


def _opened(spec: str, traces: Sequence[Record]) -> dict[str, Task]:
    check_spec(spec)
    kind, part, where = _split(spec)
    if kind in TASKS:
        return {kind: lambda context, tokenizer, seed: build(kind, context, tokenizer, seed, traces)}
    if kind in NEEDLES:
        return {kind: partial(needle, kind)}
    digest, parts = KINDS[kind](where)
    if part and part not in parts:
        raise GraftError(f"task {spec!r}: no part {part!r}; expected one of {', '.join(parts)}")
    name = f"{kind}@{digest}" if where else kind
    chosen = {part: parts[part]} if part else parts
    longest = kind in ("longspec", "git")
    return {f"{name}/{one}": Items(f"{name}/{one}", items, longest) for one, items in chosen.items()}


def prompt_of(task: Task, label: str, context: int, tokenizer: Any, seed: int) -> Prompt | None:
    """Return a task's prompt; raises `GraftError` for what no task can be built for."""
    if context < FEWEST_TOKENS:
        raise GraftError(f"task {label}: a context of {context} tokens; expected at least {FEWEST_TOKENS}")
    if tokenizer is None:
        raise GraftError("this model has no tokenizer: the benchmark's prompts are text")
    return task(context, tokenizer, seed)
