"""Many requests in little memory, and how they end: who waits, who is put back, deadlines; nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import longgraft.admission as admission
from longgraft.scheduler import MOST_PASSED
from tests import engines
from tests.batches import (
    NEW,
    OPEN,
    alone,
    finish,
    is_whole,
    opened,
    scheduler_for,
    small,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


# Memory -------------------------------------------------------------------------------------------------------------


def test_the_youngest_is_put_back_and_its_tokens_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HEADROOM", 0)
    engine = small(8, max_nodes=2)
    scheduler = scheduler_for(engine)
    requests = [scheduler.add(opened(engine, 17, seed, max_new_tokens=60)) for seed in range(3)]
    ended = finish(scheduler)
    assert [tuple(r.seq.new_token_ids) for r in requests] == [alone(17, seed, new=60) for seed in range(3)]
    assert requests[0].seq.stats.put_back == 0 < requests[2].seq.stats.put_back
    assert ended[0] is requests[0]
    assert requests[2].seq.stats.prefilled_tokens > 16
    assert engine.output(requests[2].seq).stats["put_back"] == requests[2].seq.stats.put_back
    assert is_whole(engine)


def test_who_does_not_fit_is_passed_only_so_often() -> None:
    engine = small(12, prefix_cache=False)
    scheduler = scheduler_for(engine)
    running = scheduler.add(opened(engine, 60, max_new_tokens=40))
    scheduler.step()
    large = scheduler.add(opened(engine, 150))
    small_ones = [scheduler.add(opened(engine, 2, max_new_tokens=2)) for _ in range(MOST_PASSED + 4)]
    ended = finish(scheduler)
    passed = set(ended[: ended.index(running)]) & set(small_ones)
    assert len(passed) == large.passed == MOST_PASSED
    assert tuple(large.seq.new_token_ids) == alone(150, 0)


def test_no_more_run_at_a_time_than_allowed() -> None:
    engine = small(max_batch=2)
    scheduler = scheduler_for(engine)
    requests = [scheduler.add(opened(engine, 17, seed % 3)) for seed in range(5)]
    while scheduler.has_work:
        scheduler.step()
        assert len(scheduler.running) <= 2
    assert [tuple(r.seq.new_token_ids) for r in requests] == [alone(17, seed % 3) for seed in range(5)]


def test_a_pool_that_somebody_else_fills_is_one_clear_error() -> None:
    engine = small(12)
    held = engine.pool.allocate(9)
    scheduler = scheduler_for(engine)
    large, tiny = scheduler.add(opened(engine, 130)), scheduler.add(opened(engine, 2))
    finish(scheduler)
    assert large.failure is not None and "KV pool" in str(large.failure.sentence())
    assert tuple(tiny.seq.new_token_ids) == alone(2, 0)
    engine.pool.release(held)
    assert is_whole(engine)


# Ends ---------------------------------------------------------------------------------------------------------------


def test_deadlines_end_requests_that_wait_and_that_run() -> None:
    engine = small(max_batch=1)
    scheduler = scheduler_for(engine)
    first = scheduler.add(opened(engine, 17), deadline=3600)
    late = scheduler.add(opened(engine, 17), deadline=0)
    assert scheduler.step() == [late]
    for _ in range(3):
        scheduler.step()
    first.deadline = 0.0
    assert finish(scheduler) == [first]
    outputs = [engine.output(request.seq) for request in (first, late)]
    assert [output.finish_reason for output in outputs] == ["deadline"] * 2
    assert 0 < len(outputs[0].token_ids) < NEW and outputs[1].token_ids == ()
    assert outputs[0].token_ids == alone(17, 0)[: len(outputs[0].token_ids)]
    assert is_whole(engine)


def test_cancelling_twice_or_afterwards_changes_nothing() -> None:
    engine = small()
    scheduler = scheduler_for(engine)
    request = scheduler.add(opened(engine, 17))
    finish(scheduler)
    scheduler.cancel(request)
    assert engine.output(request.seq).finish_reason == "length" and not scheduler.has_work
    request = scheduler.add(opened(engine, 17))
    scheduler.cancel(request)
    scheduler.cancel(request)
    assert finish(scheduler) == [request] and engine.output(request.seq).finish_reason == "cancelled"


def test_the_model_is_given_back_when_nothing_is_left() -> None:
    engine = small()
    scheduler = scheduler_for(engine)
    for _ in range(2):
        scheduler.add(opened(engine, 17))
        scheduler.step()
        assert not is_whole(engine)
        finish(scheduler)
        assert is_whole(engine)
    scheduler.add(opened(engine, 17))
    scheduler.step()
    scheduler.close()
    assert is_whole(engine)
