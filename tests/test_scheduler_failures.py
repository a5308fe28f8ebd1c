"""What fails in one request, in a forward or in the scheduler itself ends only whom it concerns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.engine import Engine
from longgraft.request import Request
from tests import engines
from tests.batches import (
    OPEN,
    alone,
    drafter_of,
    finish,
    is_whole,
    opened,
    scheduler_for,
    small,
)
from tests.small_tokenizers import byte_level
from tests.truths import Trouble, trouble


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


# Failures -----------------------------------------------------------------------------------------------------------


def break_index(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request.seq.index, "draft", trouble)


def break_learning(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    extend = request.seq.index.extend
    patch.setattr(request.seq.index, "extend", lambda ids, learn: trouble() if learn else extend(ids, learn=False))


def break_reading_into_index(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request.seq.index, "extend", trouble)


def break_sampler(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request.seq.sampler, "draw", trouble)


def break_tokenizer(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request.seq.stop, "clip", trouble)


def break_receiver(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    request.on_tokens = trouble


def break_progress(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    request.progress = trouble


def break_history(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    close = engine.retrieval.close
    patch.setattr(engine.retrieval, "close", lambda seq: trouble() if seq is request.seq else close(seq))


def _break_drafter(name: str) -> Callable[..., None]:
    def breaking(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
        call = getattr(engine.drafter, name)

        def maybe(sequence: Any, *rest: Any) -> Any:
            done = call(sequence, *rest)
            return trouble() if sequence is request.seq else done

        patch.setattr(engine.drafter, name, maybe)

    return breaking


def break_target(engine: Engine, request: Request, patch: pytest.MonkeyPatch) -> None:
    forward = engine.target.forward

    def failing(segments: Any, **options: Any) -> Any:
        done = forward(segments, **options)
        return trouble() if any(segment.cache is request.seq.cache for segment in segments) else done

    patch.setattr(engine.target, "forward", failing)


BREAKING: dict[str, Callable[..., None]] = {
    "index": break_index,
    "learning": break_learning,
    "reading into the index": break_reading_into_index,
    "sampler": break_sampler,
    "tokenizer": break_tokenizer,
    "receiver": break_receiver,
    "progress": break_progress,
    "history": break_history,
    "drafter begin": _break_drafter("begin"),
    "drafter extend": _break_drafter("extend"),
    "drafter prefill": _break_drafter("prefill"),
    "drafter reset": _break_drafter("reset"),
    "target": break_target,
}


@pytest.mark.parametrize("where", BREAKING)
def test_a_failure_ends_nobody_else(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(drafter=drafter_of("eagle"), tokenizer=byte_level())
    scheduler = scheduler_for(engine)
    policies = ("paper", "adaptive", "dense")
    requests = [scheduler.add(opened(engine, 60, seed, policy)) for seed, policy in enumerate(policies)]
    with monkeypatch.context() as patch:
        BREAKING[where](engine, requests[1], patch)
        ended = finish(scheduler)
    assert set(ended) == set(requests)
    for number in (0, 2):
        assert requests[number].failure is None
        assert tuple(requests[number].seq.new_token_ids) == alone(60, number)
    assert requests[1].failure is not None
    error = requests[1].failure.sentence()
    assert isinstance(error, GraftError) and "Trouble: injected" in str(error)
    new = requests[1].seq.new_token_ids
    assert tuple(new) == alone(60, 1)[: len(new)]
    assert is_whole(engine)
    again = scheduler.add(opened(engine, 60, 1))
    finish(scheduler)
    assert tuple(again.seq.new_token_ids) == alone(60, 1), "the scheduler lives on"


def test_a_mixed_forward_that_fails_once_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    forward, left = engine.target.forward, [3]

    def failing(segments: Any, **options: Any) -> Any:
        done = forward(segments, **options)
        if len(segments) > 1 and left:
            left.pop()
            raise Trouble
        return done

    monkeypatch.setattr(engine.target, "forward", failing)
    scheduler = scheduler_for(engine)
    requests = [scheduler.add(opened(engine, length, length % 3)) for length in (2, 17, 60)]
    finish(scheduler)
    assert not left and all(request.failure is None for request in requests)
    assert [tuple(r.seq.new_token_ids) for r in requests] == [alone(n, n % 3) for n in (2, 17, 60)]
    assert is_whole(engine)


def test_a_model_that_always_fails_ends_all_and_the_scheduler_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    scheduler = scheduler_for(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "forward", trouble)
        requests = [scheduler.add(opened(engine, 60, seed)) for seed in range(3)]
        finish(scheduler, 10)
    assert all(r.failure is not None and r.failure.stage == "model" for r in requests) and is_whole(engine)
    again = scheduler.add(opened(engine, 60))
    finish(scheduler)
    assert tuple(again.seq.new_token_ids) == alone(60, 0)


@pytest.mark.parametrize("what", ["_admit", "_make_room", "_begin_session"])
def test_a_failure_of_the_scheduler_itself_ends_requests_not_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    scheduler = scheduler_for(engine)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, what, trouble)
        requests = [scheduler.add(opened(engine, 17, seed)) for seed in range(2)]
        finish(scheduler, 10)
    assert all(request.failure is not None for request in requests) and is_whole(engine)
    again = scheduler.add(opened(engine, 17))
    finish(scheduler)
    assert tuple(again.seq.new_token_ids) == alone(17, 0)


def test_an_interruption_goes_through_and_leaves_everything_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    scheduler = scheduler_for(engine)
    scheduler.add(opened(engine, 60))
    scheduler.step()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    scheduler.close()
    assert is_whole(engine)
