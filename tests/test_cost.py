"""The cost of rounds: fitted, saved, learnt; and the choice it makes, against trying everything."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.cost import LEARNING_RATE, MARGIN, MAX_STEP, PLAIN_EVERY, ROW_BUCKETS, CostTable

BUCKETS = np.array(ROW_BUCKETS, np.float64)


def table_of(fixed: Any, slope: Any = 0.0, frozen: bool = False) -> CostTable:
    shape = len(ROW_BUCKETS)
    return CostTable(np.broadcast_to(fixed, shape).astype(float), np.broadcast_to(slope, shape).astype(float), frozen)


def stairs(frozen: bool = False) -> CostTable:
    """Costs with steps, as kernels have them."""
    return table_of([1.0, 1.9, 1.9, 2.0, 2.05, 3.4, 3.4, 3.5, 6.0], 1e-4, frozen)


# Round costs ----------------------------------------------------------------------------------------------------

costs = st.lists(st.floats(1e-4, 10.0), min_size=len(ROW_BUCKETS), max_size=len(ROW_BUCKETS))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(costs, costs, costs, st.integers(0, 10**6))
def test_a_wider_round_never_costs_less(
    fixed: list[float], slope: list[float], correction: list[float], context: int
) -> None:
    table = table_of(fixed, np.array(slope) * 1e-4)
    table.correction = np.array(correction)
    seconds = table.rounds(200, context)
    assert len(seconds) == 200 and np.all(np.diff(seconds) >= 0) and np.all(seconds > 0)
    assert np.allclose(table.rounds(7, context), seconds[:7]), "the cost of 7 rows depends on how many were asked for"


def test_costs_are_met_at_the_buckets_and_interpolated_between() -> None:
    seconds = stairs().rounds(64, 1000)
    at_buckets = seconds[BUCKETS.astype(int) - 1]
    assert at_buckets == pytest.approx(stairs().fixed + 0.1)
    assert seconds[19] == pytest.approx((at_buckets[4] + at_buckets[5]) / 2), "20 rows lie between 16 and 24"


def test_beyond_the_last_bucket_cost_is_proportional() -> None:
    seconds = stairs().rounds(256, 0)
    assert seconds[127] == pytest.approx(12.0) and seconds[255] == pytest.approx(24.0)


def test_cost_grows_with_the_context() -> None:
    assert stairs().rounds(1, 10_000)[0] == pytest.approx(2.0)


# Choice -----------------------------------------------------------------------------------------------------------


def best_by_trying(table: CostTable, trees: list[list[float]], contexts: list[int]) -> tuple[float, float]:
    """Return (best value of any choice, value of plain rounds), in expected tokens per second."""
    gains = [sorted(np.exp(np.asarray(tree[1:], np.float64)).tolist(), reverse=True) for tree in trees]
    seconds = table.rounds(sum(map(len, trees)), sum(contexts) // len(contexts))
    best = 0.0
    for counts in itertools.product(*(range(len(tree)) for tree in trees)):
        tokens = len(trees) + sum(sum(g[:k]) for g, k in zip(gains, counts))
        best = max(best, tokens / seconds[len(trees) + sum(counts) - 1])
    return best, len(trees) / seconds[len(trees) - 1]


def value_of(table: CostTable, trees: list[list[float]], contexts: list[int], counts: list[int]) -> float:
    tokens = sum(sum(sorted(np.exp(np.asarray(tree, np.float64)), reverse=True)[:n]) for tree, n in zip(trees, counts))
    return float(tokens / table.rounds(sum(counts), sum(contexts) // len(contexts))[-1])


drafts = st.lists(st.floats(-6.0, 0.0), max_size=7).map(lambda scores: [0.0, *scores])
TABLES = {
    "free": table_of(1.0, frozen=True),
    "steep": table_of(BUCKETS, frozen=True),
    "gentle": table_of(1.0 + 0.05 * BUCKETS, frozen=True),
    "doubling": table_of(np.where(BUCKETS > 1, 2.0, 1.0), frozen=True),
    "stairs": stairs(frozen=True),
}


@pytest.mark.parametrize("name", TABLES)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(trees=st.lists(drafts, min_size=1, max_size=3), context=st.integers(0, 20_000))
def test_the_choice_is_the_best_of_all(name: str, trees: list[list[float]], context: int) -> None:
    table, contexts = TABLES[name], [context] * len(trees)
    counts = table.choose(trees, contexts)
    assert all(1 <= count <= len(tree) for count, tree in zip(counts, trees))
    best, plain = best_by_trying(table, trees, contexts)
    if best < MARGIN * plain * (1 - 1e-12):
        assert counts == [1] * len(trees), "drafting did not pay by the margin"
    elif best > MARGIN * plain * (1 + 1e-12):
        assert value_of(table, trees, contexts, counts) == pytest.approx(best)


def test_nothing_proposed_is_a_plain_round() -> None:
    assert stairs().choose([[0.0]], [100]) == [1]
    assert stairs().choose([[0.0], [0.0]], [100, 7]) == [1, 1]


def test_rows_go_to_the_tree_that_uses_them_best() -> None:
    """Two rows are as dear as sixteen, more cost a fortune: sequences compete for those."""
    table = table_of([1.0, 1.1, 1.1, 1.1, 1.1, 9e9, 9e9, 9e9, 9e9])
    sure, unsure = [0.0] + [-0.1] * 20, [0.0] + [-3.0] * 20
    assert table.choose([sure, unsure], [10, 10]) == [15, 1]
    assert table.choose([unsure, sure], [10, 10]) == [1, 15]
    assert sum(table.choose([sure, sure], [10, 10])) == 16


def test_a_step_in_the_cost_is_jumped_over() -> None:
    """From one row to two the cost doubles, further rows are free: one node does not pay, many do."""
    assert TABLES["doubling"].choose([[0.0, -0.5]], [0]) == [1]
    assert TABLES["doubling"].choose([[0.0] + [-0.5] * 9], [0]) == [10]


def test_a_gain_within_the_noise_of_timing_is_not_taken() -> None:
    table = table_of(1.0 + 0.5 * (BUCKETS - 1))
    just_below, just_above = (math.log(1.5 * margin - 1) for margin in (MARGIN - 1e-3, MARGIN + 1e-3))
    assert table.choose([[0.0, just_below]], [0]) == [1]
    assert table.choose([[0.0, just_above]], [0]) == [2]


def test_kept_promises_count_in_full_and_broken_ones_less() -> None:
    table, tree = table_of(1.0 + 0.5 * (BUCKETS - 1)), [0.0, -0.2, -0.4, -0.5]
    assert table.choose([tree], [0]) == table.choose([tree], [0], [1.0]) == [3]
    assert table.choose([tree], [0], [0.1]) == [1]
    counts = table_of([1.0, 1.0, 1.0, 9.0] + [99.0] * 5).choose([tree, tree], [0, 0], [0.2, 0.9])
    assert counts == [1, 3], "rows go to the sequence that keeps its promises"


def chosen(table: CostTable, scores: list[list[float]], rounds: int) -> list[bool]:
    """Return which of so many rounds are plain, each one as dear as the table thinks."""
    plain = []
    for _ in range(rounds):
        counts = table.choose(scores, [100] * len(scores))
        plain.append(sum(counts) == len(scores))
        table.learn(sum(counts), 100, float(table.rounds(sum(counts), 100)[-1]))
    return plain


@pytest.mark.parametrize("batch", [1, 3])
def test_a_small_gain_is_checked_by_a_plain_round_now_and_then(batch: int) -> None:
    """If plain rounds are thought too dear, one has to be run to find out."""
    small, large = [0.0, math.log(0.2)], [0.0, math.log(0.9)]
    plain = chosen(table_of(1.0), [small] * batch, 60)
    assert 1 <= plain.count(True) <= 60 / PLAIN_EVERY
    assert not any(chosen(table_of(1.0), [large] * batch, 60)), "a large gain needs no check"
    assert not any(chosen(table_of(1.0, frozen=True), [small] * batch, 60)), "a frozen table checks nothing"


def test_an_overestimated_plain_round_is_found_out() -> None:
    """Plain rounds really cost half of what the table says; then drafting for 20 % does not pay."""
    table = table_of(1.0)
    history = []
    for _ in range(600):
        (count,) = table.choose([[0.0, math.log(0.2)]], [0])
        history.append(count)
        table.learn(count, 0, 0.5 if count == 1 else 1.0)
    assert history[-100:].count(1) == 100


# Learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 16, 40, 64])
def test_learning_finds_the_true_cost(rows: int) -> None:
    table = stairs()
    for _ in range(200):
        table.learn(rows, 3000, 4.0)
    assert table.rounds(rows, 3000)[-1] == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize("seconds", [1e9, 1e-9, 0.0, math.inf])
def test_one_hiccup_moves_little(seconds: float) -> None:
    table = stairs()
    before = table.rounds(64, 500)
    table.learn(8, 500, seconds)
    ratio = table.rounds(64, 500) / before
    bound = MAX_STEP**LEARNING_RATE + 1e-9
    assert np.all(ratio <= bound) and np.all(ratio >= 1 / bound)
    assert bound < 1.05


def test_rare_outliers_do_not_move_the_mean() -> None:
    table, rng = stairs(), np.random.default_rng(0)
    true = float(table.rounds(4, 0)[-1])
    for step in range(600):
        table.learn(4, 0, true * (30.0 if step % 25 == 0 else rng.uniform(0.95, 1.05)))
    assert table.rounds(4, 0)[-1] == pytest.approx(true, rel=0.12)


def test_only_near_widths_learn() -> None:
    table = stairs()
    for _ in range(50):
        table.learn(16, 0, 100.0)
    assert table.correction[4] > 2
    assert table.correction[[0, 1, 2, 3, 5, 6, 7, 8]] == pytest.approx(1.0)


@pytest.mark.parametrize("rows", [0, 65, 1000])
def test_widths_outside_the_table_teach_nothing(rows: int) -> None:
    table = stairs()
    table.learn(rows, 0, 77.0)
    assert np.all(table.correction == 1.0)


def test_a_frozen_table_does_not_learn() -> None:
    table = table_of(1.0, frozen=True)
    table.learn(1, 0, 99.0)
    assert table.rounds(3, 0).tolist() == [1.0] * 3


# Files ------------------------------------------------------------------------------------------------------------


def test_a_saved_table_comes_back_frozen(tmp_path: Path) -> None:
    table = stairs()
    for rows in (1, 3, 30):
        table.learn(rows, 100, 5.0)
    table.save(tmp_path / "costs.json")
    again = CostTable.load(tmp_path / "costs.json")
    assert again.frozen and not table.frozen
    for context in (0, 100, 50_000):
        assert again.rounds(300, context) == pytest.approx(table.rounds(300, context))
    again.save(tmp_path / "twice.json")
    assert (tmp_path / "twice.json").read_text() == (tmp_path / "costs.json").read_text()


def rows_of(**changes: Any) -> dict[str, Any]:
    return {"longgraft_cost_table": 1, "rows_fixed_slope": [[n, 1.0, 0.0] for n in ROW_BUCKETS], **changes}


def one_bad(column: int, value: Any) -> dict[str, Any]:
    table: list[list[Any]] = [[n, 1.0, 0.0] for n in ROW_BUCKETS]
    table[3][column] = value
    return rows_of(rows_fixed_slope=table)


CORRUPT: dict[str, str] = {
    "empty": "",
    "not json": "{",
    "a list": "[]",
    "a number": "3",
    "nothing in it": "{}",
    "another version": json.dumps(rows_of(longgraft_cost_table=2)),
    "no version": json.dumps({"rows_fixed_slope": rows_of()["rows_fixed_slope"]}),
    "too few rows": json.dumps(rows_of(rows_fixed_slope=[[1, 1.0, 0.0]])),
    "flat": json.dumps(rows_of(rows_fixed_slope=[1.0] * 27)),
    "ragged": json.dumps(rows_of(rows_fixed_slope=[[1, 1.0], [2, 1.0, 0.0]])),
    "too narrow": json.dumps(rows_of(rows_fixed_slope=[[n, 1.0] for n in ROW_BUCKETS])),
    "words": json.dumps(one_bad(1, "fast")),
    "null": json.dumps(one_bad(1, None)),
    "free": json.dumps(one_bad(1, 0.0)),
    "negative": json.dumps(one_bad(1, -1.0)),
    "cheaper with context": json.dumps(one_bad(2, -1e-6)),
    "NaN": json.dumps(one_bad(2, math.nan)),
    "infinite": json.dumps(one_bad(1, math.inf)),
    "other buckets": json.dumps(one_bad(0, 7)),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(CORRUPT[name])
    with pytest.raises(GraftError, match=r"costs\.json: not a longgraft cost table of version 1"):
        CostTable.load(path)


def test_an_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", tmp_path, tmp_path / "binary.json"):
        with pytest.raises(GraftError, match="not a longgraft cost table"):
            CostTable.load(path)


# Fitting ----------------------------------------------------------------------------------------------------------


def test_a_fit_goes_through_its_measurements() -> None:
    def seconds(rows: int, context: int) -> float:
        return 0.010 + 0.001 * rows + 1e-7 * rows * context

    times = {(n, 100): seconds(n, 100) for n in (1, 2, 4, 8, 16, 32, 64)}
    times |= {(n, 2000): seconds(n, 2000) for n in (1, 16)}
    table = CostTable.fit(times)
    assert not table.frozen
    for context in (100, 2000, 30_000):
        expected = [seconds(n, context) for n in range(1, 65)]
        assert table.rounds(64, context) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "times",
    [
        {(1, 10): 2.0, (2, 10): 1.0, (4, 10): 3.0, (64, 10): 0.5},  # wider was measured quicker
        {(1, 10): 2.0, (16, 10): 3.0, (1, 900): 1.0, (16, 900): 2.0},  # a longer context was measured quicker
        {(1, 10): 1.0},
        {(1, 0): 1e-12, (1, 5): 1.0},
    ],
)
def test_noisy_measurements_give_a_sane_table(times: dict[tuple[int, int], float]) -> None:
    table = CostTable.fit(times)
    short, long = table.rounds(70, 10), table.rounds(70, 100_000)
    assert np.all(short > 0) and np.all(np.diff(short) >= 0) and np.all(np.diff(long) >= 0)
    assert np.all(long >= short), "a longer context never costs less"


def test_a_drafters_costs_lie_in_the_same_file(tmp_path: Path) -> None:
    ours, theirs = CostTable.fit({(1, 10): 1.0, (64, 10): 3.0}), CostTable.fit({(1, 10): 0.1, (64, 10): 0.2})
    path = tmp_path / "costs.json"
    ours.save(path)
    assert CostTable.load_drafter(path) is None
    ours.save(path, theirs)
    again = CostTable.load_drafter(path)
    assert again is not None and again.frozen
    assert again.rounds(64, 5) == pytest.approx(theirs.rounds(64, 5))
    assert CostTable.load(path).rounds(64, 5) == pytest.approx(ours.rounds(64, 5))
    path.write_text("{")
    with pytest.raises(GraftError, match="not a longgraft cost table"):
        CostTable.load_drafter(path)
