"""The network against a dense account of it: layouts, windows, biases, RoPE scaling, pieces of context."""

from typing import Any

import pytest
import torch

from longgraft.config import GraftError
from longgraft.draft.block_config import read_config
from longgraft.draft.block_model import BlockModel
from longgraft.draft.block_weights import build
from tests.draft.blocks import SPECULATORS, ZLAB, reference, tensors, values
from tests.engines import model_of

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}
CASES: dict[str, tuple[dict[str, Any], Any, float, bool]] = {
    "plain": (ZLAB, None, 1.0, False),
    "bias": ({**ZLAB, "attention_bias": True}, None, 1.0, True),
    "linear_rope": ({**ZLAB, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None, 4.0, False),
    "window": ({**ZLAB, **SLIDING}, lambda q, k: k > q - 6, 1.0, False),
    "speculators": (SPECULATORS, None, 1.0, False),
}


def network(config: dict[str, Any], bias: bool = False) -> BlockModel:
    return build(read_config(config), tensors(bias=bias), model_of())[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pieces", [[0], [1], [9], [4, 5], [1, 1, 1, 0, 6], [300]])
def test_equals_the_dense_account(name: str, pieces: list[int]) -> None:
    config, visible, factor, bias = CASES[name]
    net = network(config, bias)
    features = values("features", sum(pieces), 64, scale=1.0).double()
    block = values("block", 5, 64, scale=1.0).double()
    context, first = net.open(), 0
    for count in pieces:
        out = net.run(context, block, features[first : first + count])
        first += count
    expected = reference(tensors(bias=bias), block, features, visible, factor)
    assert context.length == sum(pieces)
    assert torch.allclose(out, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_speculators_windows_hang_from_the_root(causal: bool) -> None:
    layers = {**SPECULATORS["transformer_layer_config"], **SLIDING}
    config = {**SPECULATORS, "transformer_layer_config": layers, "sliding_window_non_causal": not causal}
    net = network(config)
    features, block = values("features", 20, 64, scale=1.0).double(), values("block", 5, 64, scale=1.0).double()
    out = net.run(net.open(), block, features)
    expected = reference(tensors(), block, features, lambda q, k: k >= 20 - 6 and (k <= max(q, 19) or not causal))
    assert torch.allclose(out, expected, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(out, reference(tensors(), block, features), atol=1e-3)


def test_a_block_leaves_nothing_behind() -> None:
    net = network(ZLAB)
    features = values("features", 6, 64, scale=1.0).double()
    first, second = values("a", 5, 64, scale=1.0).double(), values("b", 5, 64, scale=1.0).double()
    context = net.open()
    net.run(context, first, features[:4])
    after = net.run(context, second, features[4:])
    again = net.run(context, second, features[:0])
    fresh = net.run(net.open(), second, features)
    assert torch.allclose(after, fresh, atol=1e-12) and torch.allclose(again, fresh, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer"),
        ({"hidden_act": "nonsense"}, "nonsense"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": 32}, "another target"),
        ({"num_hidden_layers": "two"}, "configured"),
    ],
)
def test_what_it_cannot_be_is_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(GraftError, match=word):
        network({**ZLAB, **change})


def test_a_block_of_two() -> None:
    net = network({**ZLAB, "block_size": 2})
    features, block = values("features", 3, 64, scale=1.0).double(), values("block", 2, 64, scale=1.0).double()
    assert torch.allclose(net.run(net.open(), block, features), reference(tensors(), block, features), atol=2e-5)
