"""The thread that owns the model: tickets tell everybody the same, and whatever happens it ends and gives all back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from longgraft.config import GraftError, SamplingParams
from longgraft.engine import Engine
from longgraft.request import Failure
from longgraft.service import Service
from longgraft.ticket import Ticket
from tests import engines
from tests.batches import alone, is_whole, params_of, prompt_of, small
from tests.small_tokenizers import LINES, byte_level
from tests.truths import Trouble, trouble


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.fixture
def engine() -> Engine:
    return small(400, tokenizer=byte_level(), max_batch=8)


@pytest.fixture
def service(engine: Engine) -> Iterator[Service]:
    with Service(engine) as opened:
        yield opened
    assert is_whole(engine) and not opened._thread.is_alive() and opened.num_requests == 0


def prompt(length: int, seed: int = 0) -> list[int]:
    return list(prompt_of(length, seed))


def endless() -> SamplingParams:
    return params_of(max_new_tokens=1500)


def test_every_thread_gets_its_own(service: Service) -> None:
    wanted = [(length, seed, setting) for length in (2, 60) for seed in range(3) for setting in ("greedy", "hot")]
    expected = {one: alone(*one) for one in wanted}
    found, lock = dict[Any, Any](), threading.Lock()

    def ask(one: tuple[int, int, str]) -> None:
        ticket = service.submit(prompt(one[0], one[1]), params_of(one[2]))
        blocks = list(ticket)
        with lock:
            found[one] = tuple(token for block in blocks for token in block), ticket.result(60).token_ids

    threads = [threading.Thread(target=ask, args=(one,)) for one in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {one: (tokens, tokens) for one, tokens in expected.items()}


def test_tokens_arrive_while_it_runs_and_stay_for_late_readers(service: Service) -> None:
    ticket = service.submit(prompt(17), params_of(max_new_tokens=40))
    blocks = iter(ticket)
    first = next(blocks)
    assert first and not ticket.is_over
    rest = [token for block in blocks for token in block]
    again = [token for block in ticket for token in block]
    assert tuple(first + rest) == tuple(again) == alone(17, 0, new=40)
    assert ticket.reading == (16, 16, 0.0)


def test_event_loops_read_without_blocking(service: Service) -> None:
    expected = [alone(17, seed) for seed in range(3)]

    async def read(ticket: Ticket) -> list[int]:
        return [token async for block in ticket for token in block]

    async def all_of_them() -> list[list[int]]:
        tickets = [service.submit(prompt(17, seed), params_of()) for seed in range(3)]
        return list(await asyncio.gather(*(read(ticket) for ticket in tickets), read(tickets[0])))

    found = asyncio.run(all_of_them())
    assert [tuple(tokens) for tokens in found] == [*expected, expected[0]]


def test_a_reader_that_leaves_is_forgotten(service: Service) -> None:
    ticket = service.submit(prompt(17), endless())

    async def first() -> list[int]:
        async for block in ticket:
            return block
        return []

    assert asyncio.run(first())
    ticket.cancel()
    assert ticket.result(60).finish_reason == "cancelled"
    assert ticket._listeners == []


def test_cancelled_ones_keep_what_they_have_and_others_go_on(service: Service) -> None:
    long, other = service.submit(prompt(17), endless()), service.submit(prompt(60, 1), params_of())
    next(iter(long))
    long.cancel()
    output = long.result(60)
    assert output.finish_reason == "cancelled" and 0 < len(output.token_ids) < 1500
    long.cancel()
    assert long.result() is output
    assert other.result(60).token_ids == alone(60, 1)


def test_a_deadline_counts_from_the_asking(service: Service) -> None:
    assert service.submit(prompt(17), endless(), deadline=0.3).result(60).finish_reason == "deadline"
    late = service.submit(prompt(17), endless(), deadline=-1).result(60)
    assert late.finish_reason == "deadline" and late.token_ids == ()


def test_waiting_may_end_first(service: Service) -> None:
    ticket = service.submit(prompt(17), endless())
    with pytest.raises(TimeoutError, match="no result after"):
        ticket.result(0.05)
    ticket.cancel()


def test_what_cannot_run_is_one_clear_error(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraftError, match="the prompt is empty"):
        service.submit([], params_of())
    with pytest.raises(GraftError, match="the prompt has 2500 tokens"):
        service.submit([1] * 2000 + [1] * 500, params_of()).result(60)
    with pytest.raises(GraftError, match="needs a drafter"):
        service.submit(prompt(17), params_of(), policy="dense").result(60)
    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "tokenizer", trouble)
        with pytest.raises(GraftError, match="an error of the tokenizer \\(Trouble: injected\\)"):
            service.submit(LINES[0], params_of())
    assert service.submit(prompt(17), params_of()).result(60).token_ids == alone(17, 0)


def test_text_that_cannot_be_made_is_its_requests_error(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "output", trouble)
        ticket = service.submit(prompt(17), params_of())
        with pytest.raises(GraftError, match="an error of the tokenizer"):
            ticket.result(60)
        with pytest.raises(GraftError, match="an error of the tokenizer"):
            list(ticket)
    assert service.submit(prompt(17), params_of()).result(60).token_ids == alone(17, 0)


@pytest.mark.parametrize("where", ["step", "cancel"])
def test_a_broken_scheduler_is_replaced(where: str, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = service.submit(prompt(17), endless())
    next(iter(ticket))
    monkeypatch.setattr(service._scheduler, where, trouble)
    ticket.cancel()
    with pytest.raises(GraftError, match="an error of the scheduler"):
        ticket.result(60)
    assert service.submit(prompt(17), params_of()).result(60).token_ids == alone(17, 0)


def test_no_more_than_allowed_are_on_their_way(engine: Engine) -> None:
    with Service(engine, max_requests=2) as service:
        tickets = [service.submit(prompt(17), endless()) for _ in range(2)]
        with pytest.raises(GraftError, match="2 requests are on their way already"):
            service.submit(prompt(17), params_of())
        tickets[0].cancel()
        tickets[0].result(60)
        assert service.submit(prompt(17), params_of()).result(60).token_ids == alone(17, 0)
    assert tickets[1].result(60).finish_reason == "cancelled"
    assert is_whole(engine)


@pytest.mark.parametrize("drain", [False, True])
def test_closing(drain: bool, engine: Engine) -> None:
    service = Service(engine)
    tickets = [service.submit(prompt(17, seed), params_of(max_new_tokens=60)) for seed in range(3)]
    next(iter(tickets[0]))
    service.close(drain=drain)
    assert not service._thread.is_alive() and is_whole(engine)
    for seed, ticket in enumerate(tickets):
        assert ticket.is_over
        expected = alone(17, seed, new=60)
        assert ticket.result().token_ids == (expected if drain else expected[: len(ticket.result().token_ids)])
    with pytest.raises(GraftError, match="the service is closed"):
        service.submit(prompt(17), params_of())
    service.close()


def test_a_request_whose_turn_never_came_ends_with_the_service(engine: Engine) -> None:
    service = Service(engine)
    begun, may_end = threading.Event(), threading.Event()
    service._orders.put(lambda: (begun.set(), may_end.wait(60)))
    begun.wait(60)
    ticket = service.submit(prompt(17), params_of())
    closing = threading.Thread(target=service.close)
    service._is_closing = True
    may_end.set()
    closing.start()
    closing.join(60)
    assert ticket.is_over


def test_the_model_is_given_back_between_requests(engine: Engine) -> None:
    with Service(engine) as service:
        for _ in range(2):
            service.submit(prompt(17), params_of()).result(60)
            seen = threading.Event()
            service._orders.put(seen.set)
            assert seen.wait(60) and is_whole(engine)


def test_an_error_is_one_sentence() -> None:
    said = Failure("index", Trouble()).sentence()
    assert str(said) == "the request ended in an error of the index (Trouble); other requests are not affected"
    clear = GraftError("the thing: expected another")
    assert Failure("index", clear).sentence() is clear
