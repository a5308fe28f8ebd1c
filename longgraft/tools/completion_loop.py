"""Completes place after place with one loaded model: an editor writes a JSON object a line and reads one back.

Knows `completing` and the watcher of the repository's corpus; no options. The one idea: **nothing that is asked ends
the loop**: what cannot be answered is a line that says why. Meanwhile the corpus follows the files.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from longgraft.config import GraftError, SamplingParams
from longgraft.engine import Engine
from longgraft.render import report
from longgraft.tools.completing import Budget, cursor_at, references_for, request_for

# What an object may hold besides `id`, which comes back as it is.
FIELDS: dict[str, type] = {
    "file": str,
    "line": int,
    "column": int,
    "text": str,
    "max_new_tokens": int,
    "single_line": bool,
}
NEEDED = ("file", "line")


def completions(
    lines: Iterable[bytes], engine: Engine, root: Path, corpus: Path | None, params: SamplingParams, budget: Budget
) -> Iterator[dict[str, Any]]:
    """Yield what `--json` prints for each line's place, or its `error`; empty lines are passed over.

    `max_new_tokens` and `single_line` of an object stand for those of `params`.
    """
    for line in lines:
        if line.strip():
            name: dict[str, Any] = {}
            try:
                asked = _object(line)
                if "id" in asked:
                    name = {"id": asked.pop("id")}
                yield name | _completed(_checked(asked), engine, root, corpus, params, budget)
            except GraftError as error:
                yield name | {"error": " ".join(str(error).split())}


def _completed(
    asked: dict[str, Any], engine: Engine, root: Path, corpus: Path | None, params: SamplingParams, budget: Budget
) -> dict[str, Any]:
    params = replace(params, max_new_tokens=asked.get("max_new_tokens", params.max_new_tokens))
    if "single_line" in asked:
        params = replace(params, stop=("\n",) if asked["single_line"] else ())
    cursor = cursor_at(root, asked["file"], asked["line"], asked.get("column"), asked.get("text"))
    request = request_for(engine, cursor, params, budget)
    output = engine.generate(request.prompt_ids, request.params, references=references_for(corpus))
    return report(output) | {"related": list(request.related), "note": request.note}


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise GraftError(f"this line is no JSON ({error}): expected an object with {', '.join(NEEDED)}") from None
    if not isinstance(found, dict):
        raise GraftError(f"this line is a {type(found).__name__}: expected an object with {', '.join(NEEDED)}")
    return found


def _checked(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that say something (null says nothing)."""
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        if name not in FIELDS:
            raise GraftError(f"{name} is not known: expected some of {', '.join((*FIELDS, 'id'))}")
        if type(value) is not FIELDS[name]:
            raise GraftError(f"{name} is {value!r}: expected a value of type {FIELDS[name].__name__}")
    for name in NEEDED:
        if name not in asked:
            raise GraftError(f"{name} is missing: expected {' and '.join(NEEDED)}")
    return asked


@contextmanager
def followed(corpus: Path | None, tokenizer: Any, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep a corpus up to date while its files change; where that cannot be, `tell` why and go on."""
    if corpus is None:
        yield
        return
    from longgraft.index.corpus_watch import watch_corpus

    stop = threading.Event()
    own = copy.deepcopy(tokenizer)  # a fast tokenizer serves one thread at a time

    def follow() -> None:
        try:
            watch_corpus(
                corpus, own, lambda found: tell(str(found)) if isinstance(found, GraftError) else None, stop=stop
            )
        except GraftError as error:
            tell(f"the repository's corpus stays as it is: {error}")

    thread = threading.Thread(target=follow, name="longgraft-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
