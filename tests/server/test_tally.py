"""What an answer used and how it was made, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longgraft.config import Output
from longgraft.server.follow import Clock
from longgraft.server.tally import drafting, metrics, num_predicted, ours, timings, usage

STATS: dict[str, Any] = {
    "prefix_rows": 3,
    "accepted_by_round": [(4, 3), (0, 0), (2, 0)],
    "accepted_by_source": {"prompt": 2, "prediction": 1},
    "rounds": 3,
    "acceptance_length": 2.0,
    "why": "",
    "prefill_s": 0.5,
    "decode_s": 1.0,
    "nodes": 6,
    "accepted": 3,
}


def follower(tokens: int = 6, predicted: tuple[int, ...] = (), **stats: Any) -> Any:
    output = Output(
        tuple(range(tokens)), "text", "stop", 5, 10, (0,) * tokens, ((-1, -1),) * tokens, stats=STATS | stats
    )
    clock = Clock(asked=100.0, first=101.0, last=103.0)
    return SimpleNamespace(output=output, clock=clock, job=SimpleNamespace(predicted=predicted))


@pytest.mark.parametrize(
    ("predicted", "token_ids", "number"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 3, 1, 2, 3], 3),
        ([1, 2, 3], [9, 1, 2, 3], 3),
        # Something was put in between, something left out: four in a row make the place known again.
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 0, 0, 5, 6, 7, 8, 9], 7),
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 0, 5, 6, 7], 2),
        # A run that occurs twice is first taken where it goes on.
        ([1, 2, 3, 4, 0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 1, 2, 3, 4, 5], 9),
        ([7] * 5, [7] * 9, 5),
    ],
)
def test_predicted_tokens_count_once(predicted: list[int], token_ids: list[int], number: int) -> None:
    assert num_predicted(predicted, token_ids) == number


def test_a_long_repetitive_prediction_is_counted_at_once() -> None:
    assert num_predicted([1, 2] * 20_000, [2, 1] * 20_000) == 39_999


def test_usage_counts_a_prompt_once() -> None:
    values = usage([follower(6, (0, 1, 9)), follower(4)], choices=2)
    assert (values["prompt_tokens"], values["completion_tokens"], values["total_tokens"]) == (10, 10, 20)
    assert values["prompt_tokens_details"] == {"cached_tokens": 3}
    details = values["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (2, 1)


def test_drafting_leaves_rounds_without_proposals_out() -> None:
    output = follower().output
    values = drafting(output, 60, detailed=True)
    assert values == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": {"0": 1, "3": 1},
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 6,
        "num_spec_tokens": 60,
        "per_step_drafted": [4, 2],
        "per_step_accepted": [3, 0],
    }
    assert drafting(follower(accepted_by_round=[(0, 0)]).output, 60) is None


def test_times() -> None:
    values = metrics(follower(), 60, detailed=False)
    assert values["time_to_first_token_ms"] == 1000 and values["generation_time_ms"] == 2000
    assert values["queue_time_ms"] == 500 and values["mean_itl_ms"] == 400 and values["tokens_per_second"] == 3
    single = metrics(follower(1), 60, detailed=False)
    assert single["mean_itl_ms"] is None


def test_timings_leave_cached_tokens_out() -> None:
    values = timings(follower())
    assert (values["cache_n"], values["prompt_n"], values["predicted_n"]) == (3, 7, 6)
    assert values["prompt_ms"] == 500 and values["prompt_per_second"] == 14 and values["predicted_per_second"] == 3
    assert (values["draft_n"], values["draft_n_accepted"]) == (6, 3)


def test_sources_add_up() -> None:
    values = ours(follower().output)
    assert values["sources"] == {"prompt": 2, "prediction": 1, "drawn": 3} and values["finish_reason"] == "stop"
