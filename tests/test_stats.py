"""The metrics by their definitions, on rounds made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longgraft.stats import Stats, shared_stage
from longgraft.tree import Source, TokenTree, TreeBuilder


def tree() -> TokenTree:
    """Root with children 1 (prompt) and 2 (successor); 3 (prompt) below 2, 4 (history) below 3."""
    builder = TreeBuilder(9)
    for parent, token, source in (
        (0, 5, Source.PROMPT),
        (0, 6, Source.SUCCESSOR),
        (2, 7, Source.PROMPT),
        (3, 8, Source.HISTORY),
    ):
        builder.add(parent, token, -0.1, source)
    return builder.build()


def bare() -> TokenTree:
    return TreeBuilder(9).build()


@pytest.fixture
def stats() -> Stats:
    """Three rounds: a path of three by the second child, nothing accepted, a plain round."""
    made = Stats(prompt_tokens=100)
    made.record(tree(), [2, 3, 4], 4)
    made.record(tree(), [], 1)
    made.record(bare(), [], 1)
    return made


def test_acceptance_length_counts_the_bonus_and_every_round(stats: Stats) -> None:
    summary = stats.summary()
    assert stats.new_tokens == summary["new_tokens"] == 6
    assert stats.acceptance_length == summary["acceptance_length"] == pytest.approx(6 / 3)
    assert summary["acceptance_length_drafted"] == pytest.approx(5 / 2), "over drafted rounds only"
    assert (summary["rounds"], summary["drafted_rounds"]) == (3, 2)


def test_nodes_and_accepted_do_not_count_the_root(stats: Stats) -> None:
    summary = stats.summary()
    assert (summary["nodes"], summary["accepted"]) == (8, 3)
    assert summary["nodes_by_source"] == {"prompt": 4, "history": 2, "successor": 2}
    assert summary["accepted_by_source"] == {"prompt": 1, "history": 1, "successor": 1}
    assert summary["nodes_by_depth"] == {1: 4, 2: 2, 3: 2}
    assert summary["accepted_by_depth"] == {1: 1, 2: 1, 3: 1}
    assert summary["accepted_by_round"] == [(4, 3), (4, 0), (0, 0)]
    assert summary["new_tokens_by_round"] == [4, 1, 1]


def test_a_later_sibling_is_counted_once_a_round(stats: Stats) -> None:
    assert stats.summary()["sibling_rounds"] == 1
    stats.record(tree(), [1], 2)
    assert stats.summary()["sibling_rounds"] == 1, "node 1 is the first child of the root"


def test_times_add_up_by_stage(stats: Stats) -> None:
    stats.prefilled_tokens = 99
    stats.seconds.update(prefill=2.0, plan=0.1, verify=0.5, accept=0.1, extend=0.3, index=0.2, total=4.0)
    summary = stats.summary()
    assert summary["decode_s"] == pytest.approx(1.0)
    assert summary["decode_tokens_per_s"] == pytest.approx(6.0)
    assert summary["prefill_tokens_per_s"] == pytest.approx(49.5)
    assert summary["end_to_end_s"] == 4.0
    assert summary["seconds_by_stage"] == {
        "accept": 0.1, "extend": 0.3, "index": 0.2, "plan": 0.1, "prefill": 2.0, "verify": 0.5
    }  # fmt: skip


def test_a_stage_is_timed_on_every_way_out() -> None:
    one, other = Stats(), Stats()
    with one.stage("verify"):
        pass
    first = one.seconds["verify"]
    with pytest.raises(KeyError), shared_stage([one, other], "verify"):
        raise KeyError
    assert one.seconds["verify"] > first > 0 and other.seconds["verify"] > 0


def test_nothing_is_divided_by_zero() -> None:
    summary = Stats(prompt_tokens=3).summary()
    assert summary["acceptance_length"] == summary["decode_tokens_per_s"] == summary["prefill_tokens_per_s"] == 0.0
    assert summary["why"] == "nothing was generated"


def test_summary_is_json(stats: Stats) -> None:
    stats.seconds["total"] = 1.0
    assert json.loads(json.dumps(stats.summary()))["new_tokens"] == 6


def slow(record: list[tuple[TokenTree, list[int], int]], **seconds: float) -> str:
    stats = Stats()
    for entry in record:
        stats.record(*entry)
    stats.seconds.update(seconds)
    return stats.why()


CASES: dict[str, tuple[Any, str]] = {
    "quick": ([(tree(), [2, 3, 4], 4)], ""),
    "exactly two a pass": ([(tree(), [1], 2)], ""),
    "plain": ([(bare(), [], 1)] * 4, "no proposal was worth its cost"),
    "wrong": ([(tree(), [], 1), (tree(), [1], 2)], "1 of 8 proposed tokens were right"),
}


@pytest.mark.parametrize("name", CASES)
def test_why_the_speed_up_was_small(name: str) -> None:
    rounds, sentence = CASES[name]
    said = slow(rounds, prefill=1.0, verify=1.0)
    assert said.startswith(sentence) and bool(said) == bool(sentence)


def test_why_names_the_prompt_first() -> None:
    """However much was accepted, drafting cannot shorten the reading of the prompt."""
    assert "reading the prompt" in slow([(tree(), [2, 3, 4], 4)], prefill=2.1, verify=1.0)
    assert slow([(tree(), [2, 3, 4], 4)], prefill=1.9, verify=1.0) == ""
