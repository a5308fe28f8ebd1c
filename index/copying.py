"""Copying that survives edits, the plain twin of `csrc/copying.hpp`: where the text is copied from, what is replaced.

Knows no probabilities. The ideas: after a token that was not copied, copying usually resumes in the same source
a few tokens on, so a *source pointer* keeps its place through an edit. And what was replaced once is replaced
again: when a copy rejoins its source, the pair (source tokens, written tokens) is kept and proposed wherever the
source tokens come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longgraft.index.places import ELSEWHERE, MAX_MATCH, NOWHERE, Found, Library
from longgraft.index.reference import SENTINEL

WINDOW = (32, 192)  # places before and after the pointer that are looked at ...
SECOND_WINDOW = (16, 96)  # ... and round the pointer that was left last
REJOIN_BACK, REJOIN_AHEAD = 64, 256  # how far off a copy may rejoin its source
REJOIN_MATCH = 2  # tokens it takes to rejoin there ...
ELSEWHERE_MATCH, ELSEWHERE_LEAD = 4, 6  # ... and anywhere else, or ahead of the match there
RESUME = 2  # places after the pointer that are tried while lost
FAR = 256  # a jump this far keeps the place that was left
MAX_SIDE = 8  # tokens of either side of a substitution
PAIRS_A_TOKEN, MAX_PAIRS = 4, 4096
SUCCESS_DECAY = 0.875


@dataclass(slots=True, eq=False)
class Pair:
    """A substitution: `source_len` tokens at `source` became `written_len` tokens at `written`."""

    number: int
    source: int
    source_len: int
    written: int
    written_len: int
    hits: int = 1


@dataclass(slots=True)
class Copy:
    """Where a copy stands: the next token is expected to be the one at place `source`."""

    source: int = NOWHERE
    run: int = 0  # tokens copied in a row
    lost: int = 0  # tokens since the copy was left, 0 while it goes on
    left: int = NOWHERE  # place where it was left, and ...
    since: int = 0  # ... the length of the own text then
    pair: Pair | None = None  # a substitution being written, ...
    offset: int = 0  # ... which of its tokens comes next, ...
    resume: int = NOWHERE  # ... and where in the source it ends
    second: int = NOWHERE  # the place left before the last far jump
    success: float = 0.5  # share of tokens copied lately

    def jump(self, start: int, to: int) -> None:
        """Leave `start` and go on at `to`."""
        if start != NOWHERE and abs(to - start) > FAR:
            self.second = start
        self.source = self.left = to
        self.lost = 0

    def succeed(self) -> None:
        """Count a token that was expected."""
        self.success = self.success * SUCCESS_DECAY + (1.0 - SUCCESS_DECAY)


def longest_of(found: Found) -> tuple[int, int]:
    """Return (place, length) of the longest occurrence, of equal ones the newest; (NOWHERE, 0) if none matches."""
    length, place = max(((length, place) for place, length in found.items()), default=(0, NOWHERE))
    return (place, length) if length > 0 else (NOWHERE, 0)


class Substitutions:
    """The pairs seen lately, by the first token of their source."""

    def __init__(self, texts: Library) -> None:
        self._texts = texts
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget all pairs."""
        self._by_token: dict[int, list[Pair]] = {}  # newest last
        self._count = 0

    def find(self, place: int, token: int | None = None) -> Pair | None:
        """Return the newest pair whose source comes at `place` and whose first written token is `token`, if given."""
        for pair in reversed(self._by_token.get(self._texts.at(place), ())):
            if token is not None and self._texts.at(pair.written) != token:
                continue
            if self._equal(pair.source, place, pair.source_len):
                return pair
        return None

    def add(self, source: int, source_len: int, written: int, written_len: int) -> None:
        """Keep a pair, without what both sides begin or end with; the same pair again counts as a hit."""
        at, texts = self._texts.at, self._texts
        if not (1 <= source_len <= MAX_SIDE and 1 <= written_len <= MAX_SIDE) or source < 0:
            return
        if SENTINEL in texts.slice(source, source_len) or SENTINEL in texts.slice(written, written_len):
            return
        while min(source_len, written_len) > 1 and at(source + source_len - 1) == at(written + written_len - 1):
            source_len, written_len = source_len - 1, written_len - 1
        while min(source_len, written_len) > 1 and at(source) == at(written):
            source, source_len, written, written_len = source + 1, source_len - 1, written + 1, written_len - 1
        if texts.slice(source, source_len) != texts.slice(written, written_len):
            self._keep(Pair(self._count, source, source_len, written, written_len))

    def _keep(self, new: Pair) -> None:
        if self._count >= MAX_PAIRS:
            self.clear()
            new.number = 0
        pairs = self._by_token.setdefault(self._texts.at(new.source), [])
        for i, pair in enumerate(pairs):
            if (pair.source_len, pair.written_len) != (new.source_len, new.written_len):
                continue
            if self._equal(pair.source, new.source, pair.source_len) and self._equal(
                pair.written, new.written, pair.written_len
            ):
                pair.hits += 1
                pairs.append(pairs.pop(i))
                return
        pairs.append(new)
        del pairs[:-PAIRS_A_TOKEN]
        self._count += 1

    def _equal(self, a: int, b: int, length: int) -> bool:
        return self._texts.slice(a, length) == self._texts.slice(b, length)


def add_nearby(texts: Library, copy: Copy, context: Sequence[int], found: Found) -> None:
    """Add the places round the pointers that follow the same last token, and those where a lost copy may resume."""
    if copy.source == NOWHERE:
        return

    def add(place: int) -> None:
        if place not in found:
            found[place] = texts.match(place, context)

    for center, (back, ahead) in ((copy.source, WINDOW), (copy.second, SECOND_WINDOW)):
        if center == NOWHERE:
            continue
        base = texts.text_of(center)[1]
        for place in range(max(base + 1, center - back), min(texts.end_of(center) - 1, center + ahead) + 1):
            if texts.at(place - 1) == context[-1]:
                add(place)
    last = min(texts.end_of(copy.source) - 1, copy.source + (RESUME if copy.lost else 0))
    for place in range(copy.source, last + 1):
        add(place)


def follow_copy(pairs: Substitutions, before: Copy, token: int, found: Found, step: Step) -> Copy:
    """Return where the copy stands after `token`; `found` holds the occurrences of the context that ends with it."""
    copy = replace(before)
    if _goes_on_writing(step.texts, copy, token):
        return copy
    if len(step.texts.own) - step.committed <= copy.source < ELSEWHERE:
        copy.source = NOWHERE  # a substitution led past the end of the text: the token followed is not its own source
    best = longest_of(found)
    if _is_copied(step, copy, token):
        copy.source, copy.run, copy.lost = copy.source + 1, copy.run + 1, 0
        copy.succeed()
        here = found.get(copy.source, 0)
        if best[1] >= 2 * here + 4 and here < MAX_MATCH:
            copy.jump(copy.source, best[0])
        return copy
    if _is_substituted(pairs, copy, token, step):
        return copy
    _lose(copy, step)
    near = _nearest_rejoin(copy, found)
    if near is not None and best[1] < near[1] + ELSEWHERE_LEAD:
        if step.committed and copy.lost:
            shared = min(near[1], step.length - copy.since)
            pairs.add(copy.left, near[0] - shared - copy.left, copy.since, step.length - shared - copy.since)
        copy.source = copy.left = near[0]
        copy.lost = 0
    elif best[1] >= ELSEWHERE_MATCH or (copy.source == NOWHERE and best[1] >= 2):
        copy.jump(copy.left, best[0])
    return copy


@dataclass(frozen=True, slots=True)
class Step:
    """What a followed token is part of: `length` tokens of own text with it, `committed` or only proposed."""

    texts: Library
    length: int
    committed: bool


def _goes_on_writing(texts: Library, copy: Copy, token: int) -> bool:
    """Take the next token of the substitution being written, if there is one and this is it."""
    pair = copy.pair
    if pair is None:
        return False
    if texts.at(pair.written + copy.offset) != token:
        copy.pair, copy.source = None, copy.resume
        return False
    copy.succeed()
    copy.offset += 1
    if copy.offset == pair.written_len:
        copy.source, copy.pair, copy.run = copy.resume, None, copy.run + 1
    return True


def _is_copied(step: Step, copy: Copy, token: int) -> bool:
    return copy.source != NOWHERE and step.texts.at(copy.source) == token


def _is_substituted(pairs: Substitutions, copy: Copy, token: int, step: Step) -> bool:
    """Take a token that begins what was written for the tokens at the pointer before."""
    if copy.source == NOWHERE or copy.lost or token == SENTINEL:
        return False
    pair = pairs.find(copy.source, token)
    if pair is None:
        return False
    pair.hits += step.committed
    copy.succeed()
    if pair.written_len == 1:
        copy.source, copy.run = copy.source + pair.source_len, copy.run + 1
    else:
        copy.pair, copy.offset, copy.resume = pair, 1, copy.source + pair.source_len
    return True


def _lose(copy: Copy, step: Step) -> None:
    if copy.source != NOWHERE:
        copy.lost += 1
        if copy.lost == 1:
            copy.left, copy.since = copy.source, step.length - 1
    copy.success *= SUCCESS_DECAY
    copy.run = 0


def _nearest_rejoin(copy: Copy, found: Found) -> tuple[int, int] | None:
    """Return (place, length) of the longest, then nearest occurrence round the place that was left."""
    if copy.left == NOWHERE:
        return None
    near = [
        (place, length)
        for place, length in found.items()
        if -REJOIN_BACK <= place - copy.left <= REJOIN_AHEAD and length >= REJOIN_MATCH
    ]

    def rank(occurrence: tuple[int, int]) -> tuple[int, int]:
        distance = occurrence[0] - copy.left
        return -occurrence[1], -2 * distance if distance < 0 else distance

    return min(near, key=rank, default=None)
