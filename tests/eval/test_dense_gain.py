"""Dense hits are weighed fairly: nothing is proposed that was not looked up, and useless hits gain nothing."""

from __future__ import annotations

import numpy as np
import pytest

from longgraft.eval import dense_gain
from longgraft.eval.dense_gain import Root, accepted_at, choice_at, documents, fit, gains, interval, replay_roots
from longgraft.eval.replay import Trace
from tests.eval.thoughts import made_up


def root(
    tokens: list[int], hits: list[tuple[int, float]], pointer: int = -(10**9), listed: tuple[int, ...] = ()
) -> Root:
    """A root at the last but one token, after which the index lists `listed` with equal probabilities."""
    logs = np.log(np.full(len(listed), 0.5 / max(len(listed), 1)))
    return Root(len(tokens) - 2, None, list(listed), logs, [1] * len(listed), np.log(0.5), 1, hits, pointer)


def test_what_competes_comes_from_index_pointer_and_hits() -> None:
    tokens = np.array([5, 6, 7, 8, 6, 9], np.int32)
    at = root(tokens.tolist(), [(0, 0.9), (2, 0.8), (3, 0.7)], pointer=3, listed=(7,))
    both = choice_at(at, tokens, True, True)
    assert set(both.tokens) == {7, 6, 8} and both.truth == -1  # hit 3 would lead to the token that is asked for
    assert choice_at(at, tokens, False, False).tokens == [7]
    hit = both.columns[both.tokens.index(7), dense_gain.DENSE :]
    assert hit[0] == 1 and hit[1] == 0.9 and hit[2] == 0 and hit[3] == 1 and hit[4] == 1
    other = both.columns[both.tokens.index(6), dense_gain.DENSE :]
    assert other[4] == 0 and other[3] == 0.5 and other[5] == pytest.approx(0.1)


def test_a_copy_brings_what_follows_it() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 4, 7]
    at = Root(4, None, [], np.zeros(0), [], np.log(0.9), 0, [(-1, 0.9)], -(10**9))
    array = np.array(tokens, np.int32)
    choice = choice_at(at, array, False, True)
    assert choice.tokens == [2] and choice.truth == 0
    sure = np.zeros(dense_gain.WIDTH)
    sure[dense_gain.DENSE] = 5
    assert accepted_at(at, choice, (sure, np.zeros(1 + dense_gain.BINS)), tokens, [1, 2, 3, 16]) == [1, 2, 3, 3]


def test_fit_prefers_what_was_right() -> None:
    tokens = np.array([1, 2, 3, 4, 5, 1, 3], np.int32)
    choices = [choice_at(root(tokens.tolist(), [(0, 0.9)], listed=(2,)), tokens, False, True)] * 20
    columns, none = fit(choices)
    scores = choices[0].columns @ columns
    assert choices[0].tokens[int(scores.argmax())] == 3 and scores.max() > choices[0].none @ none


@pytest.mark.parametrize("tell", [True, False])
def test_states_that_tell_gain_and_states_that_do_not_gain_nothing(tell: bool) -> None:
    thoughts = [made_up(seed, tell) for seed in range(3)]
    traces, roots = [t.trace for t in thoughts], [replay_roots(t, 0, 16, 16) for t in thoughts]
    rows = gains(traces, roots, [8, 16])
    assert [(row["family"], row["budget"]) for row in rows[-2:]] == [("pooled", 8), ("pooled", 16)]
    assert rows[-1]["roots"] == sum(map(len, roots))
    for row in rows[-2:]:
        mean, low, high = row["dense_gain"]
        assert low <= mean <= high
        assert low > 0.3 if tell else high < 0.3


def test_texts_that_begin_alike_are_one_document() -> None:
    traces = [Trace("f", "g", np.array(t, np.int32), 2) for t in ([1, 2, 3], [1, 2, 4], [2, 2, 3])]
    assert documents(traces, 2) == [0, 0, 1]
    assert gains(traces[:1], [[]], [4]) == []


def test_interval_of_a_constant_is_the_constant() -> None:
    assert interval(np.full(50, 2)) == [2.0, 2.0, 2.0]
