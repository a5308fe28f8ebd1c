"""Block grafting: what is kept, how the rest of the budget is split, and best-first growth against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.block_graft import grow_best_first, keep_confident, retrieve_around, retrieve_behind, shares
from longgraft.config import GraftError
from longgraft.graft import graft
from longgraft.tree import Continuation, Level, Source, TreeBuilder

Table = list[dict[int, float]]


class Marginals:
    """A block's draft: per depth, tokens and their probabilities."""

    in_one_pass = True

    def __init__(self, table: Table) -> None:
        self.table = table
        self.asked = 0

    def expand(self, tree: TreeBuilder, nodes: Sequence[int], width: int) -> Level:
        rows: list[tuple[int, int, float]] = []
        self.asked += 1
        for node in nodes:
            depth, at = 0, node
            while at:
                depth, at = depth + 1, tree.parents[at]
            if depth < len(self.table):
                best = sorted(self.table[depth].items(), key=lambda item: -item[1])
                there = {token for token, parent in zip(tree.token_ids, tree.parents) if parent == node}
                rows += [(t, node, math.log(p)) for i, (t, p) in enumerate(best) if i < width or t in there]
        tokens, parents, scores = zip(*rows) if rows else ((), (), ())
        return Level(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32))

    def seconds(self, rows: int) -> float:
        return 0.0


class Notes:
    """An index that proposes a chain as long as its budget and writes down what it was asked."""

    def __init__(self, silent: Sequence[int] = ()) -> None:
        self.silent = silent
        self.asked: list[tuple[int, list[int], int]] = []

    def draft(self, budget: int, path: Any = (), at: int = 0) -> Continuation | None:
        self.asked.append((budget, list(path), at))
        if at in self.silent:
            return None
        n = np.arange(budget, dtype=np.int32)
        sources = np.full(budget, Source.PROMPT, np.int8)
        return Continuation(100 + n, n - 1, -0.1 * (n + 1), sources, np.full((budget, 2), -1, np.int32), n, at)


BLOCK: Table = [{1: 0.9, 2: 0.05}, {3: 0.8, 4: 0.1}, {5: 0.5, 6: 0.3}, {7: 0.95}]


@pytest.mark.parametrize(
    ("threshold", "by_path", "length", "tokens"),
    [
        (0.0, False, 9, [1, 3, 5, 7]),
        (0.6, False, 9, [1, 3]),
        (0.49, False, 9, [1, 3, 5, 7]),
        (0.5, True, 9, [1, 3]),
        (0.3, True, 9, [1, 3, 5, 7]),
        (0.95, False, 9, []),
        (1.0, True, 9, []),
        (0.0, False, 2, [1, 3]),
        (0.0, False, 0, []),
    ],
)
def test_the_confident_prefix_is_kept(threshold: float, by_path: bool, length: int, tokens: list[int]) -> None:
    builder = TreeBuilder(0)
    kept = keep_confident(Marginals(BLOCK), builder, threshold, length, by_path)
    assert [builder.token_ids[node] for node in kept] == [0, *tokens]
    assert builder.parents == [-1, *kept[:-1]] and set(builder.sources[1:]) <= {Source.DRAFT}
    path = np.cumsum([0.0] + [math.log(BLOCK[i][t]) for i, t in enumerate(tokens)])
    assert np.allclose(builder.scores, path, atol=1e-6)


def test_a_chain_goes_along_what_is_there() -> None:
    builder = TreeBuilder(0)
    there = builder.add(0, 1, -3.0, Source.PROMPT)
    beside = builder.add(0, 2, -0.01, Source.PROMPT)
    kept = keep_confident(Marginals(BLOCK), builder, 0.6, 9)
    assert kept[1] == there and beside not in kept
    assert builder.sources[there] == Source.DRAFT and math.isclose(builder.scores[there], math.log(0.9), rel_tol=1e-6)


@pytest.mark.parametrize(("threshold", "length"), [(-0.1, 3), (1.1, 3), (math.nan, 3), (0.5, -1)])
def test_senseless_settings_are_refused(threshold: float, length: int) -> None:
    with pytest.raises(GraftError, match="threshold"):
        keep_confident(Marginals(BLOCK), TreeBuilder(0), threshold, length)


def test_the_papers_tail() -> None:
    """B = 16 rows, B_df kept with the root, B_ret = B - B_df retrieved behind the last kept token."""
    builder, index = TreeBuilder(0), Notes()
    kept = keep_confident(Marginals(BLOCK), builder, 0.6, 15)
    graft(builder, retrieve_behind(builder, kept, index, 16 - len(kept)), vocab_size=500, max_depth=99)
    assert index.asked == [(13, [1, 3], kept[-1])]
    tree = builder.build()
    assert len(tree) == 16 and tree.is_chain
    assert tree.sources.tolist() == [Source.ROOT] + [Source.DRAFT] * 2 + [Source.PROMPT] * 13
    nothing = retrieve_behind(builder, kept, Notes(silent=kept), 13)
    assert nothing == retrieve_behind(builder, kept, index, 0) == []


def test_retrieval_beside_the_chain_goes_where_it_is_left() -> None:
    builder, index = TreeBuilder(0), Notes(silent=[2])
    kept = keep_confident(Marginals(BLOCK), builder, 0.0, 9)
    found = retrieve_around(builder, kept, index, 20)
    # The chain is left after 0, 1, 2, 3, 4 tokens with probability 0.1, 0.18, 0.36, 0.018, 0.342.
    assert index.asked == [(2, [], 0), (4, [1], 1), (7, [1, 3], 2), (7, [1, 3, 5, 7], 4)]
    assert [continuation.at for continuation in found] == [0, 1, 4]
    graft(builder, found, vocab_size=500, max_depth=99)
    assert len(builder.build()) == 1 + 4 + 2 + 4 + 7


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(-50, 0), max_size=8), st.integers(-2, 80))
def test_shares_add_up(steps: list[float], budget: int) -> None:
    scores = np.cumsum([0.0, *steps])
    split = shares(scores.tolist(), budget)
    assert len(split) == len(scores) and sum(split) == max(budget, 0) and min(split) >= 0
    reached = np.exp(scores)
    leaving = reached - np.append(reached[1:], 0.0)
    assert np.all(np.abs(np.array(split) - leaving * max(budget, 0)) <= 1 + 1e-9)


def test_shares_of_a_sure_and_of_an_impossible_chain() -> None:
    assert shares([0.0, 0.0, 0.0], 7) == [0, 0, 7]
    assert shares([0.0, -math.inf, -math.inf], 7) == [7, 0, 0]
    assert shares([0.0], 7) == [7]


PROBABILITIES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(st.lists(PROBABILITIES, min_size=1, max_size=4), st.integers(0, 14), st.integers(1, 5))
def test_best_first_takes_the_likeliest_nodes(weights: list[list[int]], budget: int, width: int) -> None:
    table = [{token: w / (sum(row) + 1) for token, w in enumerate(row)} for row in weights]
    builder = TreeBuilder(0)
    grow_best_first(Marginals(table), builder, budget, width)
    seen = [sorted(row.values(), reverse=True)[:width] for row in table]
    paths = [math.prod(path) for depth in range(1, len(seen) + 1) for path in itertools.product(*seen[:depth])]
    best = sorted(paths, reverse=True)[:budget]
    assert np.allclose(sorted(np.exp(builder.scores[1:]), reverse=True), best, rtol=1e-4)
    assert len(builder.build()) == len(best) + 1


def test_best_first_builds_on_what_is_there() -> None:
    builder, draft = TreeBuilder(0), Marginals(BLOCK)
    there = builder.add(0, 1, -0.01, Source.PROMPT)
    grow_best_first(draft, builder, 1, 2)
    assert builder.token_ids == [0, 1, 3] and builder.parents[2] == there
    grow_best_first(draft, builder, 0, 2)
    assert len(builder) == 3
