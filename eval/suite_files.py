"""Suites that lie in JSON lines: the layouts of Spec-Bench, LongBench and LongSpecBench. Owns `datasets`.

Knows layouts; neither tokenizers nor lengths. The wording of a question is ours where a layout brings none, so scores
are not those of a suite's own harness; speed is what is measured here. Of several turns the first is asked: a later
one needs the model's own answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.eval.fitting import Messages, asked
from longgraft.eval.traces import lines_of

SAMPLES = Path(__file__).resolve().parent / "data"
# Spec-Bench's eight kinds of two-turn chats, which its tables show as one.
MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())
# What is asked about a text, by the name LongBench gives to the dataset.
QUESTIONS = {
    "qmsum": "This was said in a meeting:\n\n{context}\n\nAnswer in one paragraph, from the transcript: {input}",
    "gov_report": "Here is a report:\n\n{context}\n\nSummarise it on one page, in the order of the report.",
    "multi_news": "Here are news of one event:\n\n{context}\n\nSummarise them on one page.",
    "lcc": "Write the line of code that comes next, and nothing else.\n\n{context}",
    "repobench-p": "These files belong to one repository:\n\n{context}\n\nWrite the line that comes next:\n\n{input}",
}
ANY_QUESTION = "Here is a text:\n\n{context}\n\nAnswer from it, briefly: {input}"
NO_QUESTION = "Here is a text:\n\n{context}\n\nSummarise it on one page."


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a suite. `ask(background)` makes its messages; of the background the middle may be left out.

    An empty background means that nothing may be. `answers`: texts that a right answer holds, where they are known.
    """

    name: str
    ask: Callable[[str], Messages]
    background: str = ""
    answers: tuple[str, ...] = ()


Parts = Mapping[str, list[Item]]


def specbench(where: str | None) -> tuple[str, dict[str, list[Item]]]:
    """Return the categories of `question.jsonl` (`category`, `turns`) as parts, and a digest of the data."""
    digest, rows = _rows(where or str(SAMPLES / "specbench"), "question.jsonl")
    parts: dict[str, list[Item]] = {}
    for name, row in rows:
        category = str(row.get("category", "all"))
        part = "mt_bench" if category in MT_BENCH else category
        parts.setdefault(part, []).append(_whole(name, _turn(name, row)))
    return digest, parts


def longspec(where: str | None) -> tuple[str, dict[str, list[Item]]]:
    """Return long prompts of Spec-Bench's layout, or with `prompt` in place of `turns`, as one part for all lengths."""
    digest, rows = _rows(where or str(SAMPLES / "longspec"), "*.jsonl")
    return digest, {"all": [_whole(name, _turn(name, row)) for name, row in rows]}


def longbench(where: str | None) -> tuple[str, dict[str, list[Item]]]:
    """Return the datasets of a LongBench folder (`context`, `input`, `answers`, one file a dataset) as parts."""
    digest, rows = _rows(where or str(SAMPLES / "longbench"), "*.jsonl")
    parts: dict[str, list[Item]] = {}
    for name, row in rows:
        dataset = str(row.get("dataset") or name.rpartition(":")[0] or "all").removesuffix("_e")
        question = QUESTIONS.get(dataset, ANY_QUESTION if row.get("input") else NO_QUESTION)
        parts.setdefault(dataset, []).append(_longbench(name, row, question))
    return digest, parts


def _longbench(name: str, row: dict[str, Any], question: str) -> Item:
    context, asks = _text(name, row, "context"), str(row.get("input") or "")

    def ask(background: str) -> Messages:
        return asked(question.format(context=background, input=asks))

    return Item(name, ask, context)


def _whole(name: str, text: str) -> Item:
    return Item(name, lambda _: asked(text))


def _turn(name: str, row: dict[str, Any]) -> str:
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return turns[0]
    return _text(name, row, "prompt")


def _text(name: str, row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise GraftError(f"{name}: expected a text under {key!r}; the line has {', '.join(map(str, row)) or 'nothing'}")
    return value


def _rows(where: str, pattern: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return a digest and the named rows of a folder, a file, or a dataset of the hub; raises `GraftError`."""
    path = Path(where).expanduser()
    if path.is_file():
        found = list(_lines([path]))
    elif path.is_dir():
        found = list(_lines(sorted(path.glob(pattern)) or sorted(path.glob("*.jsonl"))))
    else:
        found = list(_hub(where))
    if not found:
        raise GraftError(f"{where}: there are no lines; expected {pattern}")
    text = json.dumps(found, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:7], found


def _lines(paths: Iterable[Path]) -> Iterable[tuple[str, dict[str, Any]]]:
    for path in paths:
        for number, line in lines_of(str(path), "suite file"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise GraftError(f"suite file {path}, line {number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise GraftError(f"suite file {path}, line {number}: expected a JSON object")
            yield f"{path.stem}:{row.get('question_id', row.get('_id', number))}", row


def _hub(where: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the rows of OWNER/NAME or OWNER/NAME/CONFIG, the split `test` or else the first one."""
    owner, _, rest = where.partition("/")
    name, _, config = rest.partition("/")
    if not (owner and name) or where.startswith((".", "/", "~")):
        raise GraftError(f"{where}: no such folder; expected a folder, a file, or OWNER/NAME[/CONFIG] on the hub")
    try:
        from datasets import load_dataset
    except ImportError:
        raise GraftError(f"{where}: reading from the hub needs datasets: pip install 'longgraft[eval]'") from None
    try:
        splits = load_dataset(f"{owner}/{name}", config or None)
    except Exception as error:  # what it raises depends on what is missing
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GraftError(f"{where}: neither a folder nor a dataset that could be loaded ({reason})") from None
    rows = splits["test"] if "test" in splits else next(iter(splits.values()))
    for number, row in enumerate(rows, 1):
        yield f"{config or name}:{row.get('question_id', row.get('_id', number))}", dict(row)
