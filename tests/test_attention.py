"""Our attention in transformers: what it refuses to guess at, and that the model gets its own back."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longgraft.attention import NAME, FlatBatch, Part, attend, borrowed, register
from longgraft.config import GraftError, SamplingParams
from longgraft.target import Target
from tests import engines
from tests.engines import engine_for, model_of, prompt_of

ROWS, HEADS, SIZE = 5, 2, 4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


class Rows:
    """A cache that remembers what was written and has no prefix."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []

    def write(self, layer: int, keys: Tensor, values: Tensor, behind: int = 0) -> None:
        self.written.append((layer, len(keys)))

    def runs(self, layer: int, reserved: int = 0) -> list[Any]:
        return []


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(3, 1, HEADS, ROWS, SIZE, generator=generator, dtype=torch.float64)
    return made[0], made[1], made[2]


def part(begin: int, end: int, mask: Tensor | None = None) -> Part:
    return Part(Rows(), begin, end, torch.arange(end - begin), mask)


LAYER = SimpleNamespace(layer_idx=3)


def call(*parts: Part, **options: Any) -> Tensor:
    batch = FlatBatch(parts or (part(0, ROWS),), "auto")
    return attend(LAYER, *inputs(), None, longgraft_batch=batch, **options)[0]


def test_rows_of_each_part_see_their_own_part_only() -> None:
    query, key, value = inputs()
    first, second = part(0, 2), part(2, 4)
    out = call(first, second)
    assert out.shape == (1, ROWS, HEADS, SIZE)
    for one in (first, second):
        q, k, v = (x[:, :, one.begin : one.end] for x in (query, key, value))
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert torch.allclose(out[:, one.begin : one.end], alone.transpose(1, 2))
        assert one.cache.written == [(3, 2)]  # type: ignore[attr-defined]
    assert torch.equal(out[0, 4], value[0, :, 4]), "a padding row is its own value"


def test_the_scale_is_what_the_model_says() -> None:
    assert torch.equal(call(), call(scaling=SIZE**-0.5))
    assert not torch.allclose(call(), call(scaling=1.0))


@pytest.mark.parametrize("option", ["position_bias", "head_mask", "alibi", "cu_seq_lens_q"])
def test_an_option_it_does_not_know_is_refused_by_name(option: str) -> None:
    assert torch.equal(call(**{option: None}), call())
    with pytest.raises(GraftError, match=f"SimpleNamespace: attention option {option} is not supported"):
        call(**{option: torch.zeros(1)})


def test_what_changes_nothing_is_taken() -> None:
    more = {"position_ids": torch.arange(ROWS)[None], "use_cache": False, "output_attentions": False, "dropout": 0.0}
    assert torch.equal(call(**more, sliding_window=None, softcap=None, s_aux=None), call())


def test_dropout_is_refused() -> None:
    with pytest.raises(GraftError, match=r"attention dropout is on; call model\.eval\(\)"):
        call(dropout=0.1)


def test_a_mask_of_the_models_own_is_refused() -> None:
    with pytest.raises(GraftError, match="the model built an attention mask of its own"):
        attend(LAYER, *inputs(), torch.zeros(1, 1, ROWS, ROWS), longgraft_batch=FlatBatch([part(0, ROWS)], "auto"))


def test_without_a_flat_batch_there_is_no_guess() -> None:
    with pytest.raises(GraftError, match="the flat batch did not reach the attention function"):
        attend(LAYER, *inputs(), None)


@pytest.mark.parametrize(
    "option", [{"sliding_window": 2}, {"softcap": 0.5}, {"s_aux": torch.tensor([1.0, -1.0]).double()}]
)
def test_windows_softcaps_and_sinks_count(option: dict[str, Any]) -> None:
    assert not torch.allclose(call(**option), call())


def test_registering_twice_changes_nothing() -> None:
    from transformers import AttentionInterface

    register()
    register()
    assert AttentionInterface()[NAME] is attend


# Borrowing --------------------------------------------------------------------------------------------------------


def attention_of(model: Any) -> Any:
    return model.config.get_text_config()._attn_implementation


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_the_model_gets_its_own_attention_back(own: str, error: type[BaseException]) -> None:
    model = model_of("qwen2")
    model.set_attn_implementation(own)
    try:
        with borrowed(model):
            assert attention_of(model) == NAME
        with pytest.raises(error), borrowed(model):
            raise error
        assert attention_of(model) == own
    finally:
        model.set_attn_implementation("sdpa")


def test_contexts_may_overlap_and_end_in_any_order() -> None:
    model = model_of()
    before = attention_of(model)
    first, second = borrowed(model), borrowed(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert attention_of(model) == NAME, "the second is still open"
    second.__exit__(None, None, None)
    assert attention_of(model) == before
    with borrowed(model):
        assert attention_of(model) == NAME
    assert attention_of(model) == before


def test_a_second_engine_on_the_model_does_not_disturb_the_first() -> None:
    model = model_of()
    engine, prompt = engine_for(), prompt_of(60)
    params = SamplingParams(max_new_tokens=16, temperature=0.0)
    alone = engine.generate(prompt, params).token_ids
    seq = engine.open(prompt, params)
    rounds = engine.run([seq])
    next(rounds)
    assert engine_for().generate(prompt, params).token_ids == alone
    for _ in rounds:
        pass
    assert tuple(seq.new_token_ids) == alone
    assert attention_of(model) != NAME


def test_experts_take_float64_while_borrowed() -> None:
    model = model_of("qwen3_moe")
    config = model.config.get_text_config()
    before = config._experts_implementation
    model.set_experts_implementation("grouped_mm")
    try:
        with borrowed(model):
            assert config._experts_implementation == "eager"
        assert config._experts_implementation == "grouped_mm"
    finally:
        model.set_experts_implementation(before)


def test_the_self_check_and_all_of_loading_leave_the_model_alone() -> None:
    model = model_of("gemma3")
    before = attention_of(model)
    Target(model)
    engine_for("gemma3")
    assert attention_of(model) == before
