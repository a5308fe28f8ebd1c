"""Many requests at once: each output as when alone, whoever joins, leaves, waits or is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from longgraft.draft.lm import MAX_SEQUENCES
from longgraft.engine import Engine
from longgraft.request import Request
from tests import engines
from tests.batches import (
    NEW,
    OPEN,
    POLICIES,
    SETTINGS,
    alone,
    drafter_of,
    finish,
    is_whole,
    opened,
    prompt_of,
    scheduler_for,
    small,
)
from tests.drafters import DRAFTERS
from tests.engines import cost_of
from tests.models import LONGROPE_FROM


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


# Losslessness -------------------------------------------------------------------------------------------------------


REQUESTS = st.tuples(
    st.sampled_from([1, 2, 17, 60, 130]), st.integers(0, 2), st.sampled_from(list(SETTINGS)), st.sampled_from(POLICIES)
)
ORDERS = st.lists(st.sampled_from(["add", "step", "step", "cancel", "put back"]), min_size=4, max_size=24)


QUICK = [Phase.explicit, Phase.reuse, Phase.generate]


@settings(max_examples=6, deadline=None, phases=QUICK, suppress_health_check=list(HealthCheck))
@given(
    wanted=st.lists(REQUESTS, min_size=2, max_size=5),
    orders=ORDERS,
    drafter=st.sampled_from(["model", "eagle"]),
    chunks=st.sampled_from([11, 16, 40]),
    seed=st.integers(0, 99),
)
def test_whoever_joins_leaves_or_is_put_back_the_others_are_as_alone(
    wanted: list[Any], orders: list[str], drafter: str, chunks: int, seed: int
) -> None:
    """11 chunks hold the longest request and no more."""
    engine = small(chunks, drafter_of(drafter))
    scheduler, requests = scheduler_for(engine), dict[Request, Any]()
    queue = list(wanted)
    with closing(scheduler):
        for number, order in enumerate(orders + ["add"] * len(wanted)):
            if order == "add" and queue:
                length, which, setting, policy = about = queue.pop(0)
                requests[scheduler.add(opened(engine, length, which, policy, setting=setting))] = about
            elif order == "cancel" and requests:
                scheduler.cancel(list(requests)[(seed + number) % len(requests)])
            elif order == "put back" and scheduler.running:
                scheduler._put_back(scheduler.running[(seed + number) % len(scheduler.running)])
            elif order == "step":
                scheduler.step()
            assert all(request.seq.cache.check_integrity() == "" for request in requests)
        finish(scheduler)
    for request, (length, which, setting, _) in requests.items():
        output, expected = engine.output(request.seq), alone(length, which, setting)
        assert request.failure is None
        assert output.token_ids == expected[: len(output.token_ids)]
        assert output.finish_reason == ("cancelled" if len(output.token_ids) < NEW else "length")
    assert is_whole(engine)


@pytest.mark.parametrize("name", ["right", "wrong"])
def test_scripted_drafters_beside_one_another(name: str) -> None:
    """Their state says whether they were told of every committed token, also by those put back in between."""
    truth = [*prompt_of(60), *alone(60, 0)]
    engine = small(drafter=DRAFTERS[name](truth), prefix_cache=False)  # or they would read one after the other
    scheduler = scheduler_for(engine)
    requests = [scheduler.add(opened(engine, 60, policy=policy)) for policy in ("adaptive", "dense", "paper")]
    for _ in range(4):
        scheduler.step()
    scheduler._put_back(scheduler.running[-1])
    finish(scheduler)
    assert [tuple(r.seq.new_token_ids) for r in requests] == [alone(60, 0)] * 3
    assert all(r.failure is None for r in requests) and is_whole(engine)


def test_more_requests_than_a_drafter_has_room_for() -> None:
    engine = small(400, drafter_of("model"))
    scheduler = scheduler_for(engine)
    seeds = [number % 3 for number in range(MAX_SEQUENCES + 2)]
    requests = [scheduler.add(opened(engine, 17, seed, "pruned", max_new_tokens=4)) for seed in seeds]
    finish(scheduler)
    assert [tuple(r.seq.new_token_ids) for r in requests] == [alone(17, seed)[:4] for seed in seeds]
    assert sum(bool(r.seq.stats.draft_rows) for r in requests) >= MAX_SEQUENCES
    assert is_whole(engine)


def test_rope_regimes_never_share_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(arch="phi3_longrope", prefill_rows=256)
    forwards, forward = list[tuple[bool, set[int]]](), engine.target.forward

    def watched(segments: Any, long_rope: bool = False, features: Any = None) -> Any:
        forwards.append((long_rope, {id(segment.cache) for segment in segments}))
        return forward(segments, long_rope=long_rope, features=features)

    monkeypatch.setattr(engine.target, "forward", watched)
    scheduler = scheduler_for(engine)
    lengths = (40, LONGROPE_FROM + 20, 70)
    requests = [scheduler.add(opened(engine, length, arch="phi3_longrope")) for length in lengths]
    finish(scheduler)
    assert [r.seq.long_rope for r in requests] == [False, True, False]
    for regime, caches in forwards:
        assert {r.seq.long_rope for r in requests if id(r.seq.cache) in caches} == {regime}
    expected = [alone(length, 0, arch="phi3_longrope") for length in lengths]
    assert [tuple(r.seq.new_token_ids) for r in requests] == expected


# Rows ---------------------------------------------------------------------------------------------------------------


def rows_of(engine: Engine, patch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """Return a list that fills with the rows of every forward, by cache."""
    forwards, forward = list[dict[int, int]](), engine.target.forward

    def watched(segments: Any, **options: Any) -> Any:
        forwards.append({id(segment.cache): len(segment.token_ids) for segment in segments})
        return forward(segments, **options)

    patch.setattr(engine.target, "forward", watched)
    return forwards


def test_a_long_prompt_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round those who decode commit something, and no forward has more rows than the budget."""
    engine = small()
    forwards = rows_of(engine, monkeypatch)
    scheduler = scheduler_for(engine)
    chats = [scheduler.add(opened(engine, 17, seed, max_new_tokens=40)) for seed in range(2)]
    while any(chat.is_reading or not chat.seq.new_token_ids for chat in chats):
        scheduler.step()
    document = scheduler.add(opened(engine, 700, 7))
    before = len(forwards)
    while not any(chat.is_over for chat in chats):
        lengths = [len(chat.seq.token_ids) for chat in chats]
        scheduler.step()
        assert all(len(chat.seq.token_ids) > length for chat, length in zip(chats, lengths))
        assert document.is_reading
    mixed = forwards[before:]
    assert len(mixed) > 5 and max(sum(rows.values()) for rows in mixed) <= engine.config.round_rows
    assert all(rows[id(document.seq.cache)] >= engine.config.round_rows // 4 for rows in mixed)
    finish(scheduler)
    assert tuple(document.seq.new_token_ids) == alone(700, 7)


@pytest.mark.parametrize("policy", ["dense", "plain"])
def test_a_prompt_has_its_share_however_many_rows_trees_have(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more requests than rows in the budget too."""
    engine = small(400, drafter_of("model"), round_rows=8)
    forwards = rows_of(engine, monkeypatch)
    scheduler = scheduler_for(engine)
    for seed in range(9):
        scheduler.add(opened(engine, 2, seed % 3, policy))
    scheduler.step()
    document = scheduler.add(opened(engine, 130))
    scheduler.step()
    assert forwards[-1][id(document.seq.cache)] == 2
    finish(scheduler)
    assert tuple(document.seq.new_token_ids) == alone(130, 0)


def test_short_prompts_pass_long_ones_which_still_get_every_other_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    forwards = rows_of(engine, monkeypatch)
    scheduler = scheduler_for(engine)
    document = scheduler.add(opened(engine, 700))
    short = [scheduler.add(opened(engine, 60, 1)) for _ in range(3)]
    while any(request.is_reading or not request.seq.new_token_ids for request in short):
        scheduler.step()
        assert document.is_reading
    turns = [id(document.seq.cache) in rows for rows in forwards]
    assert turns.count(True) >= len(turns) // 2
    finish(scheduler)


def test_nodes_are_priced_behind_the_prompt_rows_beside_them() -> None:
    table = cost_of(0.5)
    scores = [[0.0, -0.5, -0.6, -3.0]]
    few, many = (table.choose(scores, [10], None, beside)[0] for beside in (0, 60))
    assert few < many, "a row more is little beside sixty"
    assert table.choose(scores, [10], None, 60, 1) == [2], "but only as many as there is room for"
    assert table.choose(scores, [10], None, 60, 0) == [1]
