"""Bins and tables: every cell that can be met lies in its table."""

from __future__ import annotations

import pytest

from longgraft.index.copying import Copy
from longgraft.index.features import (
    BASES,
    COUNT_EDGES,
    MAX_ROW,
    NO_DISTANCE,
    NUM_CLASSES,
    NUM_WEIGHTS,
    SHARE_EDGES,
    TABLES,
    distance_bin,
    share_cell,
    source_cell,
)


def test_tables_follow_one_another() -> None:
    ends = [BASES[name] + size for name, size in TABLES.items()]
    assert list(BASES.values()) == [0, *ends[:-1]]
    assert ends[-1] == NUM_WEIGHTS == 1419
    assert TABLES["classes"] == TABLES["recent_classes"] == NUM_CLASSES**2
    assert TABLES["row"] == 1 + MAX_ROW


@pytest.mark.parametrize(
    ("distance", "bin_"),
    [
        *[(0, 0), (1, 1), (2, 2), (4, 2), (5, 3), (16, 3), (17, 4), (64, 4), (65, 5), (256, 5), (257, 8)],
        *[(-1, 6), (-4, 6), (-5, 7), (-64, 7), (-65, 8), (-(1 << 31), 8), (1 << 31, 8), (NO_DISTANCE, 8)],
    ],
)
def test_distances(distance: int, bin_: int) -> None:
    assert distance_bin(distance) == bin_


def test_shares() -> None:
    assert share_cell(0, 0) == 0
    assert share_cell(0, 20) == len(COUNT_EDGES)
    assert share_cell(7, 7) == TABLES["share1"] - 2
    assert share_cell(17, 17) == (len(SHARE_EDGES) + 1) * (len(COUNT_EDGES) + 1) - 1 == TABLES["share1"] - 1
    assert all(0 <= share_cell(c, t) < TABLES["share1"] for t in range(40) for c in range(t + 1))


def test_how_long_a_copy_goes_on_or_is_lost() -> None:
    assert [source_cell(Copy(run=run)) for run in (0, 1, 2, 31, 32, 999)] == [0, 1, 2, 5, 6, 6]
    assert [source_cell(Copy(run=5, lost=lost)) for lost in (1, 2, 12, 500)] == [7, 8, 13, 13]
