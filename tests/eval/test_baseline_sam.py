"""SAM decoding: the automaton against a scan for the earliest occurrence, and when it hands over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longgraft.eval.baseline_sam import EarliestSuffix, Sam
from longgraft.eval.baseline_tree import Recycling
from tests.eval.drafting import QUICK, drafted, texts


def earliest(tokens: list[int]) -> tuple[int, int]:
    for length in range(len(tokens) - 1, 0, -1):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[-length:]:
                return length, end
    return 0, 0


@QUICK
@given(texts)
def test_match_is_the_scan(tokens: list[int]) -> None:
    automaton = EarliestSuffix()
    assert automaton.match() == (0, 0)
    for token in tokens:
        automaton.append(token)
    assert automaton.match() == earliest(tokens)


@QUICK
@given(texts, st.integers(1, 20), st.integers(1, 9), st.integers(1, 6))
def test_draft_copies_or_hands_over(tokens: list[int], budget: int, pieces: int, least: int) -> None:
    length, end = earliest(tokens)
    copied = tokens[end : end + budget] if length >= least else []
    assert drafted(Sam(least), tokens, budget, pieces)[0] == copied
    with_fallback = drafted(Sam(least, Recycling()), tokens, budget, pieces)
    if length >= least:
        assert with_fallback[0] == copied
    else:
        assert with_fallback == drafted(Recycling(), tokens, budget)


def test_one_token_repeated_stays_linear() -> None:
    automaton = EarliestSuffix()
    for _ in range(2000):
        automaton.append(0)
    assert automaton.match() == (1999, 1999)
    assert len(automaton.links) == 2001
