"""The audit tells rounding from mistakes: exact runs, ties built on purpose, and wrong tokens."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import longgraft.rounds
from longgraft.audit import (
    Audit,
    Difference,
    _routes_differed,
    audit,
    compare,
    exact_cost,
    gap_of,
    plain_twin,
    sentence,
)
from longgraft.config import EngineConfig, SamplingParams
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.engine import Engine
from longgraft.kernels.tree_attention import BACKENDS
from longgraft.noise import gumbel
from longgraft.routes import Routes
from longgraft.sampler import Sampler, resolve
from longgraft.target import Target
from longgraft.tree import Acceptance
from tests.models import VOCAB, prompt_for, tiny_model

NATIVE = pytest.mark.skipif("native" not in BACKENDS, reason="exact mode needs the native attention kernel")
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=48)
SAMPLED = SamplingParams(temperature=0.8, top_k=0, seed=11, max_new_tokens=48)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cheap_rows() -> CostTable:
    """Rows that cost next to nothing, so that every round verifies whatever was proposed."""
    size = len(ROW_BUCKETS)
    return CostTable(torch.ones(size).double().numpy(), torch.zeros(size).double().numpy(), frozen=True)


def engine_of(arch: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> Engine:
    config = EngineConfig(max_context=1024, max_nodes=15, **options)
    return Engine(tiny_model(arch, dtype), None, config, cost=cheap_rows())


@pytest.fixture(scope="module")
def llama() -> Engine:
    return engine_of()


@pytest.fixture(scope="module")
def prompt(llama: Engine) -> list[int]:
    return prompt_for(llama.target.model, 200)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_float64_is_exact(llama: Engine, prompt: list[int], params: SamplingParams) -> None:
    result = audit(llama, prompt, params)
    values = result.summary()
    assert result.verdict == "exact" and values["exact"] is True and values["first_difference"] is None
    assert values["tokens"] == 48 and values["gap"] is None and values["differences_per_1k"] == 0.0
    assert result.grafted.token_ids == result.plain.token_ids
    assert result.grafted.stats["accepted"] > 0 and result.plain.stats["nodes"] == 0
    assert "all 48 tokens" in sentence(result, None)


def test_plain_twin_shares_weights_and_leaves_the_engine_alone(llama: Engine) -> None:
    twin = plain_twin(llama)
    assert twin.config == replace(llama.config, policy="plain") and llama.config.policy == "adaptive"
    assert twin.target is llama.target and twin.pool is llama.pool


def test_a_drawn_seed_is_shared_by_both_runs(llama: Engine, prompt: list[int]) -> None:
    result = audit(llama, prompt, replace(SAMPLED, seed=None))
    assert result.verdict == "exact" and result.plain.seed == result.grafted.seed


def test_nothing_is_left_in_the_pool(llama: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    audit(llama, prompt, GREEDY)
    assert llama.pool.num_free == llama.pool.num_chunks


def spoil(monkeypatch: pytest.MonkeyPatch, at_least: int = 2) -> None:
    """Make acceptance wrong: after a tree of `at_least` nodes the bonus token is another one."""
    true_accept = longgraft.rounds.accept

    def wrong(result: Any, *rest: Any) -> Acceptance:
        accepted = true_accept(result, *rest)
        if len(result.tree) < at_least:
            return accepted
        last = (accepted.token_ids[-1] + 1) % VOCAB
        return Acceptance(accepted.path, [*accepted.token_ids[:-1], last], accepted.logprobs)

    monkeypatch.setattr(longgraft.rounds, "accept", wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wrong_token_is_a_mismatch(prompt: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(dtype=dtype)
    spoil(monkeypatch)
    result = audit(engine, prompt, SAMPLED, keep_going=True)
    values = result.summary()
    assert result.verdict == "MISMATCH" and values["exact"] is False
    first = values["first_difference"]
    at = first["position"]
    assert result.plain.token_ids[:at] == result.grafted.token_ids[:at]
    assert (first["plain_token"], first["grafted_token"]) == (result.plain.token_ids[at], result.grafted.token_ids[at])
    assert first["gap"] > first["bound"] >= 0
    assert len(result.plain.token_ids) == 48, "plain decoding goes on, to be timed"


def test_an_output_that_ends_too_early_or_too_late_is_a_mismatch(llama: Engine, prompt: list[int]) -> None:
    done = llama.generate(prompt, SAMPLED)
    short = replace(done, token_ids=done.token_ids[:20])
    result = compare(llama, prompt, short, SAMPLED)
    assert result.verdict == "MISMATCH"
    assert (result.differences[0].position, result.differences[0].grafted_token) == (20, None)
    long = replace(done, token_ids=(*done.token_ids, 7))
    result = compare(llama, prompt, long, SAMPLED)
    assert result.verdict == "MISMATCH"
    assert (result.differences[0].plain_token, result.differences[0].grafted_token) == (None, 7)
    assert "the end" in sentence(result, small_decoder())


def small_decoder() -> Any:
    class Decoder:
        def decode(self, token_ids: list[int]) -> str:
            return f"t{token_ids[0]}"

    return Decoder()


def blur(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Make logits depend a little on the number of rows of a forward, as kernels of different shapes do."""
    true_forward = Target.forward
    wave = torch.sin(torch.arange(VOCAB, dtype=torch.float64) * 1.7) * size

    def blurred(self: Target, segments: Any, long_rope: bool = False, **more: Any) -> list[torch.Tensor]:
        rows = sum(len(segment.token_ids) for segment in segments)
        return [logits + wave * (rows > 1) for logits in true_forward(self, segments, long_rope)]

    monkeypatch.setattr(Target, "forward", blurred)


def with_twins(engine: Engine, gap: float) -> Engine:
    """Give every second token an output row almost equal to its neighbour's, so that near ties are everywhere."""
    head = engine.target.model.lm_head.weight
    with torch.no_grad():
        head[1::2] = head[0::2] * (1 + gap)
    return engine


@pytest.fixture
def tied(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = with_twins(engine_of(), 2e-6)
    blur(monkeypatch, 1e-4)
    return engine


def test_a_near_tie_that_rounding_flips_is_proven(tied: Engine, prompt: list[int]) -> None:
    result = audit(tied, prompt, GREEDY)
    assert result.verdict == "proven_tie"
    (first,) = result.differences
    assert first.gap is not None and 0 < first.gap <= first.bound <= 2.1e-4
    assert abs(first.plain_token - first.grafted_token) == 1
    assert "proven_tie" in sentence(result, small_decoder())


def test_keep_going_counts_every_tie(tied: Engine, prompt: list[int]) -> None:
    result = audit(tied, prompt, replace(GREEDY, max_new_tokens=20), keep_going=True)
    values = result.summary()
    assert result.verdict == "proven_tie" and len(result.differences) > 1
    positions = [d.position for d in result.differences]
    assert positions == sorted(set(positions))
    assert values["differences_per_1k"] == round(1000 * len(positions) / 20, 3)


def test_a_gap_wider_than_rounding_is_not_a_tie(prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same flips, but the measured forwards agree: then rounding is no excuse."""
    engine = with_twins(engine_of(), 2e-6)
    true_verified = longgraft.rounds.verified
    wave = torch.sin(torch.arange(VOCAB, dtype=torch.float64) * 1.7) * 1e-4

    def blurred(*args: Any) -> Any:
        checked = true_verified(*args)
        return replace(checked, logits=checked.logits + wave * (len(checked.tree) > 1))

    monkeypatch.setattr(longgraft.rounds, "verified", blurred)
    result = audit(engine, prompt, GREEDY)
    assert result.verdict == "MISMATCH"
    assert 0 <= result.differences[0].bound < 1e-9 < result.differences[0].gap


def test_experts_that_change_are_classed_apart(prompt: list[int]) -> None:
    engine = engine_of("qwen3_moe")
    routers = Routes(engine.target.model).modules
    assert len(routers) == engine.target.config.num_hidden_layers

    def other_experts(module: Any, args: Any, output: Any) -> Any:
        logits, weights, chosen = output
        return (logits, weights, (chosen + 1) % 4 if len(chosen) > 1 else chosen)

    hooks = [module.register_forward_hook(other_experts) for module in routers]
    result = audit(engine, prompt, SAMPLED)
    for hook in hooks:
        hook.remove()
    assert result.verdict == "router_tie" and not result.summary()["exact"]
    assert audit(engine, prompt, SAMPLED).verdict == "exact"


def test_experts_that_changed_earlier_are_found(prompt: list[int]) -> None:
    """Another choice at an old output position explains a difference, too."""
    engine = engine_of("qwen3_moe")
    twin = plain_twin(engine)
    seq = twin.open(prompt, SAMPLED)
    rounds = twin.run([seq])
    for _ in range(6):
        next(rounds)
    assert not _routes_differed(twin, seq)

    def other_experts(module: Any, args: Any, output: Any) -> Any:
        logits, weights, chosen = output
        moved = torch.arange(len(chosen))[:, None] == 1  # the second row, which a 1-row forward has not
        return (logits, weights, torch.where(moved, (chosen + 1) % 4, chosen))

    hook = Routes(engine.target.model).modules[-1].register_forward_hook(other_experts)
    length = seq.cache.length
    assert _routes_differed(twin, seq)
    hook.remove()
    assert (seq.cache.length, seq.cache.check_integrity()) == (length, "")
    rounds.close()
    assert engine.pool.num_free == engine.pool.num_chunks


def test_routes_are_empty_without_routers(llama: Engine) -> None:
    routes = Routes(llama.target.model)
    with routes.first_rows(1):
        pass
    assert routes.modules == [] and routes.by_row() == []


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_gap_is_the_difference_of_processed_scores(temperature: float) -> None:
    params = resolve(SamplingParams(temperature=temperature, top_k=0, seed=5), None, VOCAB)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    text = [1, 2, 3, 4]
    noise = gumbel(5, 0, 1, torch.arange(VOCAB).numpy())
    scores = logits.numpy() + (temperature * noise if temperature else 0.0)
    sampler = Sampler(params, text[:3], VOCAB)
    best = int(scores.argmax())
    assert gap_of(sampler, logits, text, best) == 0.0
    for token in (0, 17, 200):
        assert gap_of(sampler, logits, text, token) == pytest.approx(scores[best] - scores[token], abs=1e-6)


def test_the_gap_covers_filters_and_forbidden_tokens() -> None:
    logits = torch.arange(8, dtype=torch.float64)
    params = SamplingParams(temperature=1.0, top_k=1, seed=0, bad_words_ids=[[3]])
    sampler = Sampler(resolve(params, None, 8), [1], 8)
    assert gap_of(sampler, logits, [1], 7) == 0.0
    assert 2.0 <= gap_of(sampler, logits, [1], 5) < 3.0, "raised until it is the only survivor of top-k"
    assert gap_of(sampler, logits, [1], 3) == float("inf")


@NATIVE
def test_exact_mode_admits_no_tie(prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(dtype=torch.float32, exact=True)
    assert audit(engine, prompt, SAMPLED).verdict == "exact"
    spoil(monkeypatch)
    first = audit(engine, prompt, SAMPLED).differences[0]
    assert (first.verdict, first.gap, first.bound) == ("MISMATCH", None, 0.0)


def test_exact_cost_is_measured(llama: Engine) -> None:
    cost = exact_cost(llama, 64)
    assert set(cost) == {"usual_s", "exact_s", "cost"}
    assert cost["usual_s"] > 0 and cost["exact_s"] > 0
    assert llama.pool.num_free == llama.pool.num_chunks


def test_the_gravest_verdict_counts(llama: Engine, prompt: list[int]) -> None:
    exact = audit(llama, prompt, replace(GREEDY, max_new_tokens=2))
    ties = [Difference(i, 1, 2, verdict, 0.0, 0.0) for i, verdict in enumerate(["proven_tie", "router_tie"])]
    assert Audit(exact.plain, exact.grafted, tuple(ties)).verdict == "router_tie"
