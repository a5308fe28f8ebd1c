"""The promise: with any proposals, the output is token for token that of plain decoding with the same seed.

Everything runs in float64 on models built from config; equality is exact. The oracle is a loop that runs the
model's own attention over the whole text for every token and asks the sampler once (`plain_generate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

import longgraft.rounds as rounds_module
from longgraft.cache import SequenceCache
from longgraft.config import EngineConfig, Output, SamplingParams
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.engine import Engine
from longgraft.resolve import resolve
from longgraft.sampler import Sampler
from longgraft.tree import Source, TokenTree
from tests.cases import SOURCES, plain_generate
from tests.models import VOCAB, prompt_for, tiny_model

ARCHS = ("llama", "qwen3", "gemma3", "qwen3_moe")
MORE_ARCHS = ("gpt_oss", "gemma2", "mistral", "llama_yarn", "llama_llama3", "phi3_longrope", "qwen2", "llama_mqa")
PROMPT_LEN, NEW = 235, 56
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "t0.7": {"temperature": 0.7, "top_k": 0, "seed": 11},
    "t1.5": {"temperature": 1.5, "top_k": 0, "seed": 12},
    "top_k": {"temperature": 1.0, "top_k": 20, "seed": 13},
    "top_p": {"temperature": 1.2, "top_k": 0, "top_p": 0.8, "seed": 14},
    "min_p": {"temperature": 1.0, "top_k": 0, "min_p": 0.1, "seed": 15},
    "penalties": {
        "temperature": 0.7, "top_k": 0, "seed": 16, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    "repeats": {"temperature": 0.7, "top_k": 0, "seed": 17, "presence_penalty": -4.0, "frequency_penalty": -0.5},
    "bad_words": {"temperature": 0.0, "bad_words_ids": [[5], [9, 3]], "min_new_tokens": 10},
}  # fmt: skip


def flat_cost() -> CostTable:
    """Rows cost nothing extra: as many nodes as possible are verified."""
    return CostTable(np.full(len(ROW_BUCKETS), 1.0), np.zeros(len(ROW_BUCKETS)), frozen=True)


def rising_cost() -> CostTable:
    """Every row costs a fifth of the first: the budget follows the evidence."""
    return CostTable(1.0 + 0.2 * np.array(ROW_BUCKETS, np.float64), np.zeros(len(ROW_BUCKETS)), frozen=True)


@lru_cache(maxsize=16)
def model_of(arch: str) -> Any:
    return tiny_model(arch)


@lru_cache(maxsize=64)
def engine_of(arch: str, policy: str = "adaptive", **settings: Any) -> Engine:
    cost = None if policy == "plain" else flat_cost()
    return Engine(model_of(arch), None, EngineConfig(policy=policy, **settings), cost=cost)


def grafted(arch: str, source: str, truth: Sequence[int], cost: CostTable | None = None, **settings: Any) -> Engine:
    """An engine whose proposals come from one of `SOURCES`, which knows the true text."""
    config = EngineConfig(**settings)
    return Engine(model_of(arch), None, config, cost=cost or flat_cost(), index=lambda v: SOURCES[source](truth))


@lru_cache(maxsize=64)
def prompt_of(arch: str, length: int = PROMPT_LEN, seed: int = 0) -> tuple[int, ...]:
    return tuple(prompt_for(model_of(arch), length, seed))


def params_of(setting: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": NEW, **SETTINGS[setting], **more})


@lru_cache(maxsize=128)
def expected(arch: str, setting: str, new: int = NEW, seed: int = 0) -> tuple[int, ...]:
    """Plain decoding by a loop without cache, tree or engine that asks the sampler once a token."""
    prompt = prompt_of(arch, seed=seed)
    sampler = Sampler(resolve(params_of(setting), None, VOCAB), prompt, VOCAB)
    return tuple(plain_generate(tiny_model(arch), prompt, lambda *args: sampler.draw(*args).token_id, new))


def crossed_chunk_border(output: Output, rows: int = 256) -> bool:
    """True if some round accepted nodes on both sides of a chunk border (from the rounds' sizes)."""
    length = output.prompt_len
    crossings = False
    for new in output.stats["new_tokens_by_round"]:
        crossings |= new > 1 and (length - 1) // rows != (length - 1 + new - 1) // rows
        length += new
    return crossings


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("arch", ARCHS)
def test_retrieval_changes_nothing(arch: str, setting: str) -> None:
    output = engine_of(arch).generate(prompt_of(arch), params_of(setting))
    assert tuple(output.token_ids) == expected(arch, setting)
    assert len(output.sources) == len(output.origins) == NEW
    assert output.stats["rounds"] <= NEW


@pytest.mark.parametrize("arch", MORE_ARCHS)
def test_other_attention_kinds(arch: str) -> None:
    for setting in ("greedy", "t0.7"):
        output = engine_of(arch).generate(prompt_of(arch), params_of(setting, max_new_tokens=40))
        assert tuple(output.token_ids) == expected(arch, setting, 40)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_runs_above_met_every_case(arch: str) -> None:
    outputs = [
        engine_of(arch).generate(prompt_of(arch, seed=s), params_of(k)) for s in range(2) for k in ("greedy", "t0.7")
    ]
    rounds = [r for output in outputs for r in output.stats["accepted_by_round"]]
    depth = max(max(map(int, output.stats["accepted_by_depth"]), default=0) for output in outputs)
    assert 0 in [a for n, a in rounds if n], "no round with zero acceptance"
    assert any(0 < a < n for n, a in rounds), "no round with partial acceptance"
    assert depth >= 4, "no acceptance at depth >= 4"
    assert any(output.stats["sibling_rounds"] for output in outputs), "no later sibling was ever chosen"
    sources = {source for output in outputs for source in output.sources}
    assert {Source.ROOT, Source.PROMPT, Source.SUCCESSOR} <= sources
    assert any(output.stats["nodes_by_source"].get("history") for output in outputs)


@pytest.mark.parametrize("arch", ARCHS)
def test_full_acceptance_and_a_chunk_border_inside_a_path(arch: str) -> None:
    truth = prompt_of(arch) + expected(arch, "greedy")
    output = grafted(arch, "right", truth).generate(prompt_of(arch), params_of("greedy"))
    assert tuple(output.token_ids) == expected(arch, "greedy")
    assert all(n == a for n, a in output.stats["accepted_by_round"]), "the right chain was not accepted whole"
    assert crossed_chunk_border(output), "no accepted path crossed a chunk border"


@pytest.mark.parametrize("setting", ["greedy", "t0.7", "penalties"])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_adversarial_proposals_change_nothing(arch: str, name: str, setting: str) -> None:
    truth = prompt_of(arch) + expected(arch, setting)
    for cost in (flat_cost(), rising_cost()):
        engine = grafted(arch, name, truth, cost)
        output = engine.generate(prompt_of(arch), params_of(setting))
        assert tuple(output.token_ids) == expected(arch, setting)
        assert engine.pool.num_free == engine.pool.num_chunks
        assert engine.pool.check_integrity() == ""


def test_later_siblings_are_chosen() -> None:
    truth = prompt_of("llama") + expected("llama", "greedy")
    output = grafted("llama", "siblings", truth).generate(prompt_of("llama"), params_of("greedy"))
    assert output.stats["sibling_rounds"] >= output.stats["rounds"] - 1


@pytest.mark.parametrize("rows", [1, 7, 512])
@pytest.mark.parametrize("arch", ARCHS)
def test_prefill_chunking_changes_nothing(arch: str, rows: int) -> None:
    output = engine_of(arch, prefill_rows=rows).generate(prompt_of(arch), params_of("greedy", max_new_tokens=24))
    assert tuple(output.token_ids) == expected(arch, "greedy", 24)
    whole = engine_of(arch, prefill_rows=len(prompt_of(arch))).generate(
        prompt_of(arch), params_of("greedy", max_new_tokens=24)
    )
    assert whole.token_ids == output.token_ids


@pytest.mark.parametrize("setting", ["greedy", "t0.7"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_ragged_batch_equals_its_members_alone(arch: str, setting: str) -> None:
    prompts = [prompt_of(arch)[-length:] for length in (1, 33, 150, 235)]
    params = params_of(setting, max_new_tokens=30)
    together = engine_of(arch).generate(prompts, params)
    for prompt, output in zip(prompts, together):
        assert output.token_ids == engine_of(arch, policy="plain").generate(prompt, params).token_ids


@pytest.mark.parametrize("setting", ["greedy", "t0.7"])
def test_eos_at_every_position_of_a_block(setting: str) -> None:
    truth = prompt_of("llama") + expected("llama", setting)
    engine = grafted("llama", "right", truth)
    new = expected("llama", setting)
    seen: set[int] = set()
    for position, token in enumerate(new[:30]):
        if token in new[:position]:
            continue
        output = engine.generate(prompt_of("llama"), params_of(setting, eos_token_ids=(token, VOCAB - 1)))
        assert tuple(output.token_ids) == new[: position + 1]
        assert output.finish_reason == "eos"
        assert output.stats["rounds"] == 1, "EOS did not fall inside one block"
        seen.add(position)
    assert len(seen) > 15


@pytest.mark.parametrize("new", [0, 1, 2, 12, 13, 14, 40])
def test_the_number_of_new_tokens_is_exact(new: int) -> None:
    truth = prompt_of("llama") + expected("llama", "greedy")
    engine = grafted("llama", "very_long", truth)
    output = engine.generate(prompt_of("llama"), params_of("greedy", max_new_tokens=new))
    assert tuple(output.token_ids) == expected("llama", "greedy")[:new]
    assert output.finish_reason == "length"


def test_generation_stops_at_the_context_limit() -> None:
    truth = prompt_of("llama") + expected("llama", "greedy")
    engine = grafted("llama", "very_long", truth, max_context=PROMPT_LEN + 20)
    output = engine.generate(prompt_of("llama"), params_of("greedy"))
    assert tuple(output.token_ids) == expected("llama", "greedy")[:20]
    assert output.finish_reason == "context"


def test_same_seed_same_output_another_seed_another() -> None:
    engine, prompt = engine_of("llama"), prompt_of("llama")
    first, again = (engine.generate(prompt, params_of("t1.5", seed=1)) for _ in range(2))
    other = engine.generate(prompt, params_of("t1.5", seed=2))
    assert first.token_ids == again.token_ids != other.token_ids
    drawn = engine.generate(prompt, params_of("t1.5", seed=None))
    assert engine.generate(prompt, params_of("t1.5", seed=drawn.seed)).token_ids == drawn.token_ids


def test_a_request_leaves_no_trace_in_the_next() -> None:
    engine, prompt = engine_of("llama"), prompt_of("llama")
    alone = Engine(model_of("llama"), None, cost=flat_cost()).generate(prompt, params_of("greedy"))
    engine.generate(prompt_of("llama", seed=5), params_of("t1.5"))
    after = engine.generate(prompt, params_of("greedy"))
    assert after.token_ids == alone.token_ids
    assert after.stats["accepted_by_round"] == alone.stats["accepted_by_round"]


def test_logprobs_equal_teacher_forcing() -> None:
    prompt = prompt_of("llama")
    output = engine_of("llama").generate(prompt, params_of("t0.7", logprobs=3, max_new_tokens=30))
    assert len(output.logprobs) == 30
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *output.token_ids]])
        rows = model_of("llama")(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    for row, token, entry in zip(rows, output.token_ids, output.logprobs):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


# Each entry breaks one thing; the comparison that the tests above make must then fail.
def wrong_position(patch: pytest.MonkeyPatch) -> None:
    """Rows are numbered as they lie instead of by depth."""
    patch.setattr(TokenTree, "positions", lambda tree, n: n + np.arange(len(tree), dtype=np.int32))


def wrong_mask_bit(patch: pytest.MonkeyPatch) -> None:
    def masked(tree: TokenTree) -> Any:
        mask = np.eye(len(tree), dtype=np.bool_)
        mask[1:, 0] = True
        return mask

    patch.setattr(TokenTree, "is_chain", property(lambda tree: False))
    patch.setattr(TokenTree, "ancestor_mask", masked)


def wrong_kv_row(patch: pytest.MonkeyPatch) -> None:
    right = SequenceCache.keep
    patch.setattr(SequenceCache, "keep", lambda cache, path: right(cache, range(len(path))))


def wrong_noise_key(patch: pytest.MonkeyPatch) -> None:
    right = Sampler.draw

    def draw(sampler: Sampler, logits: Any, token_ids: Any) -> Any:
        sampler.seed = len(sampler_calls)
        sampler_calls.append(1)
        return right(sampler, logits, token_ids)

    sampler_calls: list[int] = []
    patch.setattr(Sampler, "draw", draw)


def wrong_penalty_history(patch: pytest.MonkeyPatch) -> None:
    right = rounds_module.accept

    def forgetful(result: Any, sampler: Any, token_ids: Any, stop: Any) -> Any:
        class Stale:
            seed = sampler.seed

            def draw(self, logits: Any, path: Any) -> Any:
                padding = [token_ids[-1]] * (len(path) - len(token_ids))
                return sampler.draw(logits, [*token_ids, *padding])

        return right(result, Stale(), token_ids, stop)

    patch.setattr(rounds_module, "accept", forgetful)


MUTATIONS = {
    "position": (wrong_position, "greedy", "siblings"),
    "mask": (wrong_mask_bit, "greedy", "right"),
    "kv row": (wrong_kv_row, "greedy", "siblings"),
    "noise key": (wrong_noise_key, "t1.5", "right"),
    "penalty history": (wrong_penalty_history, "repeats", "right"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, setting, source = MUTATIONS[name]
    truth = prompt_of("llama") + expected("llama", setting)
    engine = grafted("llama", source, truth)
    assert tuple(engine.generate(prompt_of("llama"), params_of(setting)).token_ids) == expected("llama", setting)
    mutate(monkeypatch)
    mutated = engine.generate(prompt_of("llama"), params_of(setting))
    assert tuple(mutated.token_ids) != expected("llama", setting)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
