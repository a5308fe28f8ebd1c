"""Occurrences of a context: found newest first, within one text, without crossing a sentinel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longgraft.index.places import ELSEWHERE, MAX_MATCH, VISITS, Library, Text, match_length
from longgraft.index.reference import SENTINEL
from tests.index.texts import QUICK, texts


def text_of(tokens: list[int]) -> Text:
    text = Text()
    for token in tokens:
        text.append(token)
    return text


@QUICK
@given(texts)
def test_all_occurrences_of_short_texts_are_found(tokens: list[int]) -> None:
    library = Library()
    library.own = text_of(tokens)
    found: dict[int, int] = {}
    library.add_occurrences(tokens, found)
    expected = {
        place: match_length(tokens, place, tokens)
        for place in range(1, len(tokens))
        if tokens[place - 1] == tokens[-1] != SENTINEL
    }
    missed = set(expected) - set(found)
    assert {place: expected[place] for place in found} == found
    assert not missed or len(expected) > VISITS[1]
    assert library.own.check_integrity() == ""


@QUICK
@given(texts, st.integers(0, 100))
def test_matches_end_at_sentinels_and_starts(tokens: list[int], place: int) -> None:
    place = min(place, len(tokens))
    n = match_length(tokens, place, tokens)
    assert 0 <= n <= min(place, MAX_MATCH)
    assert tokens[place - n : place] == tokens[len(tokens) - n :]
    assert SENTINEL not in tokens[place - n : place]


def test_walks_are_capped() -> None:
    text = text_of([0] * 500)
    for n, most in VISITS.items():
        places = list(text.newest_places(n, [0] * n))
        assert places == list(range(500, 500 - most, -1))
        assert list(text.newest_places(n, [0] * (n - 1))) == []


def test_one_numbering_for_two_texts() -> None:
    library = Library()
    library.own, library.side = text_of([1, 2, 3]), text_of([4, 5])
    assert [library.at(place) for place in (-1, 0, 2, 3)] == [SENTINEL, 1, 3, SENTINEL]
    assert [library.at(ELSEWHERE + place) for place in (0, 1, 2)] == [4, 5, SENTINEL]
    assert (library.end_of(0), library.end_of(ELSEWHERE)) == (3, ELSEWHERE + 2)
    assert library.slice(1, 3) == [2, 3, SENTINEL]
    assert library.match(ELSEWHERE + 1, [9, 4]) == 1


def test_broken_integrity_is_named() -> None:
    text = text_of([1, 2, 1, 2])
    text.tokens[0] = 5
    assert text.check_integrity() == "a link leads to a place after other tokens"
