"""What rounds record when asked: every round whole, no token changed, nothing where nobody asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from longgraft.config import Output, SamplingParams
from longgraft.engine import Engine
from longgraft.service import Service
from longgraft.trace import STAGES, Trace
from longgraft.tree import Source, TreeBuilder
from tests import engines
from tests.engines import all_nodes, engine_for, model_of, prompt_of
from tests.small_tokenizers import byte_level

PARAMS = SamplingParams(max_new_tokens=40, temperature=0.0, seed=1, ignore_eos=True)
HOT = SamplingParams(max_new_tokens=40, temperature=0.9, seed=5, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(model_of(), byte_level(), cost=all_nodes())


def without_times(output: Output) -> tuple[Any, ...]:
    """Everything but the trace, what a second reading of one prompt finds, and what a clock says."""
    timed = ("_s", "seconds_by_stage", "why")
    stats = {k: v for k, v in output.stats.items() if not (k.endswith(timed) or k.startswith("prefix_"))}
    return replace(output, trace=None, stats={}), stats


@pytest.mark.parametrize("params", [PARAMS, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("policy", ["adaptive", "plain"])
def test_a_trace_changes_nothing(engine: Engine, params: SamplingParams, policy: str) -> None:
    prompt = prompt_of(200)
    bare, traced = (engine.generate(prompt, replace(params, trace=trace), policy=policy) for trace in (False, True))
    assert bare.trace is None and traced.trace is not None
    assert without_times(bare) == without_times(traced)


def is_of(trace: Trace, output: Output) -> bool:
    """Tell whether the rounds of a trace are those of an output: tokens, sources and origins."""
    written, sources, origins = list[int](), list[int](), list[tuple[int, int]]()
    for one in trace:
        bonus = one.new_tokens - len(one.path)
        assert bonus in (0, 1) and one.rows == len(one.tree)
        begin = len(written)
        written += [int(one.tree.token_ids[node]) for node in one.path]
        sources += [int(one.tree.sources[node]) for node in one.path]
        origins += [(int(d), int(o)) for d, o in one.tree.origins[list(one.path)]]
        if bonus:
            written.append(output.token_ids[begin + len(one.path)])
            sources.append(int(Source.ROOT))
            origins.append((-1, -1))
    return (tuple(written), tuple(sources), tuple(origins)) == (output.token_ids, output.sources, output.origins)


@pytest.mark.parametrize("params", [PARAMS, HOT], ids=["greedy", "hot"])
def test_the_rounds_add_up_to_the_output(engine: Engine, params: SamplingParams) -> None:
    output = engine.generate(prompt_of(200), replace(params, trace=True))
    assert output.trace is not None and is_of(output.trace, output)
    assert [(one.rows - 1, len(one.path)) for one in output.trace] == output.stats["accepted_by_round"]
    assert any(one.path for one in output.trace) and len(output.trace) == output.stats["rounds"]
    spent = dict(zip(STAGES, map(sum, zip(*(one.seconds for one in output.trace)))))
    for stage in ("verify", "accept", "extend"):
        assert spent[stage] == pytest.approx(output.stats["seconds_by_stage"][stage], abs=2e-4)
    assert spent["plan"] + spent["draft"] == pytest.approx(output.stats["seconds_by_stage"]["plan"], abs=2e-4)


def test_a_stop_inside_a_block_clips_the_trace_too(engine: Engine) -> None:
    whole = engine.generate(prompt_of(200), replace(PARAMS, trace=True))
    for n in range(1, 12):
        output = engine.generate(prompt_of(200), replace(PARAMS, max_new_tokens=n, trace=True))
        assert output.token_ids == whole.token_ids[:n] and output.trace is not None and is_of(output.trace, output)


def test_each_request_of_a_batch_has_its_own(engine: Engine) -> None:
    prompts = [prompt_of(n) for n in (30, 90, 200)]
    outputs = engine.generate(prompts, replace(PARAMS, trace=True))
    assert len({id(output.trace) for output in outputs}) == 3
    assert all(is_of(output.trace, output) for output in outputs)


def test_through_a_service_only_for_those_who_ask() -> None:
    engine = engine_for(tokenizer=byte_level())
    with Service(engine) as service:
        tickets = [service.submit(prompt_of(90), replace(PARAMS, trace=trace)) for trace in (True, False)]
        traced, bare = (ticket.result(60) for ticket in tickets)
    assert traced.trace is not None and is_of(traced.trace, traced) and bare.trace is None
    assert traced.token_ids == bare.token_ids


def test_times_are_those_of_the_round_and_counted_once() -> None:
    trace, tree = Trace(), TreeBuilder(3).build()
    trace.take(tree, [], 1, {"plan": 1.0, "draft": 0.25, "verify": 2.0, "prefill": 9.0})
    trace.take(tree, [], 1, {"plan": 1.5, "draft": 0.5, "verify": 5.0, "accept": 0.5, "prefill": 9.0})
    assert [one.seconds for one in trace] == [(0.75, 0.25, 2.0, 0.0, 0.0), (0.25, 0.25, 3.0, 0.5, 0.0)]
