"""Writes an answer as it comes, quotations marked with where they stand.

Knows tokens' text and a finder of quotations. A mark at the beginning of a quotation cannot be added later, so a run
that may become one is held back until it is one or ends: at most a few words.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TextIO

from longgraft.render import colours, paint_for
from longgraft.stream import TextStream
from longgraft.tools.quotes import LEXEME, Quotable, Quote, QuoteFinder


@dataclass(frozen=True, slots=True)
class Marks:
    """What is written at both ends of a quotation and round its label."""

    begin: str
    end: str
    label: str


BRACKETS = Marks("⟦", "⟧", " [{}]")
COLOURS = Marks("\x1b[32m", "\x1b[0m", " \x1b[2m[{}]\x1b[0m")
NO_MARKS = Marks("", "", "")


def marks_for(out: TextIO) -> Marks:
    """Return colours where `out` shows them, else brackets."""
    return COLOURS if paint_for(out) is colours else BRACKETS


class MarkedScreen:
    """Writes one answer; `quotes` are the quotations found so far."""

    def __init__(
        self, out: TextIO, tokenizer: Any, prompt_ids: Seq[int], stop: Seq[str], *, source: Quotable, marks: Marks
    ) -> None:
        self.quotes: list[Quote] = []
        self._out, self._marks = out, marks
        self._stream = TextStream(tokenizer, prompt_ids, stop)
        self._finder = QuoteFinder(source)
        self._text = ""
        self._num_read = self._num_shown = 0  # characters given to the finder, and written
        self._is_open = False

    def push(self, token_ids: Seq[int], sources: Seq[int]) -> None:
        """Take newly committed tokens and write what is settled."""
        self._take(self._stream.push(token_ids), is_end=False)
        self._show(self._num_settled())
        self._out.flush()

    def finish(self) -> None:
        """Write the rest, close an open quotation and end the line."""
        self._take(self._stream.finish(), is_end=True)
        if quote := self._finder.finish():
            self._close(quote)
        self._show(len(self._text))
        self._out.write("" if not self._text or self._text.endswith("\n") else "\n")
        self._out.flush()

    def _take(self, piece: str, is_end: bool) -> None:
        self._text += piece
        for match in LEXEME.finditer(self._text, self._num_read):
            if match.end() == len(self._text) and not is_end:
                break  # the word may go on
            self._num_read = match.end()
            if quote := self._finder.push(match[0], match.start()):
                self._close(quote)
            if self._finder.is_quote and not self._is_open:
                self._show(self._finder.begin or 0)
                self._out.write(self._marks.begin)
                self._is_open = True

    def _num_settled(self) -> int:
        """Return how many characters can be written whatever follows."""
        begin = self._finder.begin
        return self._num_read if self._is_open or begin is None else begin

    def _close(self, quote: Quote) -> None:
        self._show(quote.end)
        self._out.write(self._marks.end + self._marks.label.format(quote.label))
        self.quotes.append(quote)
        self._is_open = False

    def _show(self, end: int) -> None:
        self._out.write(self._text[self._num_shown : end])
        self._num_shown = max(self._num_shown, end)
