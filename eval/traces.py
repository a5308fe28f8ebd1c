"""Known outputs to replay: (prompt, output) pairs from JSON-lines files, as token ids.

Knows no drafter. A trace file is UTF-8 with one JSON object a line: `prompt`, `output` (text), and, where given,
`family` (what figures are grouped by) and `source` (owner/repository@...: what cross-validation keeps together).
Prompts are never cut; of an output the first 1,500 tokens count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.wording import wording_of

MAX_OUTPUT = 1500
POOLED = "pooled"  # the row over all families; no family may be called so
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Trace:
    """One known output: `token_ids [n]`, of which the first `prompt_len` are the prompt."""

    family: str
    group: str
    token_ids: npt.NDArray[np.int32]
    prompt_len: int


def open_tokenizer(name: str) -> Encode:
    """Return a function from text to token ids, without special tokens; `GraftError` if there is no such tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # what it raises depends on what is missing
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GraftError(f"tokenizer {name}: expected a folder or a hub id that holds one ({reason})") from None

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return encode


def kinds_of(name: str, vocab_size: int) -> npt.NDArray[np.uint8] | None:
    """Return the kind of every token's text of a tokenizer that could be opened, [vocab_size]."""
    from transformers import AutoTokenizer

    found = wording_of(AutoTokenizer.from_pretrained(name), vocab_size)
    return None if found is None else found.kinds


def lines_of(path: str, what: str = "trace file") -> Iterator[tuple[int, str]]:
    """Number the lines of a file (`what` says of what kind) that are not blank; `GraftError` for what is no UTF-8 file.

    Only a line feed ends a line: text may hold U+2028 and its like.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise GraftError(f"{what} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise GraftError(f"{what} {path}: not UTF-8 from byte {error.start} on") from None
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _text(record: Any, key: str) -> str:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if not isinstance(record.get(key), str):
        raise ValueError(f"no text under {key!r}")
    text: str = record[key]
    text.encode("utf-8")  # half a surrogate pair is no text
    return text


def _trace(line: str, encode: Encode) -> Trace | None:
    """Read one line; None if its output is empty. Raises `ValueError` for anything that is not a trace."""
    record = json.loads(line)
    prompt, output = _text(record, "prompt"), _text(record, "output")
    family = str(record.get("family", "all"))
    if family == POOLED:
        raise ValueError(f"family {POOLED!r} is kept for the row over all families")
    group = str(record.get("source", record.get("id", ""))).split("@")[0]
    head, tail = encode(prompt), encode(output)[:MAX_OUTPUT]
    if not len(tail):
        return None
    return Trace(family, group, np.array([*head, *tail], np.int32), len(head))


def read_traces(paths: Iterable[str], tokenizer: str | Encode) -> list[Trace]:
    """Read and tokenise trace files; raises `GraftError` for what cannot be read.

    Records with an empty output are left out. `tokenizer`: folder, hub id, or a function from text to ids.
    """
    lines = [(path, list(lines_of(path))) for path in paths]
    if not any(numbered for _, numbered in lines):
        raise GraftError("no traces: the files are empty")
    encode = open_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    traces = []
    for path, numbered in lines:
        for number, line in numbered:
            try:
                trace = _trace(line, encode)
            except (ValueError, RecursionError) as error:
                raise GraftError(f"trace file {path}, line {number}: not a trace ({error})") from None
            if trace is not None:
                traces.append(trace)
    if not traces:
        raise GraftError("no traces: every output is empty")
    return traces
