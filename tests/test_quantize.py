"""A model with weights of 8 or 4 bits is close to its original, and grafted decoding of it is plain decoding of it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from longgraft.config import GraftError, SamplingParams
from longgraft.kernels import int4_linear
from longgraft.kernels.int8_linear import twin
from longgraft.quantize import quantize, quantized, unquantized
from longgraft.quantized_linear import QuantizedLinear
from longgraft.target import Target
from tests.cases import SOURCES
from tests.engines import engine_for, one_thread, prompt_of
from tests.models import tiny_model


@pytest.fixture(autouse=True)
def quiet():
    with one_thread():
        yield


class Scaled(nn.Linear):
    """A subclass: its forward is its own affair."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled, self.last = nn.Linear(48, 70), Scaled(70, 70), nn.Linear(70, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.scaled(self.first(x))))


def logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3", "phi3_longrope", "qwen3_moe"])
def test_logits_are_close_to_those_of_the_same_weights(arch, bits):
    model = quantized(tiny_model(arch, torch.float32), bits=bits)
    prompt = prompt_of(60)
    ours = logits(model, prompt)
    theirs = logits(unquantized(copy.deepcopy(model)), prompt)
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).abs().mean() < 0.02 * theirs.std()
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", ["right", "siblings"])
@pytest.mark.parametrize(("bits", "temperature"), [(8, 0.0), (4, 0.0), (4, 1.0)])
def test_grafted_decoding_is_plain_decoding(dtype, source, bits, temperature):
    model = quantized(tiny_model("llama", dtype), bits=bits)
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=40)
    prompt = prompt_of(90)
    plain = engine_for(model=model, policy="plain", exact=True).generate(prompt, params)
    truth = [*prompt, *plain.token_ids]
    assert source in SOURCES
    output = engine_for(model=model, source=source, truth=truth, exact=True).generate(prompt, params)
    assert output.token_ids == plain.token_ids
    assert output.stats["rounds"] < 30


def test_a_target_keeps_the_dtype_of_activations():
    model = quantized(tiny_model("llama", torch.bfloat16))
    target = Target(model)
    assert target.dtype == torch.bfloat16
    assert target.vocab_size == 320
    assert logits(model, [1, 2, 3]).shape == (3, 320)
    with target.session():
        assert isinstance(model.lm_head, QuantizedLinear)


def test_what_is_replaced_and_what_is_left():
    model = Model().to(torch.bfloat16)
    plain = copy.deepcopy(model)
    found = quantize(model)
    assert found.layers == 2
    assert found.left == ("scaled",)
    assert found.bytes_before == 2 * (48 * 70 + 70 * 48)
    assert found.bytes_after == 128 * (48 + 4) + 64 * (72 + 4)
    assert type(model.scaled) is Scaled
    assert isinstance(model.first, QuantizedLinear)
    assert (model.first.in_features, model.first.out_features) == (48, 70)
    assert model.first.weight.shape == (70, 48)
    assert model.first.weight.dtype == torch.bfloat16
    assert "in_features=48" in repr(model)
    x = torch.randn(5, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model.first(x), twin(x, model.first.packed, plain.first.bias.float()))
        assert torch.allclose(model(x), plain(x), atol=0.05)


def test_in_4_bits_the_output_layer_has_8():
    model = tiny_model("llama", torch.bfloat16)
    before = model.get_output_embeddings().weight.clone()
    found = quantize(model, bits=4)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert {name for name, layer in layers.items() if layer.bits == 8} == {"lm_head"}
    assert found.bytes_after == sum(layer.packed.nbytes for layer in layers.values())
    assert torch.equal(layers["lm_head"].weight, quantized(nn.Sequential(_linear(before)))[0].weight)
    layer = layers["model.layers.0.mlp.up_proj"]
    assert layer.scale is None and layer.weight.dtype == torch.bfloat16 and "bits=4" in repr(layer)
    x = torch.randn(5, layer.in_features, dtype=torch.bfloat16)
    assert torch.equal(layer(x), int4_linear.twin(x, layer.packed))


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight)
    return layer


def test_layers_that_are_kept():
    found = quantize(model := Model(), keep=("first",))
    assert found.left == ("first", "scaled")
    assert type(model.first) is nn.Linear
    model = Model()
    model.first.register_forward_hook(lambda *args: None)
    model.last.forward = lambda x: x
    with pytest.raises(GraftError, match="to quantise, or all are kept"):
        quantize(model)


def test_one_layer_under_two_names_stays_one():
    model = Model()
    model.again = model.first
    assert quantize(model).layers == 2
    assert model.again is model.first
    assert isinstance(model.first, QuantizedLinear)


def test_the_original_weights_are_let_go():
    model = Model()
    held = [parameter.untyped_storage() for parameter in (model.first.weight, model.last.weight)]
    sizes = {storage.data_ptr() for storage in held}
    quantize(model)
    assert not sizes & {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in model.scaled.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_gets_a_copy_of_its_own(tied):
    config = AutoConfig.for_model(
        "qwen2", vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    before = model.get_input_embeddings().weight.clone()
    quantize(model)
    assert isinstance(model.get_output_embeddings(), QuantizedLinear)
    assert not model.config.tie_word_embeddings
    model.tie_weights()
    assert isinstance(model.get_output_embeddings(), QuantizedLinear)
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert logits(model, [1, 2]).isfinite().all()


def test_conversions_pass_by_and_other_devices_are_refused():
    model = quantized(Model())
    scale = model.first.scale.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.first.scale, scale)
    assert model.first.values.dtype == torch.uint8
    assert model.scaled.weight.dtype == torch.bfloat16
    with pytest.raises(GraftError, match="computes on the CPU; asked for meta"):
        model.to("meta")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("assign", [False, True])
def test_state_goes_into_another_model_of_its_kind(bits, assign):
    torch.manual_seed(0)
    one, other = quantized(Model(), bits=bits), quantized(Model(), bits=bits)
    x = torch.randn(3, 48)
    with torch.no_grad():
        assert not torch.equal(one(x), other(x))
        other.load_state_dict(one.state_dict(), assign=assign)
        assert torch.equal(one(x), other(x))
        assert torch.equal(copy.deepcopy(one)(x), one(x))


def test_refusals_leave_the_model_as_it_was():
    model = Model()
    with torch.no_grad():
        model.last.weight[3, 3] = torch.nan
    with pytest.raises(GraftError, match=r"last\.weight: infinite or undefined"):
        quantize(model)
    assert type(model.first) is nn.Linear
    with torch.no_grad():
        model.last.weight[3, 3] = 2.0**100
    with pytest.raises(GraftError, match=r"last\.weight: magnitudes of 2\^100 and more; expected sensible"):
        quantize(model, bits=4)
    assert type(model.first) is nn.Linear
    with pytest.raises(GraftError, match="bits 5: expected 8 or 4"):
        quantize(Model(), bits=5)
    with pytest.raises(GraftError, match="Model is on meta: 4-bit weights need"):
        quantize(Model().to("meta"), bits=4)
    with pytest.raises(GraftError, match="to quantise, or all are kept"):
        quantize(nn.Linear(3, 3))
    with pytest.raises(GraftError, match="to quantise, or all are kept"):
        quantize(quantized(nn.Sequential(nn.Linear(3, 3))))
