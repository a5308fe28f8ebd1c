"""The objects that pass between the rooms: each invariant, broken once, raises."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.tree import Acceptance, Continuation, Level, Source, TokenTree, TreeBuilder, Verification, chain
from tests.cases import TREES, token_tree


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def scores(*values: float) -> Any:
    return np.array(values, np.float32)


def tree_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "token_ids": ints(5, 1, 2, 1),
        "parents": ints(-1, 0, 0, 1),
        "scores": scores(0.0, -0.1, -0.2, -0.3),
        "sources": np.zeros(4, np.int8),
        "origins": np.full((4, 2), -1, np.int32),
    }
    return {**fields, **changes}


def continuation_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "token_ids": ints(1, 2, 3),
        "parents": ints(-1, 0, -1),
        "scores": scores(-0.1, -0.2, -0.3),
        "sources": np.zeros(3, np.int8),
        "origins": np.full((3, 2), -1, np.int32),
        "match_lens": ints(0, 4, 2),
    }
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": ints(0, 0, 0, 1)}, "node 0 must be a root"),
        ({"parents": ints(-1, -1, 0, 1)}, "a parent comes after its child"),
        ({"parents": ints(-1, 0, 2, 1)}, "a parent comes after its child"),
        ({"parents": ints(-1, 0, 3, 1)}, "a parent comes after its child"),
        ({"parents": ints(-1, 0, 0, 0)}, "the same token hangs twice from one parent"),
        ({"parents": ints(-1, 0, 0)}, "arrays differ in length"),
        ({"scores": scores(0.0, -0.1)}, "arrays differ in length"),
        ({"sources": np.zeros(5, np.int8)}, "arrays differ in length"),
        ({"origins": np.zeros((1, 2), np.int32)}, "arrays differ in length"),
        ({"token_ids": ints()}, "node 0 must be a root"),
    ],
)
def test_a_broken_tree_is_refused(changes: dict[str, Any], message: str) -> None:
    TokenTree(**tree_fields())
    with pytest.raises(ValueError, match=message):
        TokenTree(**tree_fields(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ints()}, "empty"),
        ({"parents": ints(-1, 1, -1)}, "parents must point to earlier entries"),
        ({"parents": ints(-1, 2, -1)}, "parents must point to earlier entries"),
        ({"parents": ints(-2, 0, -1)}, "parents must point to earlier entries"),
        *(
            ({name: ints(-1)}, f"{name} has length")
            for name in ("parents", "scores", "sources", "origins", "match_lens")
        ),
    ],
)
def test_a_broken_continuation_is_refused(changes: dict[str, Any], message: str) -> None:
    assert Continuation(**continuation_fields()).match_len == 4
    with pytest.raises(ValueError, match=message):
        Continuation(**continuation_fields(**changes))


@pytest.mark.parametrize("lengths", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_ragged_level_is_refused(lengths: tuple[int, int, int]) -> None:
    tokens, parents, values = (np.zeros(n, np.int32) for n in lengths)
    with pytest.raises(ValueError, match="Level: lengths differ"):
        Level(tokens, parents, values.astype(np.float32))


def test_a_broken_verification_is_refused() -> None:
    tree = TokenTree(**tree_fields())
    Verification(tree, torch.zeros(4, 7), None, ints(0, 1, 2, 3))
    with pytest.raises(ValueError, match="3 logit rows for 4 nodes"):
        Verification(tree, torch.zeros(3, 7), None, ints(0, 1, 2, 3))
    with pytest.raises(ValueError, match="5 slots for 4 nodes"):
        Verification(tree, torch.zeros(4, 7), None, ints(0, 1, 2, 3, 4))


@pytest.mark.parametrize(
    ("path", "token_ids", "message"),
    [([0, 1], [3], "one token per visited node"), ([1], [3], "starts at the root"), ([], [], "starts at the root")],
)
def test_a_broken_acceptance_is_refused(path: list[int], token_ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Acceptance(path, token_ids)


@pytest.mark.parametrize("name", TREES)
def test_views_of_a_tree_agree(name: str) -> None:
    tree = token_tree(name)
    mask, children = tree.ancestor_mask(), tree.children()
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0 and path[-1] == node
        assert tree.depths[node] == len(path) - 1
        assert sorted(path) == np.flatnonzero(mask[node]).tolist()
        assert all(children[parent][int(tree.token_ids[child])] == child for parent, child in pairwise(path))
    assert sum(map(len, children)) == len(tree) - 1
    assert tree.positions(100).tolist() == (100 + tree.depths).tolist()
    assert tree.is_chain == (tree.depths.tolist() == list(range(len(tree))))


def test_a_chain_is_a_tree() -> None:
    tree = chain([7, 0, 0, 3], Source.CORPUS)
    assert tree.is_chain and tree.parents.tolist() == [-1, 0, 1, 2] and tree.token_ids.tolist() == [7, 0, 0, 3]
    assert tree.sources.tolist() == [Source.ROOT] + [Source.CORPUS] * 3
    assert not TokenTree(**tree_fields()).is_chain
    assert chain([0]).is_chain


def test_a_place_in_a_text_is_not_given_up_for_none() -> None:
    """Drafted or retrieved first, whichever is likelier: the node says where it stands and has the better score."""
    for drafted, retrieved in ((-0.1, -0.5), (-0.5, -0.1)):
        one, other = TreeBuilder(7), TreeBuilder(7)
        one.add(0, 3, drafted, Source.DRAFT)
        one.add(0, 3, retrieved, Source.PROMPT, (0, 11))
        other.add(0, 3, retrieved, Source.PROMPT, (0, 11))
        other.add(0, 3, drafted, Source.DRAFT)
        for builder in (one, other):
            assert (builder.scores[1], builder.sources[1], builder.origins[1]) == (-0.1, Source.PROMPT, (0, 11))


def test_children_are_found() -> None:
    builder = TreeBuilder(7)
    first = builder.add(0, 3, -0.1, Source.DRAFT)
    below = builder.add(first, 3, -0.2, Source.DRAFT)
    assert (builder.find(0, 3), builder.find(first, 3), builder.find(below, 3)) == (first, below, None)
    assert builder.children == [[first], [below], []]


def test_equal_tokens_under_one_parent_are_one_node_with_the_better_evidence() -> None:
    builder = TreeBuilder(9)
    first = builder.add(0, 4, -0.5, Source.PROMPT, (0, 11))
    assert builder.add(0, 4, -0.9, Source.HISTORY, (0, 22)) == first
    assert (builder.scores[first], builder.sources[first], builder.origins[first]) == (-0.5, Source.PROMPT, (0, 11))
    assert builder.add(0, 4, -0.2, Source.DRAFT, (1, 33)) == first
    assert (builder.scores[first], builder.sources[first], builder.origins[first]) == (-0.2, Source.DRAFT, (1, 33))
    below = builder.add(first, 4, -0.3, Source.DRAFT)
    assert below != first, "the same token under another parent is another node"
    assert len(builder) == len(builder.build()) == 3


def test_a_node_never_scores_above_its_parent() -> None:
    builder = TreeBuilder(1)
    child = builder.add(builder.add(0, 2, -2.0, Source.DRAFT), 3, -0.5, Source.DRAFT)
    assert builder.scores[child] == -2.0
    assert builder.add(0, 5, 3.0, Source.DRAFT) == 3 and builder.scores[3] == 0.0


@pytest.mark.parametrize("parent", [-1, 1, 50])
def test_a_parent_must_exist(parent: int) -> None:
    with pytest.raises(ValueError, match=f"parent {parent} is not among 1 nodes"):
        TreeBuilder(0).add(parent, 1, -1.0, Source.DRAFT)


def test_ties_go_to_the_node_that_came_first() -> None:
    builder = TreeBuilder(0)
    for token in range(6):
        builder.add(0, token, -1.0, Source.PROMPT)
    assert builder.build(4).token_ids.tolist() == [0, 0, 1, 2]


nodes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4), st.integers(0, 8)), max_size=40)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(nodes, st.integers(1, 45))
def test_the_best_nodes_are_a_tree(added: list[tuple[int, int, int]], size: int) -> None:
    builder = TreeBuilder(3)
    for parent, token, cost in added:
        at = parent % len(builder)
        builder.add(at, token, builder.scores[at] - cost / 4, Source.PROMPT, (0, cost))
    whole, best = builder.build(), builder.build(size)
    assert len(whole) == len(builder) and len(best) == min(size, len(builder))
    kept = sorted(builder.scores, reverse=True)[: len(best)]
    assert sorted(best.scores.tolist(), reverse=True) == kept, "a better node was left out"
    paths = {tuple(whole.token_ids[whole.path(node)].tolist()) for node in range(len(whole))}
    for node in range(len(best)):
        assert tuple(best.token_ids[best.path(node)].tolist()) in paths, "a node lost its parent"
        assert node == 0 or best.scores[node] <= best.scores[best.parents[node]]


def test_more_nodes_than_there_are() -> None:
    builder = TreeBuilder(0)
    builder.add(0, 1, -1.0, Source.DRAFT)
    assert len(builder.build(1)) == 1
    assert len(builder.build(99)) == 2


def test_a_copy_is_independent() -> None:
    builder = TreeBuilder(5)
    node = builder.add(0, 6, -1.0, Source.PROMPT, (0, 3))
    twin = builder.copy()
    assert twin.build().token_ids.tolist() == builder.build().token_ids.tolist() and twin.find(0, 6) == node
    twin.add(twin.add(node, 7, -2.0, Source.DRAFT), 8, -3.0, Source.DRAFT)
    twin.add(0, 6, -0.5, Source.HISTORY, (1, 1))
    assert len(builder) == 2 and builder.scores == [0.0, -1.0] and builder.find(node, 7) is None
    assert builder.children == [[1], []] and builder.origins[1] == (0, 3)
