"""The checks at load: a model that does more than it tells us is found, and costs are measured without traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from longgraft.cache import SequenceCache
from longgraft.check import probe_exact, probe_tokens, probe_tree, self_check
from longgraft.config import GraftError
from longgraft.kernels.tree_attention import BACKENDS
from longgraft.measure import LONG_WIDTHS, SHORT_WIDTHS, filled, measure_costs, time_forward
from longgraft.quantize import quantized
from longgraft.target import Target
from tests import engines
from tests.engines import model_of
from tests.models import ARCHS, tiny_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss"])
def test_a_sound_model_passes_in_every_dtype(arch: str, dtype: torch.dtype) -> None:
    self_check(Target(model_of(arch, dtype)))


@pytest.mark.parametrize("arch", sorted(set(ARCHS) - {"llama", "gemma3", "gpt_oss"}))
def test_every_architecture_passes(arch: str) -> None:
    self_check(Target(model_of(arch, torch.float32)))


def narrow(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Attention that sees 8 tokens back only, and tells nobody."""
    rows, columns = (torch.arange(n) for n in (query.shape[2], key.shape[2]))
    near = (rows[:, None] >= columns) & (rows[:, None] - columns < 8)
    return sdpa_attention_forward(module, query, key, value, near[None, None], **options)


def tilted(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Attention with a bias by distance, and tells nobody."""
    rows, columns = (torch.arange(n) for n in (query.shape[2], key.shape[2]))
    bias = torch.where(rows[:, None] >= columns, -0.5 * (rows[:, None] - columns), -torch.inf).to(query.dtype)
    return sdpa_attention_forward(module, query, key, value, bias[None, None], **options)


@pytest.mark.parametrize("hidden", [narrow, tilted])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_that_does_more_than_it_says_is_refused(hidden: Any, dtype: torch.dtype) -> None:
    AttentionInterface.register("hidden", hidden)
    model = model_of("llama", dtype)
    target = Target(model)
    model.set_attn_implementation("hidden")
    try:
        with pytest.raises(GraftError, match="LlamaForCausalLM: with our attention its logits differ from its own"):
            self_check(target)
        assert model.config._attn_implementation == "hidden"
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("broken", ["nan", "rows"])
def test_logits_that_are_wrong_in_any_other_way_are_refused(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(model_of())
    forward = target.forward

    def wrong(*args: Any, **options: Any) -> list[Tensor]:
        logits = forward(*args, **options)
        return [rows * torch.nan if broken == "nan" else rows.roll(1, 0) for rows in logits]

    monkeypatch.setattr(target, "forward", wrong)
    with pytest.raises(GraftError, match="LlamaForCausalLM"):
        self_check(target)


@pytest.mark.parametrize("bits", [8, 4, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_activations_may_differ_more(
    bits: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", dtype)
    target = Target(model if bits is None else quantized(model, bits=bits))
    forward = target.forward

    def noisy(share: float) -> None:
        def moved(*args: Any, **options: Any) -> list[Tensor]:
            return [rows + share * rows.float().std() for rows in forward(*args, **options)]

        monkeypatch.setattr(target, "forward", moved)
        self_check(target)

    noisy(0.0)
    if bits is None:
        with pytest.raises(GraftError, match="LlamaForCausalLM"):
            noisy(0.15)
    else:
        noisy(0.15)
    with pytest.raises(GraftError, match="LlamaForCausalLM"):
        noisy(0.3)


def test_the_probes_are_what_they_should_be() -> None:
    assert np.array_equal(probe_tokens(50, 20), probe_tokens(50, 20))
    assert set(probe_tokens(3, 100).tolist()) == {0, 1, 2}
    tree = probe_tree(np.arange(10, dtype=np.int32))
    assert not tree.is_chain and tree.depths.max() == 3 and len(tree) == 8


def test_a_vocabulary_of_two_can_be_probed() -> None:
    """Few token ids make equal siblings, which are one node."""
    config = AutoConfig.for_model(
        "llama", vocab_size=2, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    self_check(Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()))


# Exact mode -------------------------------------------------------------------------------------------------------


def test_exact_mode_is_refused_where_rows_depend_on_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(model_of("llama", torch.float32))
    forward = target.forward

    def uneven(segments: Any, **options: Any) -> list[Tensor]:
        return [rows + 1e-5 * len(rows) for rows in forward(segments, **options)]

    monkeypatch.setattr(target, "forward", uneven)
    with pytest.raises(GraftError, match="exact mode: LlamaForCausalLM in float32 does not compute a token bitwise"):
        probe_exact(target)


@pytest.mark.skipif("native" not in BACKENDS, reason="exact mode needs the native attention")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_mode_is_granted_with_kernels_whose_rows_are_independent(dtype: torch.dtype) -> None:
    probe_exact(Target(model_of("llama", dtype), exact=True))


# Costs ------------------------------------------------------------------------------------------------------------


def test_measuring_leaves_no_trace() -> None:
    target = Target(model_of("llama", torch.float32))
    pool = target.new_pool(10)
    with target.session():
        table = measure_costs(target, pool, contexts=(16, 300))
    assert pool.num_free == 10 and pool.check_integrity() == ""
    assert not table.frozen
    seconds = table.rounds(100, 5000)
    assert np.all(seconds > 0) and np.all(np.diff(seconds) >= 0)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_small_pool_is_measured_as_far_as_it_goes(chunks: int) -> None:
    target = Target(model_of("llama", torch.float32))
    pool = target.new_pool(chunks)
    with target.session():
        measure_costs(target, pool)
    assert pool.num_free == chunks


@pytest.mark.parametrize("limit", [36, 128, 1024])
def test_a_table_of_positions_is_not_overrun(limit: int) -> None:
    """Models with learned positions have none beyond their limit, wherever costs are measured."""
    config = AutoConfig.for_model(
        "gpt2", vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=limit, bos_token_id=None, eos_token_id=None
    )
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    with target.session():
        measure_costs(target, target.new_pool(12))


def test_costs_are_measured_if_measuring_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is whole again even then."""
    target = Target(model_of("llama", torch.float32))
    pool = target.new_pool(10)

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt), target.session():
        measure_costs(target, pool)
    assert pool.num_free == 10


def test_every_width_is_timed_once_behind_a_short_and_some_behind_a_long_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target(model_of("llama", torch.float32))
    seen: set[tuple[int, int]] = set()
    forward = target.forward

    def noted(segments: Any, **options: Any) -> Any:
        seen.add((len(segments[0].token_ids), segments[0].cache.length))
        return forward(segments, **options)

    monkeypatch.setattr(target, "forward", noted)
    with target.session():
        measure_costs(target, target.new_pool(3), contexts=(20, 200))
    assert seen >= {(rows, 20) for rows in SHORT_WIDTHS} | {(rows, 200) for rows in LONG_WIDTHS}


def test_a_filled_cache_is_used_and_kept() -> None:
    target = Target(model_of("llama", torch.float32))
    pool = target.new_pool(2)
    cache: SequenceCache = filled(target, pool, 270)
    keys, values = cache.runs(1)[0]
    assert cache.length == 270 and torch.isfinite(keys).all() and torch.isfinite(values).all() and keys.std() > 0.5
    with target.session():
        assert time_forward(target, cache, 5) > 0
    assert (cache.length, cache.reserved) == (270, 0)
