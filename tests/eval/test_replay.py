"""Replay and calibration on small made-up traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.eval import calibrate
from longgraft.eval.baseline_draft import Draft
from longgraft.eval.baseline_lookup import NgramLookup
from longgraft.eval.baselines import BASELINES
from longgraft.eval.replay import IndexDrafter, Setting, main, replay, replay_setting, replay_settings
from longgraft.eval.tally import Tally, calibration
from longgraft.eval.traces import Trace
from longgraft.index.context_index import ContextIndex
from longgraft.index.weights import Weights, load_weights
from tests.eval.drafting import edited_copies


def test_replay_counts_by_hand() -> None:
    """Output 1 2 3 4: the first token is a bonus, 2 3 4 come as one accepted path."""
    trace = Trace("f", "g", np.array([1, 2, 3, 4, 9, 1, 2, 3, 4], np.int32), 5)
    tally = replay(IndexDrafter(ContextIndex(10, threshold=0.1)), trace, 8)
    assert (tally.steps, tally.tokens, tally.accepted) == (2, 4, 3)
    assert tally.nodes >= 3
    assert len(tally.seconds) == 2


def test_budget_bounds_acceptance() -> None:
    traces = edited_copies(4)
    small = replay_setting(setting("longgraft", 2), traces)["pooled"]
    large = replay_setting(setting("longgraft", 16), traces)["pooled"]
    assert small.tokens == large.tokens == 4 * 150
    assert small.tokens / small.steps <= 3
    assert 3 < large.tokens / large.steps <= 17
    assert small.nodes <= 2 * small.steps


def test_pooled_is_the_sum_of_families() -> None:
    tallies = replay_setting(setting("longgraft", 8), edited_copies(4))
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


def test_command_line_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.json")
    assert main(["x.jsonl", "--tokenizer", "t", "--weights", missing]) == 2
    assert "none.json" in capsys.readouterr().err


def test_command_line_ends_with_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = edited_copies(4)
    monkeypatch.setattr("longgraft.eval.replay.read_traces", lambda files, name: traces)
    monkeypatch.setattr(calibrate, "read_traces", lambda files, name: traces)
    monkeypatch.setattr("longgraft.eval.replay.kinds_of", lambda name, size: None)
    monkeypatch.setattr(calibrate, "kinds_of", lambda name, size: None)
    table = tmp_path / "weights.json"
    options = ["x", "--tokenizer", "t", "--out", str(table), "--folds", "2", "--budget", "4"]
    assert calibrate.main(options) == 0
    fitted = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert fitted["traces"] == 4
    assert {row["method"] for row in fitted["rows"]} == {"longgraft"}
    assert np.any(load_weights(table))
    assert (
        main(["x", "--tokenizer", "t", "--budget", "4,8", "--methods", "longgraft,pld", "--weights", str(table)]) == 0
    )
    shown = capsys.readouterr().out.splitlines()
    last = json.loads(shown[-1])
    keys = {"method", "family", "budget", "acceptance_length", "accepted_per_node", "draft_us_p50", "draft_us_p99"}
    assert all(keys <= set(row) for row in last["rows"])
    found = {(row["method"], row["family"], row["budget"]): row["acceptance_length"] for row in last["rows"]}
    assert set(found) == {
        (method, family, budget)
        for method in ("longgraft", "pld")
        for family in ("family 0", "family 1", "pooled")
        for budget in (4, 8)
    }
    assert found["longgraft", "pooled", 8] > found["pld", "pooled", 8] > 2
    assert {row["budget"] for row in last["calibration"]} == {4, 8}
    assert {"nodes", "predicted", "observed", "standard_error", "off"} <= set(last["calibration"][0])
    assert (last["traces"], last["output_tokens"]) == (4, 600)
    assert any(line.startswith("longgraft ") for line in shown)


def setting(method: str, budget: int) -> Setting:
    return Setting(method, budget, 61, Weights())


@pytest.mark.parametrize("method", [name for name in ("longgraft", *BASELINES) if not name.startswith("arctic")])
def test_every_method_replays(method: str) -> None:
    traces = edited_copies(2)
    tally = replay_setting(setting(method, 16), traces)["pooled"]
    assert tally.tokens == 300 and 20 <= tally.steps <= 300
    assert 300 <= tally.steps + tally.accepted <= 300 + len(traces)  # an output's last step may have no bonus token
    assert len(tally.seconds) == tally.steps
    assert tally.nodes <= 16 * tally.steps


def test_more_nodes_than_the_budget_are_refused() -> None:
    class Greedy(NgramLookup):
        def draft(self, budget: int) -> Draft:
            return super().draft(budget + 1)

    (trace,) = edited_copies(1)
    with pytest.raises(GraftError, match="Greedy drafted 9 nodes: expected 8 at most"):
        replay(Greedy(1, 2), trace, 8)


def test_no_budget_is_plain_decoding() -> None:
    for method in ("longgraft", "pld", "rest"):
        tally = replay_setting(setting(method, 0), edited_copies(1))["pooled"]
        assert (tally.steps, tally.tokens, tally.nodes, tally.accepted) == (150, 150, 0, 0)


def test_an_empty_prompt_and_one_token() -> None:
    trace = Trace("f", "g", np.array([5], np.int32), 0)
    for method in ("longgraft", *(name for name in BASELINES if not name.startswith("arctic"))):
        tally = replay_setting(setting(method, 4), [trace])["pooled"]
        assert (tally.steps, tally.tokens, tally.accepted) == (1, 1, 0)


def test_jobs_count_the_same() -> None:
    """In other interpreters, which import this package alone."""
    traces = edited_copies(5)
    settings = [setting("longgraft", 8), setting("sam", 8)]
    alone = list(replay_settings(settings, traces, 1))
    shared = list(replay_settings(settings, traces, 2))
    assert [found for found, _ in shared] == settings
    for (_, ours), (_, theirs) in zip(alone, shared):
        for family in ours:
            assert ours[family].summary()["acceptance_length"] == theirs[family].summary()["acceptance_length"]
            assert ours[family].nodes == theirs[family].nodes
            np.testing.assert_allclose(ours[family].bins, theirs[family].bins)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--methods", "best"], "method 'best' is unknown: expected one of longgraft, arctic"),
        (["--methods", ""], "method '' is unknown"),
        (["--budget", "16,x"], "budget '16,x': expected whole numbers from 0 to 4096"),
        (["--budget", "-1"], "expected whole numbers"),
        (["--budget", "99999999999"], "expected whole numbers from 0 to 4096"),
        (["--budget", ""], "expected whole numbers"),
        (["--threshold", "2"], "threshold is 2.0"),
        ([], "none.jsonl: No such file"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["none.jsonl", "--tokenizer", "none", *arguments]) == 2
    shown = capsys.readouterr()
    assert says in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longgraft.eval.replay.read_traces", interrupt)
    assert main(["x", "--tokenizer", "t"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
