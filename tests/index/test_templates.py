"""Successor subtrees: the paper's widths, the two rules, and every node looked up as M[token of its parent, rank]."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.index.templates import NUM_RANKS, PAPER_WIDTHS, Template, shape_of, template, widths_of
from longgraft.tree import Continuation, Source

V = 50


def random_rows(seed: int, missing: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(V)[:NUM_RANKS] for _ in range(V)]).astype(np.int32)
    rows[rng.random(rows.shape) < missing] = -1
    return rows


def depths(parents: np.ndarray) -> list[int]:
    found: list[int] = []
    for parent in parents.tolist():
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def by_hand(shape: Template, rows: np.ndarray, root: int) -> set[tuple[int, ...]]:
    """Return the paths (tokens) of a filled shape, node by node."""
    paths: list[tuple[int, ...] | None] = []
    for parent, rank in zip(shape.parents.tolist(), shape.ranks.tolist()):
        above = () if parent < 0 else paths[parent]
        if above is None:
            paths.append(None)
            continue
        token = int(rows[above[-1] if above else root, rank])
        paths.append(None if token < 0 else (*above, token))
    return {path for path in paths if path is not None}


def paths_of(found: Continuation) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.token_ids.tolist(), found.parents.tolist()):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_the_stage_pruned_at_the_root_has_the_papers_widths() -> None:
    assert template(52).widths == PAPER_WIDTHS == (8, 10, 8, 6, 5, 4, 4, 4, 3)
    assert sum(PAPER_WIDTHS) == 52


def test_the_other_stages_have_its_proportions() -> None:
    assert template(36).widths == (6, 7, 5, 4, 3, 3, 3, 3, 2)
    assert template(20).widths == (3, 4, 3, 2, 2, 2, 2, 1, 1)


@given(st.integers(1, 300))
@settings(deadline=None, max_examples=60)
def test_widths_are_dealt_out_whole_and_within_one_of_proportion(num_nodes: int) -> None:
    widths = widths_of(num_nodes)
    assert sum(widths) == num_nodes
    assert widths[0] <= NUM_RANKS and all(b <= NUM_RANKS * a for a, b in pairwise(widths))
    if num_nodes <= 52:
        full = [*widths, *[0] * (9 - len(widths))]
        assert all(abs(w - num_nodes * p / 52) < 1 for w, p in zip(full, PAPER_WIDTHS, strict=True))


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 20, 36, 52, 53, 256])
def test_a_shape_is_breadth_first_and_its_first_chain_the_deepest(num_nodes: int) -> None:
    shape = template(num_nodes)
    at = depths(shape.parents)
    assert at == sorted(at) and [at.count(d + 1) for d in range(max(at))] == list(shape.widths)
    assert len(at) == sum(shape.widths) == num_nodes
    chain = [int(np.flatnonzero(np.array(at) == d)[0]) for d in range(1, max(at) + 1)]
    assert shape.ranks[chain].tolist() == [0] * len(chain) and shape.parents[chain].tolist() == [-1, *chain[:-1]]
    pairs = list(zip(shape.parents.tolist(), shape.ranks.tolist()))
    assert len(set(pairs)) == len(pairs) and shape.ranks.max() < NUM_RANKS
    above = np.append(shape.scores, 0.0)[shape.parents]
    assert np.all(shape.scores < above)


def test_each_depth_takes_the_best_children_of_the_one_above() -> None:
    """The rule of places, written as a sort over whole paths."""
    above: list[tuple[int, ...]] = [()]
    shape, node = template(52), 0
    made: list[tuple[int, ...]] = []
    for width in PAPER_WIDTHS:
        options = [(*path, rank) for path in above for rank in range(NUM_RANKS)]
        place = {path: i for i, path in enumerate(above)}
        options.sort(key=lambda p: (np.prod([1 + r for r in p]), place[p[:-1]], p[-1]))
        above = options[:width]
        for path in above:
            parent = int(shape.parents[node])
            made.append((*(made[parent] if parent >= 0 else ()), int(shape.ranks[node])))
            assert made[-1] == path
            node += 1


def test_no_more_successors_than_the_table_keeps() -> None:
    shape = shape_of((12, 3), num_ranks=4)
    assert shape.widths == (4, 3), "a depth cannot be wider than all children of the one above"
    with pytest.raises(GraftError, match="template of 0 nodes"):
        template(0)


@given(st.integers(0, 10_000), st.integers(1, 80), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
@settings(deadline=None, max_examples=60)
def test_every_node_is_a_successor_of_its_parent(seed: int, num_nodes: int, missing: float) -> None:
    rows, shape, root = random_rows(seed, missing), template(num_nodes), seed % V
    found = shape.fill(rows, root)
    expected = by_hand(shape, rows, root)
    if found is None:
        assert not expected
        return
    paths = paths_of(found)
    assert len(set(paths)) == len(paths) and set(paths) == expected
    assert set(found.sources.tolist()) == {Source.SUCCESSOR} and found.at == 0
    assert np.all(found.origins == -1) and found.match_len == 0
    assert len(expected) == num_nodes or missing


def test_a_missing_row_drops_what_hangs_below_it() -> None:
    rows = np.full((V, NUM_RANKS), -1, np.int32)
    rows[3] = np.arange(10, 18)
    rows[10] = [20, 21, -1, -1, -1, -1, -1, -1]
    found = template(52).fill(rows, 3)
    assert found is not None
    expected = [(10 + rank,) for rank in range(8)] + [(10, 20), (10, 21)]
    assert paths_of(found) == expected


def test_nothing_known_is_nothing() -> None:
    assert template(52).fill(np.full((V, NUM_RANKS), -1, np.int32), 3) is None
    assert template(52).fill(np.empty((0, NUM_RANKS), np.int32), 3) is None
    assert template(52).fill(np.empty((V, 0), np.int32), 3) is None


@pytest.mark.parametrize("root", [V, V + 7, -1, 2**31 - 1])
def test_a_root_that_has_no_row_has_no_successors(root: int) -> None:
    assert template(20).fill(random_rows(1), root) is None


def test_a_narrower_table_fills_what_it_can() -> None:
    rows = random_rows(2)[:, :2]
    found = template(52).fill(rows, 5)
    assert found is not None
    kept = [i for i, path in enumerate(by_hand(template(52), random_rows(2), 5)) if path]
    assert 0 < len(found.token_ids) < len(kept)
    first = [path for path in paths_of(found) if len(path) == 1]
    assert first == [(int(rows[5, 0]),), (int(rows[5, 1]),)]


def test_token_zero_is_a_token() -> None:
    found = template(4).fill(np.zeros((V, NUM_RANKS), np.int32), 0)
    assert found is not None and found.token_ids.tolist() == [0] * 4


def test_a_shape_is_left_as_it_is() -> None:
    shape = template(36)
    before = [a.copy() for a in (shape.parents, shape.ranks, shape.scores)]
    found = shape.fill(random_rows(4), 1)
    assert found is not None
    found.scores[:] = 0.0
    found.parents[:] = -1
    assert all(np.array_equal(a, b) for a, b in zip(before, (shape.parents, shape.ranks, shape.scores)))


def test_a_chain_below_any_node() -> None:
    """What a block drafter's cut chain is filled up with: the likeliest successor of the likeliest successor."""
    rows = random_rows(6)
    found = shape_of((1,) * 5).fill(rows, 9, at=4)
    assert found is not None and found.at == 4 and found.parents.tolist() == [-1, 0, 1, 2, 3]
    token = 9
    for said in found.token_ids.tolist():
        token = int(rows[token, 0])
        assert said == token
