"""Lists what may come next after one context, with each option's table entries: the plain twin of `csrc/listing.hpp`.

Knows no weights. The idea: sources add to one list in a fixed order (occurrences, substitutions, hints, the successor
row, recent tokens), each token once; only then is each option described by everything that is known of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longgraft.index.copying import Copy, Substitutions, longest_of
from longgraft.index.features import (
    AGE_EDGES,
    BASES,
    COARSE_EDGES,
    COSINE_EDGES,
    COUNT_EDGES,
    HINT_EDGES,
    HINT_MATCH,
    HINTS_ADDED,
    LENGTH_EDGES,
    LEVELS,
    MAX_GROUPS,
    MAX_HINTED,
    MAX_RECENTS,
    MAX_ROW,
    NUM_CLASSES,
    RECENT_EDGES,
    RECENTS_SCAN,
    RUN_EDGES,
    SUCCESS_EDGES,
    Listing,
    Option,
    Recent,
    distance_bin,
    share_cell,
    source_cell,
)
from longgraft.index.places import ELSEWHERE, NOWHERE, Found, Library
from longgraft.index.reference import SENTINEL


@dataclass(frozen=True, slots=True)
class Context:
    """What a look-up knows: the last tokens, what was found, and where the copy stands."""

    tokens: Sequence[int]  # at least MAX_MATCH of them if there are as many, at least one
    found: Found
    copy: Copy
    row: Sequence[int]  # successor row of the last token
    is_root: bool  # hints hold for the root alone


class Lister:
    """Lists what may come next after one context and fills in each option's table entries."""

    def __init__(self, texts: Library, pairs: Substitutions, classes: npt.NDArray[np.uint8] | None) -> None:
        self.texts = texts
        self.pairs = pairs
        self.prompt_len = ELSEWHERE  # places before it are the prompt's
        self.hints: list[tuple[int, float]] = []  # (place, cosine), best first, for the text as it is now
        self.recents: list[Recent] = []
        self._classes = classes

    def class_of(self, token: int) -> int:
        """Return the kind of a token's text, 0 if unknown."""
        if self._classes is None or not 0 <= token < len(self._classes):
            return 0
        return int(self._classes[token]) % NUM_CLASSES

    def collect_recents(self) -> None:
        """Collect the last distinct tokens of the own text; they are the same for all nodes of a draft."""
        own, places = self.texts.own.tokens, dict[int, int]()
        for place in range(len(own) - 1, max(len(own) - RECENTS_SCAN, -1), -1):
            if own[place] != SENTINEL and len(places) < MAX_RECENTS:
                places.setdefault(own[place], place)
        self.recents = [Recent(t, place, 1 + i, self.class_of(t)) for i, (t, place) in enumerate(places.items())]

    def list_options(self, context: Context) -> Listing:
        """Return what may come next, with the table entries of each option and of none."""
        out = Listing(last_class=self.class_of(context.tokens[-1]))
        self._group(context, out)
        self._substitute(context.copy, out)
        out.is_hinted = context.is_root and len(self.hints) > 0 and out.longest < HINT_MATCH
        if out.is_hinted:
            self._hint(out)
        for k, token in enumerate(context.row[:MAX_ROW]):
            if token >= 0:
                option = out.option(token)
                option.row = option.row or 1 + k
                out.row_len += 1
        out.distinct = len(out.options)
        for recent in self.recents:
            if recent.token in out.options:
                out.options[recent.token].recent = recent.rank
            else:
                out.recents.append(recent)
        for option in out.options.values():
            option.entries = [BASES[table] + entry for table, entry in self._describe(context.copy, out, option)]
        out.none = [BASES[table] + entry for table, entry in _describe_none(context.copy, out)]
        return out

    def _group(self, context: Context, out: Listing) -> None:
        out.top_place, out.longest = longest_of(context.found)
        for place, length in context.found.items():
            levels = [k for k, least in enumerate(LEVELS) if length >= least] + [4] * (length == out.longest)
            for k in levels:
                out.totals[k] += 1
            out.newest_place = max(out.newest_place, place)
            token = self.texts.at(place)
            if token == SENTINEL:
                continue
            option = out.option(token)
            for k in levels:
                option.counts[k] += 1
            option.newest = max(option.newest, place)
            if option.place == NOWHERE or (length, place) > (option.match_len, option.place):
                option.place, option.match_len = place, length
            _measure(context.copy, out, option, place, length)
        if len(out.options) > MAX_GROUPS:
            best = sorted(out.options.values(), key=lambda o: (-o.match_len, -o.place))[:MAX_GROUPS]
            out.options = {option.token: option for option in best}

    def _substitute(self, copy: Copy, out: Listing) -> None:
        if copy.pair is not None:
            written, kind = copy.pair.written + copy.offset, 1
        else:
            pair = self.pairs.find(copy.source)
            if pair is None:
                return
            often = (pair.hits > 1) + (pair.hits > 3)
            written, kind = pair.written, 2 + often
        option = out.option(self.texts.at(written))
        option.substitution = kind
        if option.place == NOWHERE:
            option.place = written
        replaced = out.options.get(self.texts.at(copy.source)) if kind > 1 else None
        if replaced is not None and replaced is not option:
            replaced.substitution = kind + 3

    def _hint(self, out: Listing) -> None:
        for i, (place, cosine) in enumerate(self.hints):
            token = self.texts.at(place)
            if token == SENTINEL:
                continue
            if token not in out.options and (i >= HINTS_ADDED or len(out.options) >= MAX_HINTED):
                continue
            option = out.option(token)
            if not option.hint:
                option.hint, option.cosine = 1 + i, cosine
            if option.place == NOWHERE:
                option.place = option.newest = place

    def _describe(self, copy: Copy, out: Listing, o: Option) -> list[tuple[str, int]]:
        """Entries of one option; those of tables that say nothing about it are left out."""
        length = bisect_right(LENGTH_EDGES, o.match_len)
        classes = out.last_class * NUM_CLASSES + self.class_of(o.token)
        entries = []
        if o.row:
            entries += [("row", o.row), ("row_match", o.row * 11 + bisect_right(LENGTH_EDGES, out.longest))]
        if o.recent:
            entries.append(("recent_rank", bisect_right(RECENT_EDGES, o.recent)))
        if o.newest == NOWHERE and o.substitution == 0:  # only in the row
            return [*entries, ("recent_classes", classes)]
        is_top = out.longest > 0 and o.match_len == out.longest
        success = bisect_right(SUCCESS_EDGES, copy.success)
        coarse = bisect_right(COARSE_EDGES, o.match_len)
        entries += self._describe_matches(out, o)
        entries += _describe_source(copy, o, is_top * 12 + success * 2 + (copy.lost > 0))
        if o.substitution:
            entries.append(("substitution", o.substitution))
        entries.append(("length_success", success * 11 + length + is_top * 66))
        entries.append(("classes", classes))
        entries.append(("class_length", out.last_class * 6 + coarse))
        _, ahead, ahead_len = out.ahead
        nearest = 1 + bisect_right(COARSE_EDGES, ahead_len) if o.token == ahead else 0
        entries.append(("nearest", nearest * NUM_CLASSES + out.last_class))
        if o.token == out.behind[1]:
            entries.append(("nearest_back", 0))
        entries.append(("second", 8 if copy.second == NOWHERE else distance_bin(o.second)))
        return entries + _describe_hint(out, o, coarse)

    def _describe_matches(self, out: Listing, o: Option) -> list[tuple[str, int]]:
        longest, coarse = bisect_right(COARSE_EDGES, out.longest), bisect_right(COARSE_EDGES, o.match_len)
        is_top = out.longest > 0 and o.match_len == out.longest
        is_found, is_side = o.newest != NOWHERE, o.place >= ELSEWHERE
        age = 11 if is_side or not is_found else bisect_right(AGE_EDGES, len(self.texts.own) - o.place)
        entries = [("length", is_top * 11 + bisect_right(LENGTH_EDGES, o.match_len))]
        entries += [(f"share{n}", share_cell(o.counts[k], out.totals[k])) for k, n in enumerate(LEVELS)]
        entries.append(("share_top", share_cell(o.counts[4], out.totals[4]) * 6 + longest))
        entries.append(("newest_top", (is_found and o.place == out.top_place) * 6 + coarse))
        entries.append(("history", (is_found and not is_side and o.place >= self.prompt_len) * 6 + coarse))
        entries.append(("age", age))
        entries.append(("newest", int(o.newest == out.newest_place)))
        if is_side:
            entries.append(("else", 6 + coarse))
        return entries


def _measure(copy: Copy, out: Listing, option: Option, place: int, length: int) -> None:
    """Note how far one occurrence of an option lies from the pointers; ahead counts for less than behind."""
    if copy.source != NOWHERE:
        distance = place - copy.source
        if max(-2 * distance, distance) < max(-2 * option.nearest, option.nearest):
            option.nearest, option.nearest_len = distance, length
        if 0 <= distance < out.ahead[0]:
            out.ahead = (distance, option.token, length)
        if distance < 0 < length and -distance < out.behind[0]:
            out.behind = (-distance, option.token)
    if copy.second != NOWHERE and abs(place - copy.second) < abs(option.second):
        option.second = place - copy.second


def _describe_hint(out: Listing, o: Option, coarse: int) -> list[tuple[str, int]]:
    if not out.is_hinted:
        return []
    if not o.hint:
        return [("alike", coarse)]
    alike = bisect_right(COSINE_EDGES, o.cosine)
    return [("hint", bisect_right(HINT_EDGES, o.hint) * 9 + alike), ("alike", (1 + alike) * 3 + coarse)]


def _describe_source(copy: Copy, o: Option, success_cell: int) -> list[tuple[str, int]]:
    distance = 8 if copy.source == NOWHERE else distance_bin(o.nearest)
    entries = [("distance", distance * 6 + bisect_right(COARSE_EDGES, o.nearest_len))]
    if distance:
        return [*entries, ("off_source", (copy.lost > 0) * 9 + distance)]
    return [*entries, ("at_source", source_cell(copy)), ("source_success", success_cell)]


def _describe_none(copy: Copy, out: Listing) -> list[tuple[str, int]]:
    longest = bisect_right(LENGTH_EDGES, out.longest)
    top = bisect_right(COUNT_EDGES, out.totals[4]) * 6 + min(5, out.distinct // 4)
    if copy.source == NOWHERE:
        source = 0
    elif copy.lost:
        source = 1 + min(6, copy.lost // 2)
    else:
        source = 8 + bisect_right(RUN_EDGES, copy.run)
    entries = [("none_length", longest), ("none_top", top)]
    entries.append(("none_two", bisect_right(COUNT_EDGES, out.totals[1])))
    entries.append(("none_success", longest * 6 + bisect_right(SUCCESS_EDGES, copy.success)))
    entries.append(("none_source", source))
    entries.append(("none_class", out.last_class))
    if out.row_len:
        entries.append(("none_row", 1 + min(out.longest, 10)))
    return entries
