"""Fitting of the quick ranking's hazards on small made-up traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.eval import calibrate_hazards as calibrate
from longgraft.eval.traces import Trace
from longgraft.index import rank
from tests.eval.drafting import edited_copies


def test_fit_recovers_the_hazards_it_was_given() -> None:
    rng = np.random.default_rng(0)
    base = rank.read_table()
    true = rank.priors_from(base)
    trials = rng.integers(0, 4000, rank.NUM_CELLS).astype(np.float64)
    hits = rng.binomial(trials.astype(np.int64), true).astype(np.float64)
    few = rng.random(rank.NUM_CELLS) < 0.3  # cells without trials are filled in by the additive form
    fitted = rank.priors_from(calibrate.fit(trials * few, hits * few, base))
    assert float(np.abs(fitted - true)[: rank.NUM_MATCH_CELLS].max()) < 0.1
    seen = np.flatnonzero(few)
    losses = [calibrate.log_loss(p[seen], trials[seen], hits[seen]) for p in (fitted, true)]
    assert losses[0] <= losses[1] + 1.0


def test_collect_counts_every_listed_entry() -> None:
    trace = Trace("f", "g", np.array([1, 2, 3, 1, 2, 3], np.int32), 5)
    trials, hits = calibrate.collect([trace])
    assert trials.sum() == hits.sum() == 1
    assert trials[: rank.NUM_MATCH_CELLS].sum() == 1


def test_cross_validation_improves_a_bad_table() -> None:
    traces = edited_copies(8)
    base = rank.read_table()
    trials, hits = calibrate.collect(traces)
    flat = rank.priors_from({**base, "bias": -6.0})
    fitted = calibrate.cross_validate(traces, base, 2, 8)
    assert fitted["nats_per_token"] < calibrate.log_loss(flat, trials, hits) / (8 * 150)
    assert fitted["acceptance_length"] > 3


def test_uniform_traces_are_refused_or_fitted() -> None:
    trials = np.zeros(rank.NUM_CELLS)
    trials[0] = 1.0
    with pytest.raises(GraftError, match="converge"):
        calibrate.fit_log_odds(np.full((1, 2), np.nan), trials[:1], trials[:1])


def test_command_line_writes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = edited_copies(4)
    monkeypatch.setattr(calibrate, "read_traces", lambda files, name: traces)
    table = tmp_path / "hazards.json"
    assert calibrate.main(["x", "--tokenizer", "t", "--out", str(table)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["traces"] == 4
    assert rank.load_priors(table).shape == (rank.NUM_CELLS,)
    missing = str(tmp_path / "none.json")
    assert calibrate.main(["x.jsonl", "--tokenizer", "t", "--out", "y", "--base", missing]) == 2
    assert "none.json" in capsys.readouterr().err
