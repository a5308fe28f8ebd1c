"""A round's tree from a block: the kept chain, retrieval behind or round it, and never past the end of the text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longgraft.block_round import BlockGraft
from longgraft.tree import Source
from tests.test_block_graft import BLOCK, Marginals, Notes


def round_of(remaining: int, rows: int, thresholds: tuple[float, ...], **options: Any) -> tuple[Any, Notes]:
    index = Notes()
    seq = SimpleNamespace(root_token=0, index=index, stop=SimpleNamespace(remaining=remaining))
    make = BlockGraft(500, **options)
    budget = SimpleNamespace(rows=rows, thresholds=thresholds)
    return make(Marginals(BLOCK), seq, budget).build(), index  # type: ignore[arg-type]


def test_the_paper_fills_the_tail() -> None:
    tree, index = round_of(99, 16, (0.6, 0.1))
    assert index.asked == [(13, [1, 3], 2)]
    assert len(tree) == 16 and tree.is_chain
    assert tree.sources.tolist().count(Source.DRAFT) == 2


def test_round_it_retrieval_hangs_from_every_node() -> None:
    tree, index = round_of(99, 20, (0.0,), around=True)
    assert sum(budget for budget, _, _ in index.asked) == 15
    assert len({at for _, _, at in index.asked}) > 2 and len(tree) == 20


@pytest.mark.parametrize("remaining", [1, 2, 3, 5])
def test_nothing_is_proposed_past_the_end(remaining: int) -> None:
    tree, _ = round_of(remaining, 16, (0.0,))
    assert tree.depths.max() <= remaining - 1


@pytest.mark.parametrize(("rows", "thresholds"), [(1, (0.5,)), (2, (0.0,)), (16, (7.0,)), (16, ())])
def test_small_budgets_and_odd_thresholds(rows: int, thresholds: tuple[float, ...]) -> None:
    tree, _ = round_of(99, rows, thresholds)
    assert 1 <= len(tree) <= rows
    assert (Source.DRAFT in tree.sources) == (rows > 1 and thresholds != (7.0,))
