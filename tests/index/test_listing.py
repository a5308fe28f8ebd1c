"""What is listed after a context, source by source: occurrences, hints, rows, recent tokens, and "none"."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.index.copying import Copy, Substitutions
from longgraft.index.features import (
    BASES,
    HINTS_ADDED,
    MAX_GROUPS,
    MAX_HINTS,
    MAX_RECENTS,
    NUM_WEIGHTS,
    RECENTS_SCAN,
    TABLES,
    Listing,
)
from longgraft.index.listing import Context, Lister
from longgraft.index.places import Found, Library
from tests.index.texts import texts


def lister_of(tokens: list[int], classes: np.ndarray | None = None) -> Lister:
    library = Library()
    for token in tokens:
        library.own.append(token)
    lister = Lister(library, Substitutions(library), classes)
    lister.collect_recents()
    return lister


def list_end(lister: Lister, copy: Copy | None = None, row: tuple[int, ...] = (), is_root: bool = True) -> Listing:
    tokens, found = lister.texts.own.tokens, Found()
    lister.texts.add_occurrences(tokens, found)
    return lister.list_options(Context(tokens or [-1], found, copy or Copy(), row, is_root))


def tables_of(entries: list[int]) -> dict[str, int]:
    """Entry of each table that an option or none has."""
    found = {}
    for entry in entries:
        name = [table for table, base in BASES.items() if base <= entry][-1]
        assert entry < BASES[name] + TABLES[name]
        assert name not in found
        found[name] = entry - BASES[name]
    return found


def test_occurrences_are_grouped_by_what_followed() -> None:
    out = list_end(lister_of([1, 2, 3, 1, 2, 4, 5, 2, 3, 1, 2]))
    assert {o.token: (o.place, o.match_len, o.counts) for o in out.options.values()} == {
        3: (2, 2, [2, 1, 0, 0, 0]),
        4: (5, 4, [1, 1, 1, 0, 1]),
    }
    assert (out.totals, out.longest, out.top_place, out.newest_place) == ([3, 2, 1, 0, 1], 4, 5, 8)
    assert tables_of(out.options[4].entries)["newest_top"] == 6 + 3


def test_recent_tokens_are_distinct_and_newest_first() -> None:
    lister = lister_of([*range(200), -1, 3, 3, 2])
    assert [r.token for r in lister.recents[:3]] == [2, 3, 199]
    assert [r.rank for r in lister.recents] == list(range(1, MAX_RECENTS + 1))
    assert lister.recents[1].place == 202
    assert lister_of([7, *[1] * RECENTS_SCAN]).recents[-1].token == 1


def test_only_the_best_groups_stay() -> None:
    out = list_end(lister_of([t for i in range(60) for t in (100, i)] + [5, 100, 30, 5, 100]))
    assert len(out.options) == MAX_GROUPS
    assert list(out.options)[:3] == [30, 6, 59]  # longest matches first, then newest


def test_rows_hints_and_recents_meet_in_one_option() -> None:
    lister = lister_of([1, 2, 3, 4, 1])
    lister.hints = [(99, 0.9), (1, 0.8), (1, 0.7), (2, 0.6)]
    out = list_end(lister, row=(2, -1, 9, 2))
    option = out.options[2]
    assert (option.row, option.hint, option.recent, option.place) == (1, 2, 4, 1)
    assert (out.options[9].row, out.options[9].place, out.row_len) == (3, -1, 3)
    assert set(tables_of(out.options[9].entries)) == {"row", "row_match", "recent_classes"}
    assert {r.token for r in out.recents} == {1, 4}
    assert "hint" not in tables_of(list_end(lister, is_root=False).options[2].entries)


def test_hints_are_few() -> None:
    lister = lister_of([*range(100), 200])
    lister.hints = [(place, 0.5) for place in range(MAX_HINTS)]
    out = list_end(lister)
    assert list(out.options) == list(range(HINTS_ADDED))  # the others may only speak for what is listed
    assert [option.hint for option in out.options.values()] == list(range(1, HINTS_ADDED + 1))


def test_classes_beyond_the_known_are_zero() -> None:
    lister = lister_of([5, 6, 5], classes=np.array([1, 2, 3, 4, 5, 6], np.uint8))
    assert [lister.class_of(token) for token in (-1, 0, 5, 6, 10**9)] == [0, 1, 6, 0, 0]
    assert tables_of(list_end(lister).options[6].entries)["classes"] == 6 * 8


def test_where_the_copy_stands_is_told() -> None:
    tokens = [1, 2, 3, 4, 1]
    at_source = tables_of(list_end(lister_of(tokens), Copy(source=1, run=3)).options[2].entries)
    assert (at_source["distance"] // 6, at_source["at_source"]) == (0, 2)
    assert "off_source" not in at_source
    off = tables_of(list_end(lister_of(tokens), Copy(source=3, lost=2)).options[2].entries)
    assert (off["distance"] // 6, off["off_source"]) == (6, 9 + 6)
    assert "at_source" not in off
    none = tables_of(list_end(lister_of(tokens), Copy(source=3, lost=2)).none)
    assert none["none_source"] == 2


copies = st.builds(
    Copy,
    source=st.integers(-1, 70),
    run=st.integers(0, 99),
    lost=st.integers(0, 40),
    second=st.integers(-1, 70),
    success=st.floats(0, 1),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(texts, copies, st.lists(st.integers(-1, 40), max_size=9), st.lists(st.integers(-1, 99), max_size=16))
def test_every_entry_lies_in_its_table(tokens: list[int], copy: Copy, row: list[int], hints: list[int]) -> None:
    lister = lister_of(tokens, classes=(np.arange(30) % 8).astype(np.uint8))
    lister.hints = [(place, place / 99) for place in hints]
    out = list_end(lister, copy, tuple(row))
    for option in out.options.values():
        assert option.token >= 0
        assert len(tables_of(option.entries)) == len(option.entries) <= 28
    assert len(tables_of(out.none)) == len(out.none) <= 8
    assert out.none[-1] < NUM_WEIGHTS
    assert not {r.token for r in out.recents} & set(out.options)


@pytest.mark.parametrize("tokens", [[], [-1], [5]])
def test_nothing_to_list(tokens: list[int]) -> None:
    out = list_end(lister_of(tokens))
    assert out.options == {}
    assert tables_of(out.none)["none_length"] == 0
