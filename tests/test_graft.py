"""Grafting: what is hung where, and what is left out with all that hangs below it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.graft import depths_of, graft
from longgraft.tree import Continuation, Source, TreeBuilder

VOCAB = 10
Row = tuple[int, int, float]


def continuation(*rows: Row, at: int = 0, source: Source = Source.PROMPT) -> Continuation:
    """Make a continuation of (token, parent, score); entry i comes from place (0, 100 + i)."""
    tokens, parents, scores = zip(*rows)
    n = len(rows)
    origins = np.stack([np.zeros(n), 100 + np.arange(n)], axis=1).astype(np.int32)
    return Continuation(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(scores, np.float32),
        np.full(n, source, np.int8),
        origins,
        np.zeros(n, np.int32),
        at,
    )


def grafted(*continuations: Continuation, max_depth: int = 99, builder: TreeBuilder | None = None) -> TreeBuilder:
    builder = builder or TreeBuilder(9)
    graft(builder, continuations, VOCAB, max_depth)
    return builder


def texts(builder: TreeBuilder) -> set[tuple[int, ...]]:
    tree = builder.build()
    return {tuple(tree.token_ids[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))}


def test_a_small_tree_hangs_from_the_root() -> None:
    tree = grafted(continuation((1, -1, -0.1), (2, 0, -0.3), (3, -1, -0.2), (0, 1, -0.4))).build()
    assert tree.token_ids.tolist() == [9, 1, 2, 3, 0]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 2]
    assert tree.origins.tolist() == [[-1, -1], [0, 100], [0, 101], [0, 102], [0, 103]]
    assert set(tree.sources[1:].tolist()) == {Source.PROMPT}


def test_scores_are_relative_to_where_it_hangs() -> None:
    builder = TreeBuilder(9)
    node = builder.add(0, 1, -1.0, Source.DRAFT)
    grafted(continuation((2, -1, -0.25), (3, 0, -0.5), at=node), builder=builder)
    assert builder.scores == pytest.approx([0.0, -1.0, -1.25, -1.5])
    assert builder.parents == [-1, 0, 1, 2]


@pytest.mark.parametrize("stranger", [VOCAB, -1, 2**31 - 1, -(2**31)])
def test_a_strange_token_and_all_below_it_are_left_out(stranger: int) -> None:
    rows: list[Row] = [
        (1, -1, -0.1),
        (stranger, 0, -0.2),
        (2, 1, -0.3),
        (3, 2, -0.4),
        (4, 0, -0.5),
        (VOCAB - 1, 4, -0.6),
    ]
    assert texts(grafted(continuation(*rows))) == {(1,), (1, 4), (1, 4, VOCAB - 1)}


def test_nothing_but_strange_tokens_is_nothing() -> None:
    assert len(grafted(continuation((VOCAB, -1, -0.1), (1, 0, -0.2)))) == 1


@pytest.mark.parametrize("max_depth", [-1, 0, 1, 2, 3, 4])
def test_depth_is_limited(max_depth: int) -> None:
    chain = continuation((1, -1, -0.1), (2, 0, -0.2), (3, 1, -0.3))
    assert len(grafted(chain, max_depth=max_depth)) == 1 + min(max(max_depth, 0), 3)


def test_depth_counts_what_was_there_before() -> None:
    builder = TreeBuilder(9)
    deep = builder.add(builder.add(0, 1, -0.1, Source.DRAFT), 2, -0.2, Source.DRAFT)
    grafted(continuation((3, -1, -0.1), (4, 0, -0.2), at=deep), max_depth=3, builder=builder)
    assert texts(builder) == {(1,), (1, 2), (1, 2, 3)}


def test_equal_paths_are_merged() -> None:
    builder = TreeBuilder(9)
    drafted = builder.add(builder.add(0, 1, -0.4, Source.DRAFT), 2, -0.5, Source.DRAFT)
    grafted(
        continuation((1, -1, -0.2), (2, 0, -0.9), (3, 1, -1.0)),
        continuation((1, -1, -0.3), (3, 0, -0.6), source=Source.HISTORY),
        builder=builder,
    )
    assert texts(builder) == {(1,), (1, 2), (1, 2, 3), (1, 3)}
    assert builder.sources[1] == Source.PROMPT and builder.scores[1] == pytest.approx(-0.2)
    assert builder.sources[drafted] == Source.PROMPT and builder.scores[drafted] == pytest.approx(-0.5)


def test_a_continuation_may_hang_from_what_an_earlier_one_added() -> None:
    builder = grafted(continuation((1, -1, -0.1)), continuation((2, -1, -0.1), at=1))
    assert texts(builder) == {(1,), (1, 2)}


@pytest.mark.parametrize("at", [-1, 1, 7])
def test_hanging_from_nothing_is_an_error(at: int) -> None:
    with pytest.raises(ValueError, match=f"continuation hangs from node {at}: the tree has 1 nodes"):
        grafted(continuation((1, -1, -0.1), at=at))


rows = st.lists(st.tuples(st.integers(-2, VOCAB + 1), st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=30)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(rows, rows, st.integers(0, 6))
def test_the_tree_holds_exactly_the_known_paths(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], max_depth: int
) -> None:
    expected: set[tuple[int, ...]] = set()
    made = []
    for drawn in (first, second):
        entries: list[Row] = []
        paths: list[tuple[int, ...]] = []
        for number, (token, parent, cost) in enumerate(drawn):
            at = parent % (number + 1) - 1
            entries.append((token, at, (entries[at][2] if at >= 0 else 0.0) - cost / 4))
            paths.append((*(paths[at] if at >= 0 else ()), token))
        made.append(continuation(*entries))
        expected |= {p for p in paths if len(p) <= max_depth and all(0 <= token < VOCAB for token in p)}
    builder = grafted(*made, max_depth=max_depth)
    assert texts(builder) == expected
    assert depths_of(builder) == builder.build().depths.tolist()
