"""What a model's keys depend on is told apart; what they do not is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from longgraft.config import GraftError
from longgraft.prefix_identity import identity, signature
from longgraft.quantize import quantized
from tests.engines import model_of
from tests.models import tiny_model


def test_a_signature_changes_with_every_weight_and_with_nothing_else() -> None:
    model = copy.deepcopy(model_of())
    before = signature(model)
    model(input_ids=torch.zeros(1, 3, dtype=torch.long))
    assert signature(model) == before
    with torch.no_grad():
        for weight in list(model.parameters())[:4]:
            weight[..., :1] += 1
            before, old = signature(model), before
            assert before != old
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    assert signature(model) != before


def test_an_identity_outlives_the_process() -> None:
    """Equal for equal weights, wherever they came from; the name of the folder does not count."""
    one, other = tiny_model("llama"), tiny_model("llama")
    other.config._name_or_path = "somewhere/else"
    assert identity(one) == identity(other)
    assert identity(one)["dtype"] == "float64" and identity(one)["adapter"] == identity(one)["quantisation"] == "none"


@pytest.mark.parametrize("arch", ["llama_llama3", "llama_yarn", "qwen2", "llama_mha"])
def test_other_configs_are_other_models(arch: str) -> None:
    assert identity(tiny_model(arch))["model"] != identity(model_of())["model"]


def test_one_changed_number_is_another_model() -> None:
    model = tiny_model("llama")
    before = identity(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-9
    after = identity(model)
    assert after["weights"] != before["weights"]
    assert {**after, "weights": ""} == {**before, "weights": ""}


@pytest.mark.parametrize(("bits", "name"), [(8, "int8"), (4, "int4")])
def test_quantised_weights_are_seen(bits: int, name: str) -> None:
    small, again = (quantized(tiny_model("llama"), bits=bits) for _ in range(2))
    assert identity(small) == identity(again)
    assert identity(small)["quantisation"] == name
    before = signature(small)
    small.model.layers[0].mlp.up_proj.values[0] ^= 1
    assert signature(small) != before
    assert identity(small)["weights"] != identity(again)["weights"]


def test_inference_tensors_have_no_version_and_are_no_trouble() -> None:
    with torch.inference_mode():
        model = tiny_model("llama")
    assert signature(model) == signature(model)


def test_weights_that_are_not_there_are_refused() -> None:
    with pytest.raises(GraftError, match="not in memory"):
        identity(copy.deepcopy(model_of()).to("meta"))
