"""Counting: accepted paths, sums, and the reliability diagram."""

from __future__ import annotations

import numpy as np
import pytest

from longgraft.eval.baseline_draft import chain, lists_of
from longgraft.eval.tally import PROBABILITY_EDGES, Tally, accepted_path, calibration


def test_accepted_path_follows_the_truth() -> None:
    tree = ([5, 6, 7, 8, 7], [-1, -1, 0, 1, 1])
    assert accepted_path(*tree, [6, 7, 9]) == [1, 4]
    assert accepted_path(*tree, [5, 7]) == [0, 2]
    assert accepted_path(*tree, [9]) == []
    assert accepted_path(*tree, []) == []
    assert accepted_path(*lists_of(chain([1, 2, 3])), [1, 2, 3]) == [0, 1, 2]
    assert accepted_path(*lists_of(None), [1]) == []
    assert len(chain([7] * 5000).parents) == 5000


def test_tallies_add_up() -> None:
    one = Tally(2, 5, 8, 3, [1e-6, 3e-6])
    two = Tally(1, 1, 0, 0, [2e-6])
    one.count_bins(np.log(np.array([0.5, 0.001], np.float32)), [0])
    two.add(one)
    assert (two.steps, two.tokens, two.nodes, two.accepted) == (3, 6, 8, 3)
    summary = two.summary()
    assert summary["acceptance_length"] == 2.0
    assert summary["accepted_per_node"] == pytest.approx(3 / 8)
    assert summary["draft_us_p50"] == 2.0
    assert two.bins[:, 0].sum() == 2 and two.bins[:, 2].sum() == 1
    assert Tally().summary()["acceptance_length"] == 0


def bins(nodes: int, predicted: float, observed: float) -> np.ndarray:
    counts = np.zeros((len(PROBABILITY_EDGES) + 1, 3))
    counts[8] = nodes, nodes * predicted, nodes * observed
    return counts


@pytest.mark.parametrize(
    "nodes, predicted, observed, off",
    [
        (1000, 0.45, 0.45, False),
        (1000, 0.45, 0.37, False),  # 0.05 + 2 x 0.0153 = 0.0805
        (1000, 0.45, 0.36, True),
        (1000, 0.45, 0.54, True),
        (999, 0.45, 0.2, False),  # too few to judge
        (100_000, 0.45, 0.39, True),
    ],
)
def test_bins_that_are_off(nodes: int, predicted: float, observed: float, off: bool) -> None:
    (row,) = calibration(bins(nodes, predicted, observed))
    assert row["nodes"] == nodes and row["from"] == 0.4
    assert row["standard_error"] == pytest.approx((observed * (1 - observed) / nodes) ** 0.5, abs=5e-5)
    assert row["off"] is off
