"""Token texts for index benchmarks: code, prose, chat, and texts that are hard for any suffix structure.

Knows no index. Real text comes from Python's standard library (its sources; its docstrings as prose; questions and
answers made of the docstrings as chat) and from trace files where given. Without a tokenizer, tokens are UTF-8 bytes.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.traces import Encode, lines_of

IntArray = npt.NDArray[np.int32]
FAMILIES = {
    "code": ("code_edit", "repo_completion", "structured"),
    "prose": ("doc_qa", "doc_revision", "changelog"),
    "chat": ("agent", "translation_or_chat"),
}
REAL = tuple(FAMILIES)
HARD = ("one token", "periodic", "fibonacci")


def bytes_of(text: str) -> Sequence[int]:
    """Return the UTF-8 bytes of a text: the tokenizer where none is named."""
    return text.encode("utf-8", "replace")


@cache
def stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's own Python sources, in a fixed order."""
    root = Path(json.__file__).parent.parent
    other = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and path.name not in other]
    inside = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    return (*sorted(root.glob("*.py")), *(path for path in inside if not other & set(path.relative_to(root).parts)))


def library_code() -> Iterator[str]:
    """Yield source files."""
    for path in stdlib_files():
        yield path.read_text("utf-8", "replace")


def _docstrings() -> Iterator[tuple[str, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in stdlib_files():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the sources' own
                tree = ast.parse(path.read_text("utf-8", "replace"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                yield getattr(node, "name", path.stem), text


def library_prose() -> Iterator[str]:
    """Yield the language reference that `help()` shows, then docstrings."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name] + "\n"
    for _, text in _docstrings():
        yield text + "\n\n"


def library_chat() -> Iterator[str]:
    """Yield one question and its answer at a time."""
    for name, text in _docstrings():
        yield f"<|user|>\nWhat does `{name}` do?\n<|assistant|>\n{text}\n"


LIBRARY: dict[str, Callable[[], Iterator[str]]] = {"code": library_code, "prose": library_prose, "chat": library_chat}


def trace_texts(paths: Iterable[str], kind: str) -> Iterator[str]:
    """Yield prompts and outputs of a kind from trace files; `GraftError` for what is no trace."""
    for path in paths:
        for number, line in lines_of(path):
            try:
                record = json.loads(line)
                text = record["prompt"] + record["output"] if record.get("family") in FAMILIES[kind] else ""
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise GraftError(f"trace file {path}, line {number}: not a trace ({error!r})") from None
            if text:
                yield text


def fibonacci(size: int) -> IntArray:
    """Return the first `size` letters of the Fibonacci word over {0, 1}."""
    short, long = np.array([0], np.int32), np.array([0, 1], np.int32)
    while len(long) < size:
        short, long = long, np.concatenate([long, short])
    return long[:size]


def hard_text(kind: str, size: int) -> IntArray:
    """Return `size` tokens of an adversarial text."""
    if kind == "one token":
        return np.zeros(size, np.int32)
    if kind == "periodic":
        return np.resize(np.array([3, 0, 1, 0, 2, 0, 0], np.int32), size)
    if kind == "fibonacci":
        return fibonacci(size)
    raise GraftError(f"text {kind!r} is unknown: expected one of {', '.join((*REAL, *HARD))}")


def real_text(kind: str, size: int, encode: Encode, paths: Sequence[str] = ()) -> IntArray:
    """Return at most `size` tokens of real text: of the traces first, then of the standard library."""
    parts: list[IntArray] = []
    length = 0
    for source in (trace_texts(paths, kind), LIBRARY[kind]()):
        for text in source:
            if length >= size:
                break
            ids = encode(text)
            parts.append(np.frombuffer(ids, np.uint8).astype(np.int32) if isinstance(ids, bytes) else _array(ids))
            length += len(parts[-1])
    return np.concatenate(parts)[:size] if parts else np.zeros(0, np.int32)


def _array(ids: Sequence[int]) -> IntArray:
    return np.asarray(ids, np.int32)


def text_of(kind: str, size: int, encode: Encode, paths: Sequence[str] = ()) -> IntArray:
    """Return up to `size` tokens of a kind of text; fewer only where there is no more of it."""
    if kind in REAL:
        return real_text(kind, size, encode, paths)
    return hard_text(kind, size)
