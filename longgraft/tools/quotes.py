"""Finds what an answer quotes word for word, while it is being written, and where that stands in the documents.

Knows texts alone, no tokens: a quotation is one whatever proposed its tokens, in plain decoding too, so the marks of an
answer are a function of its text. Words and signs are compared, blanks are not: lines of a PDF break where those of an
answer do not.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longgraft.tools.documents import Document

Ints = npt.NDArray[np.int64]
LEXEME = re.compile(r"\w+|[^\w\s]")
# Lines of a PDF may end within words.
PAGED_LEXEME = re.compile(r"\w+(?:-\n[^\W\d_]\w*)*|[^\w\s]")
# Shorter matches are turns of phrase: so many words and signs, and so many words among them.
SHORTEST, FEWEST_WORDS = 8, 5
SIGNS = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "–": "-", "—": "-"})  # noqa: RUF001
BETWEEN, ELSEWHERE = -1, -2  # what stands between two documents; what stands in none


@dataclass(frozen=True, slots=True)
class Quote:
    """Characters `begin` .. `end` - 1 of an answer stand in a document, there on these pages (of a PDF) or lines.

    `others`: how many more places hold the same.
    """

    begin: int
    end: int
    document: str
    pages: tuple[int, int] | None
    lines: tuple[int, int] | None
    others: int

    @property
    def label(self) -> str:
        """Where it stands, in words."""
        first, last = self.pages or self.lines or (0, 0)
        span = f"{first}" if first == last else f"{first}-{last}"
        place = f"{self.document} p. {span}" if self.pages else f"{self.document}:{span}"
        return f"{place} and {self.others} more" if self.others else place


def plain(lexeme: str) -> str:
    """Return a word or sign as it is compared: ligatures, typographic signs and words broken by a line end undone."""
    return unicodedata.normalize("NFKC", lexeme.replace("-\n", "")).translate(SIGNS)


class Quotable:
    """The words and signs of documents as one row of numbers, with where each stands."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = tuple(documents)
        self._numbers: dict[str, int] = {}
        codes = list[int]()
        self._places: list[tuple[int, int, int]] = []  # document, page, line of each lexeme
        for owner, document in enumerate(self.documents):
            for page, text in enumerate(document.pages, 1):
                found = list((PAGED_LEXEME if document.is_paged else LEXEME).finditer(text))
                breaks = [match.start() for match in re.finditer("\n", text)]
                lines = 1 + np.searchsorted(breaks, [one.start() for one in found])
                codes += [self._numbers.setdefault(plain(one[0]), len(self._numbers)) for one in found]
                self._places += [(owner, page, int(line)) for line in lines]
            codes.append(BETWEEN)
            self._places.append((owner, 0, 0))
        self.codes = np.asarray(codes, np.int64)

    def number(self, lexeme: str) -> int:
        """Return a lexeme's number, ELSEWHERE if no document has it."""
        return self._numbers.get(plain(lexeme), ELSEWHERE)

    def ends(self, numbers: Sequence[int]) -> Ints:
        """Return all places behind an occurrence of these lexemes, in order."""
        places = np.flatnonzero(self.codes == numbers[0]) + 1
        for number in numbers[1:]:
            places = self.longer(places, number)
        return places

    def longer(self, ends: Ints, number: int) -> Ints:
        """Return the ends of those occurrences that this lexeme follows."""
        # Nothing ends behind the last document's mark, so an end is always a place.
        return ends[self.codes[ends] == number] + 1

    def quote(self, begin: int, end: int, ends: Ints, size: int) -> Quote:
        """Return characters `begin` .. `end` - 1 as a quotation of the first of `ends`, where `size` lexemes end."""
        (owner, page, line), (_, last_page, last_line) = (self._places[int(ends[0]) - i] for i in (size, 1))
        document = self.documents[owner]
        pages, lines = ((page, last_page), None) if document.is_paged else (None, (line, last_line))
        return Quote(begin, end, document.name, pages, lines, len(ends) - 1)


class QuoteFinder:
    """Follows an answer lexeme by lexeme. The newest run is the longest end of it that stands in a document."""

    def __init__(self, source: Quotable) -> None:
        self._source = source
        self._run: list[tuple[int, int, str]] = []  # number, first character, lexeme
        self._ends: Ints = np.zeros(0, np.int64)

    @property
    def begin(self) -> int | None:
        """Where the newest run begins in the answer; None without one."""
        return self._run[0][1] if self._run else None

    @property
    def is_quote(self) -> bool:
        """True once the newest run is long enough."""
        return len(self._run) >= SHORTEST and sum(lexeme[0].isalnum() for *_, lexeme in self._run) >= FEWEST_WORDS

    def push(self, lexeme: str, begin: int) -> Quote | None:
        """Take the next lexeme, which begins at this character; return the quotation that it ended, if any."""
        new = self._source.number(lexeme), begin, lexeme
        if self._run and len(longer := self._source.longer(self._ends, new[0])):
            self._run.append(new)
            self._ends = longer
            return None
        ended = self.finish()
        # Nothing of a quotation belongs to the next one.
        self._run = [new] if ended else [*self._run, new]
        while self._run and not len(self._find()):
            del self._run[0]
        return ended

    def _find(self) -> Ints:
        self._ends = self._source.ends([number for number, *_ in self._run])
        return self._ends

    def finish(self) -> Quote | None:
        """Return the quotation that is open, if any."""
        if not self.is_quote:
            return None
        (_, begin, _), (_, last, lexeme) = self._run[0], self._run[-1]
        return self._source.quote(begin, last + len(lexeme), self._ends, len(self._run))
