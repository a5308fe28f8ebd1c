"""What is known of each option, as entries of additive weight tables: the plain twin of `csrc/features.hpp`.

Knows no weights and no texts. The idea: occurrences of a context are grouped by the token that followed. Options
compete in one conditional logit: the log-odds of each is a sum of table entries, one a table, and "none of these" is
one more option. `TABLES` says which tables there are, in the order of their entries in the array of weights.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from longgraft.index.copying import Copy
from longgraft.index.places import NOWHERE

NUM_CLASSES = 8  # coarse kinds of token text; 0 = unknown
MAX_GROUPS = 24  # options taken from occurrences
MAX_HINTS = 16  # places proposed from elsewhere that are looked at ...
HINTS_ADDED = 4  # ... and the first of them, which may add an option ...
MAX_HINTED = MAX_GROUPS + 4  # ... where there are fewer than so many
HINT_MATCH = 4  # hints count where the longest match is shorter: a long one knows better
MAX_RECENTS = 96  # options that are only recent ...
RECENTS_SCAN = 640  # ... looked for in the last so many tokens
MAX_ROW = 8  # options of the successor row
LEVELS = (1, 2, 4, 8)  # occurrences are counted that match at least so many tokens
NO_DISTANCE = 1 << 29

LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 9, 13, 21, 32)
COARSE_EDGES = (1, 2, 4, 8, 16)
COUNT_EDGES = (1, 2, 3, 5, 17)
SHARE_EDGES = (1e-9, 0.05, 0.15, 0.35, 0.6, 0.9, 0.9999999)
RUN_EDGES = (1, 2, 4, 8, 16, 32)
SUCCESS_EDGES = (0.2, 0.4, 0.6, 0.8, 0.93)
AGE_EDGES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
RECENT_EDGES = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 36, 48, 60, 72, 84)
COSINE_EDGES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
HINT_EDGES = (2, 5, 9)
DISTANCE_EDGES = (1, 2, 5, 17, 65)  # ahead of the pointer; behind it: up to 4, up to 64

TABLES = {
    "length": 22,
    "share1": 48,
    "share2": 48,
    "share4": 48,
    "share8": 48,
    "share_top": 288,
    "newest_top": 12,
    "history": 12,
    "age": 12,
    "newest": 2,
    "distance": 54,
    "at_source": 14,
    "off_source": 18,
    "source_success": 24,
    "substitution": 8,
    "length_success": 132,
    "classes": 64,
    "class_length": 48,
    "nearest": 56,
    "nearest_back": 1,
    "second": 9,
    "recent_rank": 36,
    "recent_classes": 64,
    "recent_match": 11,
    "row": 9,
    "row_match": 99,
    "else": 12,
    "hint": 36,
    "alike": 30,
    "none_length": 11,
    "none_top": 36,
    "none_two": 6,
    "none_success": 66,
    "none_source": 15,
    "none_class": 8,
    "none_row": 12,
}
BASES = dict(zip(TABLES, accumulate(TABLES.values(), initial=0)))
NUM_WEIGHTS = sum(TABLES.values())


def distance_bin(distance: int) -> int:
    """Return the bin, 0 to 8, of how far a place lies ahead of the pointer; 8: too far."""
    if distance >= 0:
        return bisect_right(DISTANCE_EDGES, distance) if distance <= 256 else 8
    return 6 if distance >= -4 else 7 if distance >= -64 else 8


def share_cell(count: int, total: int) -> int:
    """Return the cell, 0 to 47, of `count` occurrences among `total`."""
    share = bisect_right(SHARE_EDGES, count / total) if total else 0
    return share * 6 + bisect_right(COUNT_EDGES, total)


def source_cell(copy: Copy) -> int:
    """Return the cell, 0 to 13, of how long the copy has gone on, or has been lost."""
    return 7 + min(6, copy.lost // 2) if copy.lost else bisect_right(RUN_EDGES, copy.run)


class Recent(NamedTuple):
    """A token that came lately."""

    token: int
    place: int
    rank: int  # from 1, the newest
    own_class: int


@dataclass(slots=True, eq=False)
class Option:
    """A token that may come next, and what is known of it."""

    token: int
    place: int = NOWHERE  # copied from here
    match_len: int = 0
    newest: int = NOWHERE
    nearest: int = NO_DISTANCE  # from the pointer, ...
    nearest_len: int = 0  # ... with this match
    second: int = NO_DISTANCE  # from the pointer that was left last
    counts: list[int] = field(default_factory=lambda: [0] * 5)  # matching >= LEVELS tokens, and the longest
    substitution: int = 0
    recent: int = 0
    row: int = 0
    hint: int = 0
    cosine: float = 0.0  # of its first hint
    entries: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Listing:
    """One list of options, in the order they were found, with what all of them share."""

    options: dict[int, Option] = field(default_factory=dict)
    recents: list[Recent] = field(default_factory=list)  # those that are no options
    totals: list[int] = field(default_factory=lambda: [0] * 5)
    longest: int = 0
    top_place: int = NOWHERE
    newest_place: int = NOWHERE
    ahead: tuple[int, int, int] = (NO_DISTANCE, -1, 0)  # the nearest option from the pointer on: distance, token, match
    behind: tuple[int, int] = (NO_DISTANCE, -1)  # and before it: distance, token
    distinct: int = 0
    row_len: int = 0
    is_hinted: bool = False  # there are hints for this context
    last_class: int = 0
    none: list[int] = field(default_factory=list)

    def option(self, token: int) -> Option:
        """Return the option of a token, a new one if need be."""
        return self.options.setdefault(token, Option(token))
