"""Two opinions about one parent's children become one distribution, whatever either leaves out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.graft import graft
from longgraft.merge import FIRST_WEIGHTS, Opinions, Weights
from longgraft.prune import add_level
from longgraft.tree import Continuation, Level, Source, TreeBuilder

VOCAB = 50


def level(*rows: tuple[int, int, float]) -> Level:
    """A level of (parent, token, probability given the parent)."""
    parents, tokens, shares = zip(*rows)
    scores = np.log(np.array(shares)).astype(np.float32)
    return Level(np.array(tokens, np.int32), np.array(parents, np.int32), scores)


def found(*rows: tuple[int, int, float], at: int = 0) -> Continuation:
    """A continuation of (parent entry or -1, token, probability given the parent)."""
    scores: list[float] = []
    for parent, _, share in rows:
        scores.append(float(np.log(share)) + (scores[parent] if parent >= 0 else 0.0))
    n = len(rows)
    return Continuation(
        np.array([token for _, token, _ in rows], np.int32),
        np.array([parent for parent, _, _ in rows], np.int32),
        np.array(scores, np.float32),
        np.full(n, Source.PROMPT, np.int8),
        np.stack([np.zeros(n), np.arange(n)], 1).astype(np.int32),
        np.full(n, 4, np.int32),
        at,
    )


def take(opinions: Opinions, what: Level | Continuation, asked: tuple[int, ...] = (0,)) -> None:
    """Put proposals into the tree, as a policy does, and hear what is said about them."""
    if isinstance(what, Level):
        add_level(opinions.builder, what, VOCAB)
        opinions.take_level(what, asked)
    else:
        opinions.take_found(what, graft(opinions.builder, [what], VOCAB, 64)[0])


def merged(
    *, drafted: Level | None = None, retrieved: Continuation | None = None, weights: Weights | None = None
) -> Opinions:
    opinions = Opinions(TreeBuilder(7))
    for what in (retrieved, drafted):
        if what is not None:
            take(opinions, what)
    opinions.combine(weights or Weights())
    return opinions


def shares(opinions: Opinions) -> dict[tuple[int, int], float]:
    """Path probability by (parent, token)."""
    builder = opinions.builder
    return {
        (builder.parents[n], builder.token_ids[n]): float(np.exp(builder.scores[n])) for n in range(1, len(builder))
    }


def test_the_index_alone_is_believed_as_it_is() -> None:
    opinions = merged(retrieved=found((-1, 3, 0.6), (-1, 4, 0.2), (0, 5, 0.5)))
    assert shares(opinions) == pytest.approx({(0, 3): 0.6, (0, 4): 0.2, (1, 5): 0.3}, rel=1e-5)
    assert opinions.builder.origins[1] == (0, 0)


def test_the_drafter_alone_is_believed_at_weight_one() -> None:
    opinions = merged(drafted=level((0, 3, 0.6), (0, 4, 0.2)))
    assert shares(opinions) == pytest.approx({(0, 3): 0.6, (0, 4): 0.2}, rel=1e-5)


def test_a_token_both_name_gains_and_is_one_node() -> None:
    opinions = merged(drafted=level((0, 3, 0.6), (0, 4, 0.3)), retrieved=found((-1, 3, 0.5), (-1, 5, 0.2)))
    got = shares(opinions)
    assert len(opinions.builder) == 4
    assert got[0, 3] > 0.6 and got[0, 4] < 0.3 and got[0, 5] < 0.2
    assert sum(got.values()) < 1
    assert opinions.builder.sources[1] == Source.PROMPT, "its place in the text is kept"


def test_what_one_leaves_open_the_other_fills() -> None:
    """An index with nothing likely to say does not outvote a sure drafter, and the other way round."""
    sure = shares(merged(drafted=level((0, 3, 0.98)), retrieved=found((-1, 5, 0.02))))
    assert sure[0, 3] > 0.95 and sure[0, 5] < 0.01
    other = shares(merged(drafted=level((0, 3, 0.02)), retrieved=found((-1, 5, 0.98))))
    assert other[0, 5] > 0.85 and other[0, 3] < 0.05


def test_a_retrieved_token_first_and_drafted_later_is_the_same_as_the_other_order() -> None:
    first = Opinions(TreeBuilder(7))
    take(first, level((0, 3, 0.6), (0, 4, 0.3)))
    take(first, found((-1, 3, 0.5), (-1, 5, 0.2)))
    first.combine(Weights())
    second = merged(drafted=level((0, 3, 0.6), (0, 4, 0.3)), retrieved=found((-1, 3, 0.5), (-1, 5, 0.2)))
    assert shares(first) == pytest.approx(shares(second))
    assert first.builder.sources[1] == second.builder.sources[1] == Source.PROMPT


def test_what_is_not_in_the_tree_does_not_count() -> None:
    """Tokens outside the vocabulary, scores that are no numbers, and entries that were not grafted."""
    opinions = Opinions(TreeBuilder(7))
    said = level((0, VOCAB + 1, 0.3), (0, 9, 0.2), (0, 8, 0.4))
    said.scores[2] = np.nan
    take(opinions, said)
    take(opinions, found((-1, VOCAB, 0.5), (0, 1, 0.5), (-1, 0, 0.4), (2, 2, 0.9)))
    opinions.combine(Weights())
    assert set(shares(opinions)) == {(0, 9), (0, 0), (2, 2)}
    assert set(opinions.drafted) == {1} and set(opinions.found) == {2, 3} and opinions.looked_up == {0, 2}


def test_a_root_alone() -> None:
    opinions = merged()
    assert opinions.builder.scores == [0.0]
    opinions.learn(Weights(), [3])


Shares = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(Shares, Shares, st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(0, 2)), st.integers(0, 5))
def test_children_share_their_parent(
    ours: list[float], theirs: list[float], powers: tuple[float, ...], gap: int
) -> None:
    """Whatever is said, probabilities of children sum to less than their parent's, and none is NaN."""
    ours, theirs = ([p / max(1.0, sum(x)) for p in x] for x in (ours, theirs))
    weights = Weights(np.array(powers[:2]), np.array([powers[2], 0.0]))
    opinions = merged(
        drafted=level(*((0, token, share) for token, share in enumerate(ours))),
        retrieved=found(*((-1, gap + token, share) for token, share in enumerate(theirs))),
        weights=weights,
    )
    values = np.array(list(shares(opinions).values()))
    assert np.all(values >= 0) and values.sum() <= 1 + 1e-9


@pytest.mark.parametrize("right", ["drafter", "index"])
def test_weights_follow_who_is_right(right: str) -> None:
    weights = Weights()
    for _ in range(60):
        opinions = merged(drafted=level((0, 3, 0.6)), retrieved=found((-1, 5, 0.6)), weights=weights)
        opinions.learn(weights, [3 if right == "drafter" else 5])
    drafter, index = weights.both
    if right == "drafter":
        assert drafter > FIRST_WEIGHTS[0] and index < FIRST_WEIGHTS[1]
    else:
        assert drafter < FIRST_WEIGHTS[0] and index > FIRST_WEIGHTS[1]
    assert weights.alone.tolist() == [FIRST_WEIGHTS[2], 0.0], "nothing was learnt about the drafter alone"


def test_an_overconfident_drafter_alone_is_believed_less() -> None:
    weights = Weights()
    for _ in range(200):
        opinions = merged(drafted=level((0, 3, 0.95)), weights=weights)
        opinions.learn(weights, [9])
    assert weights.alone[0] < 0.5 and weights.alone[1] == 0.0
    assert shares(merged(drafted=level((0, 3, 0.95)), weights=weights))[0, 3] < 0.85


def test_learning_walks_down_the_tree() -> None:
    weights = Weights()
    opinions = Opinions(TreeBuilder(7))
    take(opinions, level((0, 3, 0.8)))
    take(opinions, level((1, 4, 0.8)), (1,))
    opinions.combine(weights)
    before = weights.alone[0]
    opinions.learn(weights, [3, 4, 8])
    assert weights.alone[0] > before
    opinions.learn(weights, [])


def test_coverage_counts_likely_children() -> None:
    opinions = merged(retrieved=found((-1, 3, 0.6), (-1, 4, 0.2), (-1, 5, 0.05), (0, 6, 0.9)))
    assert opinions.coverage(0) == pytest.approx(0.8, rel=1e-5)
    assert opinions.coverage(1) == pytest.approx(0.9, rel=1e-5)
    assert opinions.coverage(2) == 0.0
