"""Where tokens were copied from, in words: "the prompt, line 12", with the line itself where its text is known.

Knows outputs and a tokenizer; no HTML. Places are few and tokens many, so each place is written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from longgraft.config import Output
from longgraft.references import HISTORY, PREDICTION
from longgraft.report.words import seen, whole

CONTEXT = 0  # the document that is the prompt and the answer themselves
LONGEST = 160  # characters of a line that are shown
CALLED = {PREDICTION: "the prediction", HISTORY: "an earlier answer"}


@dataclass(frozen=True)
class Places:
    """Names the origins of one output's tokens.

    `texts`: what is known of the documents, by name. `notes`: by token, what to say instead, where whoever asked knows
    better (a page of a document that stood in the prompt).
    """

    output: Output
    tokenizer: Any
    prompt_ids: Seq[int]
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[int, str] = field(default_factory=dict)

    def label(self, i: int) -> tuple[str, str]:
        """Return where token i was copied from and the line there; two empty strings: from nowhere."""
        name, line = self._label(i)
        return (seen(self.notes[i]), line) if i in self.notes else (name, line)

    def _label(self, i: int) -> tuple[str, str]:
        document, offset = self.output.origins[i]
        if offset < 0 or not 0 <= document < len(self.output.documents):
            return "", ""
        line = self.output.lines[i] if i < len(self.output.lines) else 0
        if document == CONTEXT:
            return self._in_context(offset, line)
        name = self.output.documents[document]
        excerpt = _line(self._lines.get(name, ()), line)
        return seen(CALLED.get(name, name)) + (f", line {line}" if line else ""), excerpt

    def _in_context(self, offset: int, line: int) -> tuple[str, str]:
        excerpt = _line(self._context, line)
        if offset < len(self.prompt_ids):
            return "the prompt" + (f", line {line}" if line else ""), excerpt
        line -= self._prompt_lines
        return "this answer" + (f", line {line}" if line > 0 else ""), excerpt

    @cached_property
    def _context(self) -> list[str]:
        return whole(self.tokenizer, [*self.prompt_ids, *self.output.token_ids]).split("\n")

    @cached_property
    def _prompt_lines(self) -> int:
        """Lines of the prompt before the one that the answer begins on."""
        return whole(self.tokenizer, self.prompt_ids).count("\n")

    @cached_property
    def _lines(self) -> dict[str, list[str]]:
        return {name: text.split("\n") for name, text in self.texts.items()}


def _line(lines: Seq[str], number: int) -> str:
    """Return line `number`, from 1 on, cut to what fits; "" if it is not there."""
    if not 0 < number <= len(lines):
        return ""
    line = lines[number - 1].strip()
    return seen(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…")
