"""Hints that tell gain, hints that do not gain nothing, and fitting them leaves all other weights alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longgraft.eval import hint_gain
from longgraft.eval.calibrate import HINT_TABLES, collect_hinted, fit_hints
from longgraft.eval.hint_gain import Setting, compare, interval_over, replay_hinted, rows_of
from longgraft.eval.hints import hints_of, save_hints
from longgraft.index.features import BASES, TABLES
from longgraft.index.weights import Weights
from tests.eval.thoughts import made_up
from tests.index.texts import both

pytestmark = both


@pytest.mark.parametrize("tell", [True, False])
def test_hints_that_tell_gain_and_hints_that_do_not_gain_nothing(tell: bool) -> None:
    texts = [hints_of(made_up(seed, tell), 1, 16) for seed in range(3)]
    setting = Setting(Weights(), None, (8, 16))
    rows = rows_of(texts, compare(texts, [setting.weights] * 3, setting), setting.budgets)
    assert [(row["family"], row["budget"]) for row in rows[-2:]] == [("pooled", 8), ("pooled", 16)]
    for row in rows[-2:]:
        mean, low, high = row["hints"]
        assert low <= mean <= high
        assert low > 0.3 if tell else high < 0.3
        assert row["strangers"][0] < 0.3


def test_all_arms_stand_at_the_same_roots() -> None:
    text, setting = hints_of(made_up(0, True), 1, 16), Setting(Weights(), None, (8,))
    roots = list(replay_hinted(text, setting, "plain"))
    assert roots[0] == 300 and roots == sorted(set(roots))
    for arm in ("plain", "hints"):
        assert list(replay_hinted(text, setting, arm, roots)) == roots


def test_only_tables_of_hints_are_fitted() -> None:
    start = Weights().values
    fitted = fit_hints(start, [collect_hinted(hints_of(made_up(1, True), 1, 16), None)])
    moved = np.flatnonzero(fitted != start)
    tables = [range(BASES[name], BASES[name] + TABLES[name]) for name in HINT_TABLES]
    assert len(moved) > 5
    assert all(any(i in table for table in tables) for i in moved)


def test_documents_are_drawn_whole() -> None:
    parts = [np.array([1, 1]), np.array([3]), np.array([3])]
    assert interval_over(parts, [0, 1, 1]) == [2.0, 1.0, 3.0]
    assert interval_over([np.full(9, 2)], [0]) == [2.0, 2.0, 2.0]


def test_one_document_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_hints(tmp_path / "a.npz", hints_of(made_up(1, True), 1, 16))
    assert hint_gain.main([str(tmp_path / "a.npz"), "--tokenizer", "none"]) == 2
    assert "one document" in capsys.readouterr().err
    assert hint_gain.main([str(tmp_path / "b.npz"), "--tokenizer", "none"]) == 2
    assert hint_gain.main([str(tmp_path / "a.npz"), "--tokenizer", "none", "--budget", "x"]) == 2
