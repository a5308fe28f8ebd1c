from __future__ import annotations

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.index.successor_table import SuccessorTable


def test_allocates_only_when_fed() -> None:
    table = SuccessorTable(1000, 8)
    assert table.rows is None
    assert table.memory_bytes == 0
    table.extend([], np.zeros((0, 8), np.int32))
    assert table.rows is None
    table.extend([3], [[5, 4, 3]])
    assert table.memory_bytes == 4 * 1000 * 8
    table.reset()
    assert table.rows is None


def test_token_zero_is_ordinary_and_missing_is_minus_one() -> None:
    table = SuccessorTable(10, 4)
    table.extend([0, 9], [[0, 1], [9, 0]])
    assert table.rows is not None
    assert table.rows[0].tolist() == [0, 1, -1, -1]
    assert table.rows[9].tolist() == [9, 0, -1, -1]
    assert np.all(table.rows[1:9] == -1)


def test_last_row_wins_and_shorter_rows_empty_the_rest() -> None:
    table = SuccessorTable(10, 3)
    table.extend([2, 2], [[1, 2, 3, 4], [4, 5, 6, 7]])
    assert table.rows is not None
    assert table.rows[2].tolist() == [4, 5, 6]
    table.extend([2], [[8]])
    assert table.rows[2].tolist() == [8, -1, -1]


@pytest.mark.parametrize(
    ("tokens", "top"),
    [([10], [[1]]), ([-1], [[1]]), ([1], [[10]]), ([1], [[-2]]), ([1, 2], [[1]]), ([1], [1]), ([1.0], [[1]])],
)
def test_refuses_what_does_not_fit(tokens: list[int], top: list[list[int]]) -> None:
    table = SuccessorTable(10, 3)
    with pytest.raises(GraftError, match="successor"):
        table.extend(tokens, top)
    assert table.rows is None


def test_refuses_an_empty_shape() -> None:
    with pytest.raises(GraftError, match="at least"):
        SuccessorTable(0)
