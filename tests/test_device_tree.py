"""Trees as tensors agree with trees that are walked: masks, depths, acceptance, clipping."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.device_tree import DeviceTree, ancestors, clipped
from longgraft.stop import StopRules
from longgraft.tree import Source, TokenTree, TreeBuilder
from tests.host_reads import no_host_reads

VOCAB = 6
FEW = settings(deadline=None, max_examples=40, derandomize=True)


def random_tree(seed: int, nodes: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    builder = TreeBuilder(int(rng.integers(VOCAB)))
    for _ in range(nodes):
        builder.add(int(rng.integers(len(builder))), int(rng.integers(VOCAB)), 0.0, Source.PROMPT)
    return builder.build()


def drafted(tree: TokenTree, garbage: int = 0) -> Any:
    """The columns of a draft, with entries behind its end that mean nothing."""
    more = np.full(garbage, 77, np.int32)
    return SimpleNamespace(
        num_nodes=torch.tensor([len(tree) - 1], dtype=torch.int32),
        token_ids=torch.from_numpy(np.concatenate([tree.token_ids[1:], more])),
        parents=torch.from_numpy(np.concatenate([tree.parents[1:] - 1, more])),
    )


@FEW
@given(st.integers(0, 999), st.integers(0, 70), st.integers(0, 5))
def test_masks_depths_and_acceptance(seed: int, nodes: int, garbage: int) -> None:
    tree = random_tree(seed, nodes)
    n, rows = len(tree), len(tree) + garbage
    ours = DeviceTree.of(torch.from_numpy(tree.token_ids[:1]), drafted(tree, garbage), rows, VOCAB)
    assert ours.is_node.tolist() == [True] * n + [False] * garbage
    np.testing.assert_array_equal(ours.mask[:n, :n].numpy(), tree.ancestor_mask())
    assert not ours.mask[:n, n:].any()
    np.testing.assert_array_equal(ours.depths[:n].numpy(), tree.depths)
    drawn = np.random.default_rng(seed).integers(0, VOCAB, rows)
    with no_host_reads():
        path, count = ours.agreed(torch.from_numpy(drawn))
    node: int | None = 0
    expected = list[int]()
    while node is not None:
        expected.append(node)
        node = tree.children()[node].get(int(drawn[node]))
    assert path[: int(count)].tolist() == expected


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_the_first_rows_of_a_draft_and_too_few(rows: int) -> None:
    tree = random_tree(3, 5)
    ours = DeviceTree.of(torch.from_numpy(tree.token_ids[:1]), drafted(tree), rows, VOCAB)
    assert len(ours) == rows and int(ours.is_node.sum()) == min(rows, len(tree))
    assert ours.token_ids[: len(tree)].tolist() == tree.token_ids[:rows].tolist()
    nothing = DeviceTree.of(torch.tensor([4]), None, rows, VOCAB)
    assert nothing.token_ids.tolist() == [4] + [0] * (rows - 1)
    assert nothing.agreed(torch.zeros(rows, dtype=torch.int64))[1].tolist() == [1]


def test_long_chains_and_stars() -> None:
    for parents in ([-1, *range(63)], [-1] + [0] * 63):
        mask = ancestors(torch.tensor(parents))
        assert mask[0].tolist() == [True] + [False] * 63
        assert mask[63].sum() == (64 if parents[2] == 1 else 2)


@FEW
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_clipping_is_the_stop_rules(tokens: list[int], data: st.DataObject) -> None:
    count, remaining = data.draw(st.integers(1, len(tokens))), data.draw(st.integers(1, 9))
    ends = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
    rules = StopRules(ends, (), remaining)
    expected = rules.clip(tokens[:count])
    kept, is_over = clipped(torch.tensor(tokens), torch.tensor([count]), torch.tensor(ends), torch.tensor([remaining]))
    assert tokens[: int(kept)] == expected
    assert bool(is_over) == (rules.finish_reason is not None)
