"""Token Recycling by hand, REST against a plain count."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.eval import baseline_tree
from longgraft.eval.baseline_tree import MAX_NODES, Recycling, Rest, rank_tree
from tests.eval.drafting import QUICK, assert_tree, drafted, paths, texts


def test_rank_tree() -> None:
    nodes = rank_tree(60)
    assert nodes[:4] == ((-1, 0), (0, 0), (-1, 1), (1, 0))
    assert all(-1 <= parent < node for node, (parent, _) in enumerate(nodes))
    assert len(set(nodes)) == 60
    assert nodes[:16] == rank_tree(16)
    assert rank_tree(0) == ()
    assert max(rank for _, rank in rank_tree(4000)) == 7
    for node, (parent, rank) in enumerate(nodes):  # a better rank comes first
        assert rank == 0 or (parent, rank - 1) in nodes[:node]


def test_recycling_proposes_the_newest_successors() -> None:
    tokens = [1, 2, 1, 3, 1, 2, 5, 1]
    token_ids, parents = drafted(Recycling(), tokens, 4)
    assert paths(token_ids, parents) == [(2,), (2, 5), (3,), (2, 5, 1)]
    assert drafted(Recycling(), [1, 2, 3], 8) == ([], [])
    assert drafted(Recycling(), [0, 0], 2) == ([0, 0], [-1, 0])


def test_recycling_keeps_eight() -> None:
    tokens = [token for follower in range(10, 22) for token in (1, follower)] + [1]
    found = drafted(Recycling(), tokens, 4000)
    assert [path[0] for path in paths(*found) if len(path) == 1] == list(range(21, 13, -1))


def rest_counts(tokens: list[int]) -> Counter[tuple[int, ...]]:
    """Count prefixes of what followed the longest suffix of 16 to 2 tokens, by scanning."""
    counts: Counter[tuple[int, ...]] = Counter()
    for size in range(16, 1, -1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        for end in ends:
            for stop in range(end + 1, min(end + 10, len(tokens)) + 1):
                counts[tuple(tokens[end:stop])] += 1
        if ends:
            break
    return counts


@QUICK
@given(texts, st.integers(1, 80), st.integers(1, 20))
def test_rest_is_the_count(tokens: list[int], budget: int, pieces: int) -> None:
    token_ids, parents = drafted(Rest(), tokens, budget, pieces)
    counts = rest_counts(tokens)
    found = paths(token_ids, parents)
    assert_tree(token_ids, parents, min(budget, MAX_NODES))
    assert len(found) == min(budget, MAX_NODES, len(counts))
    assert [counts[path] for path in found] == sorted(counts.values(), reverse=True)[: len(found)]


def test_rest_takes_the_newest_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline_tree, "MAX_MATCHES", 2)
    tokens = [7, 8, 1, 7, 8, 2, 7, 8, 3, 7, 8]
    found = paths(*drafted(Rest(), tokens, 60))
    assert {path[0] for path in found} == {2, 3}
