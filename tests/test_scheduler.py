"""Many requests at once: each output as when alone, whoever joins, leaves, waits or is put back; nothing leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import longgraft.admission as admission
from longgraft.cache import ChunkPool
from longgraft.config import EngineConfig, GraftError, SamplingParams
from longgraft.draft.lm import MAX_SEQUENCES, ModelDrafter
from longgraft.engine import Engine
from longgraft.request import Request
from longgraft.scheduler import MOST_PASSED, Scheduler
from longgraft.sequence import Sequence
from tests import engines
from tests.draft import heads
from tests.drafters import DRAFTERS
from tests.engines import cost_of, model_of
from tests.models import LONGROPE_FROM, VOCAB, prompt_for, tiny_model
from tests.small_tokenizers import byte_level

NEW = 10
POLICIES = ("plain", "retrieval", "adaptive", "dense", "paper")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5},
}
OPEN = list[Scheduler]()  # what a test leaves open when it fails must not fail the next
ROWS = 16  # rows of a chunk: small, so that little text fills a pool


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def scheduler_for(engine: Engine) -> Scheduler:
    OPEN.append(Scheduler(engine))
    return OPEN[-1]


@lru_cache(maxsize=4)
def twin_of(arch: str) -> Any:
    """A model of the same weights that no scheduler holds: it writes prompts, and says what is right."""
    return tiny_model(arch)


@lru_cache(maxsize=64)
def prompt_of(length: int, seed: int = 0, arch: str = "llama") -> tuple[int, ...]:
    return tuple(prompt_for(twin_of(arch), length, seed))


def small(chunks: int = 200, drafter: Any = None, arch: str = "llama", tokenizer: Any = None, **more: Any) -> Engine:
    """An engine with small chunks and small forwards; costs are frozen."""
    config = EngineConfig(**{"max_nodes": 6, "prefill_rows": 32, "round_rows": 24, **more})
    model = model_of(arch)
    return Engine(model, tokenizer, config, cost=cost_of(0.02), drafter=drafter, pool=pool_of(arch, chunks))


def pool_of(arch: str, chunks: int) -> ChunkPool:
    return ChunkPool(_target(arch).layers, chunks, torch.float64, chunk_rows=ROWS)


@lru_cache(maxsize=4)
def _target(arch: str) -> Any:
    return Engine(twin_of(arch), None, EngineConfig(policy="plain", max_context=64)).target


def params_of(setting: str = "greedy", **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": NEW, **SETTINGS[setting], **more})


@lru_cache(maxsize=128)
def alone(length: int, seed: int, setting: str = "greedy", new: int = NEW, arch: str = "llama") -> tuple[int, ...]:
    """What plain decoding says of a prompt by itself (held against a loop without engine in test_lossless)."""
    engine = Engine(twin_of(arch), None, EngineConfig(policy="plain"))
    return tuple(engine.generate(prompt_of(length, seed, arch), params_of(setting, max_new_tokens=new)).token_ids)


def opened(engine: Engine, length: int, seed: int = 0, policy: str | None = None, **more: Any) -> Sequence:
    arch = more.pop("arch", "llama")
    return engine.open(list(prompt_of(length, seed, arch)), params_of(**more), policy=policy)


def finish(scheduler: Scheduler, most: int = 2000) -> list[Request]:
    """Step until nothing is left; the requests in the order of their ends."""
    ended = list[Request]()
    for _ in range(most):
        if not scheduler.has_work:
            return ended
        ended += scheduler.step()
    raise AssertionError(f"{most} rounds were not enough")


def is_whole(engine: Engine) -> bool:
    """True if every chunk is free, the drafter's too, and the model has its own attention."""
    pools = [engine.pool] + ([engine.drafter.pool] if hasattr(engine.drafter, "pool") else [])
    own = engine.target.model.config.get_text_config()._attn_implementation
    return own == "sdpa" and all(p.num_free == p.num_chunks and p.check_integrity() == "" for p in pools)


# Losslessness -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def drafter_of(name: str) -> Any:
    from longgraft.draft.eagle import Eagle3Drafter

    if name == "eagle":
        return Eagle3Drafter(heads.loaded(), window=32, cost=cost_of(0.01))
    return ModelDrafter(tiny_model("gemma3", seed=4), VOCAB, window=24, cost=cost_of(0.01))


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


# Failures -----------------------------------------------------------------------------------------------------------


class Trouble(Exception):
    pass


def trouble(*_: Any, **__: Any) -> Any:
    raise Trouble("injected")


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
