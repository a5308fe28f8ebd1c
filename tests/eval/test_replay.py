"""Replay and calibration on small made-up traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.eval import calibrate
from longgraft.eval.replay import Tally, Trace, accepted_path, calibration, main, replay, replay_all
from longgraft.index import rank
from longgraft.index.context_index import ContextIndex
from longgraft.tree import Continuation


def edited_copies(count: int, seed: int = 0) -> list[Trace]:
    """Outputs that copy their prompt with one token in ten replaced."""
    rng = np.random.default_rng(seed)
    traces = []
    for number in range(count):
        prompt = rng.integers(0, 60, 150)
        output = np.where(rng.random(150) < 0.1, rng.integers(0, 60, 150), prompt)
        tokens = np.concatenate([prompt, [60], output]).astype(np.int32)
        traces.append(Trace(f"family {number % 2}", f"repository {number % 4}", tokens, 151))
    return traces


def tree(tokens: list[int], parents: list[int]) -> Continuation:
    n = len(tokens)
    return Continuation(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.zeros(n, np.float32),
        np.ones(n, np.int8),
        np.full((n, 2), -1, np.int32),
        np.zeros(n, np.int32),
    )


def test_accepted_path_follows_the_truth() -> None:
    found = tree([5, 6, 7, 8, 7], [-1, -1, 0, 1, 1])
    assert accepted_path(found, [6, 7, 9]) == [1, 4]
    assert accepted_path(found, [5, 7]) == [0, 2]
    assert accepted_path(found, [9]) == []
    assert accepted_path(found, []) == []


def test_replay_counts_by_hand() -> None:
    """Output 1 2 3 4: the first token is a bonus, 2 3 4 come as one accepted path."""
    trace = Trace("f", "g", np.array([1, 2, 3, 4, 9, 1, 2, 3, 4], np.int32), 5)
    tally = replay(ContextIndex(10, threshold=0.1), trace, 8)
    assert (tally.steps, tally.tokens, tally.accepted) == (2, 4, 3)
    assert tally.nodes >= 3
    assert len(tally.seconds) == 2


def test_budget_bounds_acceptance() -> None:
    traces = edited_copies(4)
    small = replay_all(traces, 2, rank.Ranking(), 0.002)["pooled"]
    large = replay_all(traces, 16, rank.Ranking(), 0.002)["pooled"]
    assert small.tokens == large.tokens == 4 * 150
    assert small.tokens / small.steps <= 3
    assert 3 < large.tokens / large.steps <= 17
    assert small.nodes <= 2 * small.steps


def test_pooled_is_the_sum_of_families() -> None:
    tallies = replay_all(edited_copies(4), 8, rank.Ranking(), 0.002)
    pooled = tallies.pop("pooled")
    both = Tally()
    for tally in tallies.values():
        both.add(tally)
    assert (both.steps, both.tokens, both.nodes, both.accepted) == (
        pooled.steps,
        pooled.tokens,
        pooled.nodes,
        pooled.accepted,
    )
    np.testing.assert_allclose(both.bins, pooled.bins)
    assert pooled.bins[:, 0].sum() == pooled.nodes
    assert pooled.bins[:, 2].sum() == pooled.accepted
    assert {row["from"] for row in calibration(pooled.bins)} >= {0.95}


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


def test_command_line_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.json")
    assert main(["x.jsonl", "--tokenizer", "t", "--hazards", missing]) == 2
    assert "none.json" in capsys.readouterr().err
    assert calibrate.main(["x.jsonl", "--tokenizer", "t", "--out", "y", "--base", missing]) == 2


def test_command_line_ends_with_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = edited_copies(4)
    monkeypatch.setattr("longgraft.eval.replay.read_traces", lambda files, name: traces)
    monkeypatch.setattr(calibrate, "read_traces", lambda files, name: traces)
    table = tmp_path / "hazards.json"
    assert calibrate.main(["x", "--tokenizer", "t", "--out", str(table)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["traces"] == 4
    assert main(["x", "--tokenizer", "t", "--budget", "4,8", "--hazards", str(table)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["budget"] for result in last["budgets"]] == [4, 8]
    assert last["budgets"][1]["families"]["pooled"]["acceptance_length"] > 3


def test_uniform_traces_are_refused_or_fitted() -> None:
    trials = np.zeros(rank.NUM_CELLS)
    trials[0] = 1.0
    with pytest.raises(GraftError, match="converge"):
        calibrate.fit_log_odds(np.full((1, 2), np.nan), trials[:1], trials[:1])
