"""The documents of a question: read with their pages and lines, written into a prompt, cut to what a model can take.

Knows files and a way to count tokens; no engine. The units of a document are what it may be cut between: pages of a
PDF, lines of anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from longgraft.config import GraftError
from longgraft.index.corpus_text import EMPTY, NEEDS, PDF, Skipped, read_pages
from longgraft.tools.lines import lines_of

STDIN = "-"
MOST_CHARACTERS = 32  # of a token, on average over a text; what is longer needs no counting
WHY = {EMPTY: "no text was found in it (a scanned PDF has none)"}


@dataclass(frozen=True, slots=True)
class Document:
    """A text by pages. Only a PDF has more than one, and only its pages have numbers (`is_paged`), from 1 on."""

    name: str
    pages: tuple[str, ...]
    is_paged: bool = False

    @property
    def units(self) -> tuple[str, ...]:
        """The text in the pieces it may be cut between."""
        if self.is_paged:
            return tuple(f"[page {number}]\n{page}\n" for number, page in enumerate(self.pages, 1))
        return tuple(lines_of("".join(self.pages)))

    @property
    def text(self) -> str:
        """How it stands in a prompt."""
        return f"Document: {self.name}\n\n{''.join(self.units)}\n\n"

    def first(self, units: int) -> Document:
        """Return its first `units` units."""
        if self.is_paged:
            return Document(self.name, self.pages[:units], True)
        return Document(self.name, ("".join(self.units[:units]),))

    def named(self, units: int) -> str:
        """Say how much the first `units` units are."""
        kind = "page" if self.is_paged else "line"
        return f"{self.name} up to {kind} {units} of {len(self.units)}"


def read_documents(names: Sequence[str]) -> list[Document]:
    """Return the documents in some files, `-` being stdin; a `GraftError` names one that cannot be read."""
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise GraftError(f"{twice[0]} is given twice: name each document once")
    return [_read(name) for name in names]


def _read(name: str) -> Document:
    path = Path("stdin.txt" if name == STDIN else name)
    try:
        data = sys.stdin.buffer.read() if name == STDIN else path.read_bytes()
        pages = read_pages(path, data)
    except IsADirectoryError:
        raise GraftError(f"{name} is a folder: name the files in it") from None
    except OSError as error:
        raise GraftError(f"{name}: cannot be read ({error.strerror or error})") from error
    except Skipped as reason:
        why = str(reason)
        hint = ": pip install 'longgraft[corpora]'" if why.startswith(NEEDS) else ""
        raise GraftError(f"{name}: {WHY.get(why, why)}{hint}") from None
    return Document(path.name if name == STDIN else name, tuple(pages), path.suffix.lower() in PDF)


def fitting(documents: Sequence[Document], room: int, count: Callable[[str], int]) -> tuple[list[Document], str]:
    """Return the documents cut to `room` tokens by `count`, from the first on, and in words what is left.

    One of which not even the first unit fits is left out, and so are all behind it.
    """
    kept: list[Document] = []
    names: list[str] = []
    for document in documents:
        size = count(document.text)
        if size > room:
            if units := _units_within(document, room, count):
                kept.append(document.first(units))
                names.append(document.named(units))
            break
        kept.append(document)
        names.append(document.name)
        room -= size
    return kept, " and ".join(names) or "nothing"


def _units_within(document: Document, room: int, count: Callable[[str], int]) -> int:
    """Return how many first units fit, by halving: a long document is counted a dozen times, not once a line."""
    sizes = accumulate(map(len, document.units))
    low, high = 0, sum(1 for size in sizes if size <= MOST_CHARACTERS * room)
    while low < high:
        middle = (low + high + 1) // 2
        if count(document.first(middle).text) <= room:
            low = middle
        else:
            high = middle - 1
    return low
