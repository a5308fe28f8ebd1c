"""Rounds on the device: the tokens of plain rounds, and no value that the host must see. Here the device is the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from longgraft.config import EngineConfig, GraftError, Output, SamplingParams
from longgraft.device_graph import Replay
from longgraft.device_round import DeviceRound, Report
from longgraft.device_rounds import AHEAD, DeviceRounds, require_round
from longgraft.engine import Engine
from longgraft.index import host_kernel
from longgraft.request import Request
from longgraft.scheduler import Scheduler
from longgraft.sequence import Sequence
from longgraft.service import Service
from tests import engines
from tests.engines import engine_for, model_of, one_thread, prompt_of
from tests.host_reads import no_host_reads
from tests.models import VOCAB, tiny_model

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, host_kernel.COMPILERS)), reason="needs a C++ compiler")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "all": {"temperature": 0.8, "top_k": 0, "seed": 3},
    "top_k": {"temperature": 1.0, "top_k": 20, "seed": 4},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def both(arch: str, setting: str, prompt_len: int = 235, new: int = 40, **config: Any) -> tuple[Output, Output]:
    params = SamplingParams(max_new_tokens=new, **SETTINGS[setting])
    prompt = prompt_of(prompt_len, arch=arch)
    plain = engine_for(arch, **config).generate(prompt, params)
    return plain, engine_for(arch, round="device", **config).generate(prompt, params)


@needs_compiler
@pytest.mark.parametrize(
    ("arch", "setting"),
    [("gemma3", "all"), ("llama", "top_k"), pytest.param("qwen3_moe", "greedy", marks=pytest.mark.slow)],
)
def test_tokens_are_those_of_plain_rounds(arch: str, setting: str) -> None:
    plain, device = both(arch, setting, new=24)
    assert device.token_ids == plain.token_ids and device.finish_reason == plain.finish_reason
    assert len(device.sources) == len(device.origins) == len(device.token_ids)
    assert device.stats["accepted"] > 0 and device.stats["rounds"] < 24


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["llama", "llama_mqa", "qwen2", "mistral", "gemma2", "gemma3", "llama_yarn", "gpt_oss"]
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_plain_rounds_everywhere(arch: str, setting: str) -> None:
    for length in (1, 2, 255, 256, 257, 300):
        plain, device = both(arch, setting, length)
        assert device.token_ids == plain.token_ids


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None or torch.cuda.is_available(), reason="needs triton's interpreter")
def test_a_device_round_on_the_triton_backend() -> None:
    model = model_of("gemma3", torch.float32)
    prompt, params = prompt_of(120, arch="gemma3"), SamplingParams(max_new_tokens=8, temperature=0.0)
    plain, device = (
        engine_for("gemma3", model=model, backend="triton", round=name, max_nodes=7).generate(prompt, params)
        for name in ("plain", "device")
    )
    assert device.token_ids == plain.token_ids


@needs_compiler
def test_where_a_token_came_from_is_true() -> None:
    prompt = prompt_of(235)
    device = engine_for(round="device").generate(prompt, SamplingParams(max_new_tokens=40, temperature=0.0))
    text = [*prompt, *device.token_ids]
    copied = [(text[offset], token) for (_, offset), token in zip(device.origins, device.token_ids) if offset >= 0]
    assert len(copied) > 5 and all(x == y for x, y in copied)


@needs_compiler
@pytest.mark.parametrize(("policy", "length"), [("adaptive", 1), ("adaptive", 2), ("plain", 257)])
def test_short_prompts_and_plain_decoding(policy: str, length: int) -> None:
    plain, device = both("llama", "greedy", length, policy=policy, new=16)
    assert device.token_ids == plain.token_ids
    if policy == "plain":
        assert device.stats["rounds"] == 16 and device.stats["nodes"] == 0


@needs_compiler
@pytest.mark.parametrize("place", [0, 5, *(pytest.param(place, marks=pytest.mark.slow) for place in range(1, 12))])
def test_an_end_may_come_anywhere_in_a_block(place: int) -> None:
    prompt, params = prompt_of(235), {"max_new_tokens": 16, "temperature": 0.0}
    whole = engine_for().generate(prompt, SamplingParams(**params)).token_ids
    ends = SamplingParams(**params, eos_token_ids=(whole[place], VOCAB - 1))
    plain, device = (engine_for(round=name).generate(prompt, ends) for name in ("plain", "device"))
    assert device.token_ids == plain.token_ids and device.finish_reason == plain.finish_reason == "eos"


class Draft:
    """An index that proposes fixed columns, right or wrong, and is told what was committed."""

    def __init__(self, columns: dict[str, list[int]], device: str = "cpu") -> None:
        self.columns, self.device, self.told = columns, device, list[tuple[Tensor, Tensor]]()

    def extend(self, token_ids: Tensor, count: Tensor | None = None, learn: bool = False) -> None:
        assert count is not None
        self.told.append((token_ids, count))

    def recover(self) -> bool:
        return False

    def draft(self, budget: int) -> Any:
        made = {name: torch.tensor(x[:budget], device=self.device) for name, x in self.columns.items()}
        n = len(made["token_ids"])
        rest = {
            "num_nodes": torch.full((1,), n, device=self.device),
            "origins": torch.full((n,), -1, device=self.device),
            "probabilities": torch.full((n,), 0.5, dtype=torch.float64, device=self.device),
        }
        return type("Columns", (), {**rest, **made})


def sequence_of(engine: Engine, length: int = 100, **params: Any) -> Sequence:
    seq = engine.open(prompt_of(length), SamplingParams(**{"max_new_tokens": 30, "temperature": 0.0, **params}))
    with engine.target.session():
        engine.prefill(seq)
    return seq


def run_of(engine: Engine, draft: Draft | None, seq: Sequence, rows: int = 8) -> Report:
    one = DeviceRound(engine.target, seq, draft, rows, 30)
    with engine.target.session(), no_host_reads():
        packed = Replay(one, records=True).run(one.most_rows, len(one.rows))
    return Report.of(packed.numpy(), one.most_rows)


def test_a_round_asks_for_no_value() -> None:
    """Under a mode that refuses every operation the host would wait for; greedy, and sampled with top-k."""
    for params in ({}, {"temperature": 1.0, "top_k": 5, "seed": 1}):
        engine = engine_for()
        seq = sequence_of(engine, **params)
        report = run_of(engine, Draft({"token_ids": [1, 2, 3], "parents": [-1, 0, -1]}), seq)
        assert len(report.tokens) >= 1 and not report.has_fault


def test_on_a_device_without_contents_a_round_runs_too() -> None:
    """On `meta` tensors have shapes only, so whatever needs a value is torch's own error: item, tolist, nonzero, ..."""
    engine = engine_for()
    seq = sequence_of(engine)
    one = DeviceRound(engine.target, seq, Draft({"token_ids": [1, 2], "parents": [-1, 0]}), 4, 30)
    model = tiny_model("llama").to("meta")
    one.target.model, one.device, one.target.device = model, torch.device("meta"), torch.device("meta")
    one.index = Draft({"token_ids": [1, 2], "parents": [-1, 0]}, "meta")
    one.propose()
    for name in ("rows", "ends", "tokens", "prefix_len", "committed", "remaining", "is_done"):
        setattr(one, name, getattr(one, name).to("meta"))
    pool = engine.target.new_pool(2)
    one.pool = pool
    with engine.target.session():
        assert one.run(3, 256).device.type == "meta"


@pytest.mark.parametrize(
    "columns",
    [
        {"token_ids": [7, 7, 9], "parents": [-1, -1, -1]},  # twice under one parent
        {"token_ids": [VOCAB, -1, 2**31 - 1], "parents": [-1, 0, 1]},  # of no vocabulary
        {"token_ids": [3, 4, 5], "parents": [2, 5, -7]},  # parents that come later or never
    ],
)
def test_no_draft_can_change_a_token(columns: dict[str, list[int]]) -> None:
    engine = engine_for()
    truth = engine.generate(prompt_of(100), SamplingParams(max_new_tokens=4, temperature=0.0)).token_ids
    with_truth = {name: list(values) for name, values in columns.items()}
    with_truth["token_ids"][0] = truth[0]
    for each in (columns, with_truth):
        report = run_of(engine, Draft(each), sequence_of(engine))
        assert tuple(report.tokens) == truth[: len(report.tokens)] and report.tokens


def test_twice_the_right_token_is_accepted_once() -> None:
    engine = engine_for()
    truth = engine.generate(prompt_of(100), SamplingParams(max_new_tokens=4, temperature=0.0)).token_ids
    draft = Draft({"token_ids": [truth[0], truth[0], truth[1], truth[1], truth[2]], "parents": [-1, -1, 1, 0, 3]})
    report = run_of(engine, draft, sequence_of(engine))
    assert tuple(report.tokens) == truth and report.path == [0, 1, 4, 5]
    new, count = draft.told[0]
    assert new[: int(count)].tolist() == list(truth)


@needs_compiler
def test_what_the_host_must_say_is_left_to_it() -> None:
    """Logits of NaN: nothing is committed, the report says so, and the plain round raises its own error."""
    engine, device = engine_for(), engine_for(round="device")
    seq = sequence_of(engine)
    with torch.no_grad():
        engine.target.model.lm_head.weight[5] = torch.nan
    try:
        report = run_of(engine, Draft({"token_ids": [1], "parents": [-1]}), seq)
        assert report.has_fault and report.is_done and report.tokens == []
        with pytest.raises(GraftError, match="contain NaN"):
            device.generate(prompt_of(100), SamplingParams(temperature=0.0))
    finally:
        engines._model.cache_clear()


@needs_compiler
def test_reports_come_late_and_nothing_is_lost() -> None:
    engine = engine_for(round="device")
    scheduler = Scheduler(engine)
    seq = engine.open(prompt_of(100), SamplingParams(max_new_tokens=20, temperature=0.0))
    request = scheduler.add(seq)
    lengths = list[int]()
    while not request.is_over:
        scheduler.advance()
        lengths.append(len(seq.new_token_ids))
    assert lengths[:AHEAD] == [0] * AHEAD and lengths[-1] == 20
    assert seq.cache.length == len(seq.token_ids) - 1 and seq.cache.check_integrity() == ""
    scheduler.close()
    assert engine.pool.check_integrity() == ""


@needs_compiler
def test_cancelled_in_the_middle_the_next_request_is_right() -> None:
    engine = engine_for(round="device")
    params = SamplingParams(max_new_tokens=20, temperature=0.0)
    expected = engine_for().generate(prompt_of(100), params).token_ids
    scheduler = Scheduler(engine)
    request = scheduler.add(engine.open(prompt_of(100), params))
    for _ in range(AHEAD + 3):
        scheduler.step()
    scheduler.cancel(request)
    again = scheduler.add(engine.open(prompt_of(100), params))
    while not again.is_over:
        scheduler.step()
    scheduler.close()
    assert tuple(again.seq.new_token_ids) == expected
    assert engine.pool.check_integrity() == ""


@needs_compiler
def test_company_sends_it_to_plain_rounds_and_back() -> None:
    engine = engine_for(round="device")
    prompts = [prompt_of(100), prompt_of(60, 1)]
    params = [SamplingParams(max_new_tokens=n, temperature=0.0) for n in (30, 4)]
    expected = [engine_for().generate(p, x).token_ids for p, x in zip(prompts, params)]
    scheduler = Scheduler(engine)
    assert isinstance(scheduler.rounds, DeviceRounds)
    first = scheduler.add(engine.open(prompts[0], params[0]))
    visits = list[bool]()
    second = None
    while scheduler.has_work:
        if len(first.seq.new_token_ids) >= 5 and second is None:
            second = scheduler.add(engine.open(prompts[1], params[1]))
        scheduler.step()
        visits.append(scheduler.rounds._visit is not None)
    assert second is not None
    assert [tuple(r.seq.new_token_ids) for r in (first, second)] == expected
    text = "".join("dh"[not visit] for visit in visits).strip("h")
    assert "dh" in text and text.endswith("d")  # there, away, and there again


@needs_compiler
def test_little_room_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longgraft.device_rounds.ROOM", 7)
    monkeypatch.setattr("longgraft.device_rounds.BOUND_STEP", 64)
    plain, device = both("llama", "greedy", new=20)
    assert device.token_ids == plain.token_ids


@needs_compiler
@pytest.mark.slow
def test_it_streams_and_serves() -> None:
    engine = engine_for(round="device")
    params = SamplingParams(max_new_tokens=16, temperature=0.0)
    prompts = [prompt_of(60, seed) for seed in (0, 1)]  # made by the same model, which the service's thread holds below
    with Service(engine) as service:
        tickets = [service.submit(prompt, params) for prompt in prompts]
        tokens = [ticket.result().token_ids for ticket in tickets]
    assert tokens == [engine_for().generate(prompt, params).token_ids for prompt in prompts]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"temperature": 1.0, "top_p": 0.5}, "top_p"),
        ({"temperature": 0.0, "repetition_penalty": 1.3}, "processor"),
        ({"temperature": 0.0, "logprobs": 1}, "log-probabilities"),
    ],
)
def test_what_needs_the_host_runs_there(params: dict[str, Any], reason: str) -> None:
    params = {"max_new_tokens": 12, "seed": 5, "top_k": 0, **params}
    engine = engine_for(round="device")
    scheduler = Scheduler(engine)
    request = scheduler.add(engine.open(prompt_of(60), SamplingParams(**params)))
    reasons = set[str]()
    while scheduler.has_work:
        scheduler.step()
        assert isinstance(scheduler.rounds, DeviceRounds) and scheduler.rounds._visit is None
        if request.seq.stop.remaining and not request.is_reading:
            reasons.add(scheduler.rounds.reason_for_host(request))
    assert len(reasons) == 1 and reason in reasons.pop()
    assert tuple(request.seq.new_token_ids) == engine_for().generate(prompt_of(60), SamplingParams(**params)).token_ids


def test_a_grammar_needs_the_host() -> None:
    engine = engine_for(round="device")
    rounds = Scheduler(engine).rounds
    assert isinstance(rounds, DeviceRounds)
    seq = sequence_of(engine)
    assert rounds.reason_for_host(Request(seq, 1)) == ""
    seq.sampler.mask = cast(Any, object())
    assert "grammar" in rounds.reason_for_host(Request(seq, 1))


def test_by_name_only() -> None:
    assert EngineConfig().round == "plain"
    with pytest.raises(GraftError, match="expected one of plain, device, graphs"):
        EngineConfig(round="gpu")
    with pytest.raises(GraftError, match="CUDA graphs need a CUDA device"):
        engine_for(round="graphs")
    with pytest.raises(GraftError, match="backend 'flash': expected one of auto, reference, triton"):
        require_round(EngineConfig(backend="flash", round="device"), engine_for().target)
    with pytest.raises(GraftError, match="exact mode needs 'plain'"):
        require_round(EngineConfig(exact=True, round="device"), None)
    assert not isinstance(Scheduler(engine_for()).rounds, DeviceRounds)


def test_row_counts_follow_the_cost() -> None:
    engine = engine_for(rise=0.3, round="device")
    rounds = Scheduler(engine).rounds
    assert isinstance(rounds, DeviceRounds)
    seq = sequence_of(engine)

    def rows(*gains: float) -> int:
        report = Report([], [], False, False, np.zeros((0, 3), np.int64), np.array(gains))
        return rounds.rows_for(seq, report, 61)

    assert rounds.rows_for(seq, None, 61) == 61
    assert rows() == rows(0.01, 0.001) == 1
    assert rows(1.0, 0.9, 0.8) == 4
    assert rows(*[1.0] * 60) == 61
