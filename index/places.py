"""Texts whose earlier places can be looked up by the tokens before them: the plain twin of `csrc/places.hpp`.

A place is the number of tokens before it: tokens[place] is what came there. Knows no ranking and no copying.
The idea: the places after each run of n tokens, n = 8, 4, 2, 1, are kept in order, so the occurrences of a
context are a few short lists, read from the newest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from longgraft.index.reference import SENTINEL

VISITS = {8: 32, 4: 64, 2: 96, 1: 64}  # places read after as many tokens: more adds little on real text
MAX_MATCH = 32  # longer matches count as this long
ELSEWHERE = 1 << 30  # places from here on lie in the side text
MAX_TOKENS = 2**29  # of one text; as the automaton's
NOWHERE = -1

Found = dict[int, int]  # place -> tokens that match before it, in the order of finding


def match_length(tokens: Sequence[int], place: int, context: Sequence[int]) -> int:
    """Return how many tokens before `place` equal the last ones of `context`, up to MAX_MATCH."""
    most = min(place, len(context), MAX_MATCH)
    for n in range(most):
        if tokens[place - 1 - n] != context[-1 - n] or context[-1 - n] == SENTINEL:
            return n
    return most


class Text:
    """Tokens, and the places after each n of them in a row that hold no sentinel."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._run = 0  # tokens since the last sentinel

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Take in one token, or the sentinel, which nothing matches across."""
        self.tokens.append(token)
        self._run = 0 if token == SENTINEL else self._run + 1
        for n in VISITS:
            if n <= self._run:
                self._places.setdefault(tuple(self.tokens[-n:]), []).append(len(self))

    def newest_places(self, n: int, context: Sequence[int]) -> Iterator[int]:
        """Yield the newest places after the last `n` tokens of `context`, newest first."""
        if len(context) < n:
            return iter(())
        return islice(reversed(self._places.get(tuple(context[-n:]), ())), VISITS[n])

    def check_integrity(self) -> str:
        """Return "" or a sentence naming the first broken invariant."""
        for gram, places in self._places.items():
            if places != sorted(set(places)):
                return "the places after some tokens are not in order"
            if any(tuple(self.tokens[place - len(gram) : place]) != gram for place in places):
                return "a link leads to a place after other tokens"
        return ""


class Library:
    """The sequence's own text and, behind it, texts from elsewhere, under one numbering of places."""

    def __init__(self) -> None:
        self.own = Text()
        self.side = Text()

    def text_of(self, place: int) -> tuple[Text, int]:
        """Return the text that `place` lies in, and the place of its first token."""
        return (self.own, 0) if place < ELSEWHERE else (self.side, ELSEWHERE)

    def end_of(self, place: int) -> int:
        """Return the place after the last token of the text that `place` lies in."""
        text, base = self.text_of(place)
        return base + len(text)

    def at(self, place: int) -> int:
        """Return the token that came at `place`; the sentinel where there is none."""
        text, base = self.text_of(place)
        return text.tokens[place - base] if 0 <= place - base < len(text) else SENTINEL

    def slice(self, place: int, length: int) -> list[int]:
        """Return the tokens from `place` on, with a sentinel for each that there is not."""
        return [self.at(place + i) for i in range(length)]

    def match(self, place: int, context: Sequence[int]) -> int:
        """Return how many tokens before `place` equal the last ones of `context`."""
        text, base = self.text_of(place)
        return match_length(text.tokens, place - base, context)

    def add_occurrences(self, context: Sequence[int], found: Found) -> None:
        """Add the places after the longest, then shorter suffixes of the context, the own text's first."""
        for text, base in ((self.own, 0), (self.side, ELSEWHERE)):
            for n in VISITS:
                for place in text.newest_places(n, context):
                    if place < len(text) and base + place not in found:
                        found[base + place] = match_length(text.tokens, place, context)
