"""The conditional logit alone: probabilities of one list, and steps that make what came likelier."""

from __future__ import annotations

import math

import pytest

from longgraft.index.features import BASES, Listing, Recent
from longgraft.index.logit import Logit
from tests.index.learnt import RANDOM, ZEROS


def listing() -> Listing:
    out = Listing(last_class=3, longest=5, none=[BASES["none_length"] + 5])
    for token, entry in ((7, 1), (8, 2)):
        out.option(token).entries = [BASES["length"] + entry, BASES["classes"] + 24]
    out.recents = [Recent(9, 4, 1, 0), Recent(2, 3, 40, 1)]
    return out


def test_zero_weights_make_all_equal() -> None:
    scored, rest = Logit(ZEROS, 0.1).score(listing())
    assert [(s.token, s.place) for s in scored] == [(7, -1), (8, -1), (9, 4), (2, 3)]
    assert [s.p for s in scored] == [0.2] * 4
    assert rest == 0.2


def test_log_odds_are_sums_of_entries() -> None:
    scored, rest = Logit(RANDOM, 0.1).score(listing())
    assert sum(s.p for s in scored) + rest == pytest.approx(1.0)
    log_odds = RANDOM[BASES["length"] + 1] + RANDOM[BASES["classes"] + 24] - RANDOM[BASES["none_length"] + 5]
    assert math.log(scored[0].p / rest) == pytest.approx(log_odds)


@pytest.mark.parametrize(("token", "place"), [(7, 0), (8, 1), (9, 2), (2, 3), (99, 4)])
def test_a_step_makes_what_came_likelier(token: int, place: int) -> None:
    logit = Logit(ZEROS, 0.1)
    for _ in range(30):
        logit.learn(token, listing())
    scored, rest = logit.score(listing())
    p = [*(s.p for s in scored), rest]
    assert p.index(max(p)) == place
    assert max(p) > 0.5
    logit.reset()
    assert logit.weights == ZEROS.tolist()


def test_the_largest_weights_do_not_overflow() -> None:
    for sign in (-50.0, 50.0):
        weights = RANDOM.copy()
        weights[:] = sign
        weights[BASES["recent_rank"] :] = -sign
        weights[BASES["none_length"] :] = -50.0
        scored, rest = Logit(weights, 0.1).score(listing())
        assert sum(s.p for s in scored) + rest == pytest.approx(1.0)
