"""Text as it becomes final, while tokens arrive in blocks.

Knows a tokenizer and stop strings, no engine and no model. Text is given out only when nothing that may
follow can change it: no split character, no beginning of a stop string. All pieces together are the whole
text, cut before the stop string.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from longgraft.stop import StopScan, TextDecoder


class TextStream:
    """Turns the output tokens of one generation into text. The text continues `prompt_ids`, see `TextDecoder`."""

    def __init__(self, tokenizer: Any, prompt_ids: Seq[int] = (), stop: Seq[str] = ()) -> None:
        self._stop = tuple(stop)
        self._scan = StopScan(TextDecoder(tokenizer, prompt_ids), self._stop)
        self._held = ""
        self._num_given = 0
        self.is_finished = False

    def push(self, token_ids: Seq[int]) -> str:
        """Take the next tokens and return the text that is now final; empty once a stop string was complete."""
        if self.is_finished or not token_ids:
            return ""
        new, _ = self._scan.push(token_ids)
        self._held += new
        if self._scan.text_end is not None:
            self.is_finished = True
            return self._give(self._scan.text_end - self._num_given)
        return self._give(len(self._held) - self._num_withheld())

    def finish(self) -> str:
        """Return the rest of the text when no more tokens come."""
        if self.is_finished:
            return ""
        self.is_finished = True
        self._held += self._scan.finish()
        return self._give(len(self._held))

    def _give(self, size: int) -> str:
        given, self._held = self._held[:size], self._held[size:]
        self._num_given += size
        return given

    def _num_withheld(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = min(max((len(s) for s in self._stop), default=1) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._begins_stop(self._held[-n:])), 0)

    def _begins_stop(self, text: str) -> bool:
        return any(s.startswith(text) for s in self._stop)
