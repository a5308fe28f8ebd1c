"""Weights packed while a checkpoint is read: what packing the whole model gives, and nothing left of the way."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig

import longgraft.load_lazily as load_lazily
from longgraft.config import BITS, GraftError
from longgraft.load import load
from longgraft.load_lazily import unread_weights
from longgraft.memory import loading_bytes, skeleton, weight_bytes
from longgraft.quantized_linear import QuantizedLinear
from tests import engines
from tests.gguf_files import made
from tests.saved_model import silent
from tests.small_tokenizers import byte_level

WEIGHT = "model.layers.0.mlp.up_proj.weight"
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("llama", {"tie_word_embeddings": True}, id="tied"),
    pytest.param("qwen2", {}, id="biases"),
    pytest.param("gemma3_text", {}, id="gemma3"),
    pytest.param("qwen3_moe", MOE, id="experts"),
    pytest.param("phi3", {}, id="fused"),
]


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with silent(), engines.one_thread():
        yield


def save(path: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    byte_level().save_pretrained(path)
    return path


def both(path: Path, dtype: str = "auto", quantize: str = "int8") -> tuple[Any, Any]:
    """The model packed while it is read, and packed after it was read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longgraft.load._read_at_once", lambda *asked: pytest.fail("the model was read at once"))
        model = load(str(path), dtype, quantize=quantize)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longgraft.load.unread_weights", lambda *asked: None)
        return model, load(str(path), dtype, quantize=quantize)[0]


def assert_same(model: Any, other: Any) -> None:
    mine, others = model.state_dict(), other.state_dict()
    assert list(mine) == list(others)
    assert [name for name in mine if mine[name].dtype != others[name].dtype] == []
    assert [name for name in mine if not torch.equal(mine[name], others[name])] == []
    kinds = [(type(layer), getattr(layer, "kind", None), layer.training) for layer in model.modules()]
    assert kinds == [(type(layer), getattr(layer, "kind", None), layer.training) for layer in other.modules()]
    assert model.config.to_dict() == other.config.to_dict() and model.name_or_path == other.name_or_path
    assert model.generation_config.to_dict() == other.generation_config.to_dict()


@pytest.mark.parametrize(("model_type", "more"), MODELS)
@pytest.mark.parametrize(("dtype", "quantize"), [("auto", "int8"), ("bfloat16", "int8"), ("bfloat16", "int4")])
def test_the_same_model(tmp_path: Path, model_type: str, more: dict[str, Any], dtype: str, quantize: str) -> None:
    model, other = both(save(tmp_path, made(model_type, **more)), dtype, quantize)
    assert_same(model, other)
    layers = {name: layer.bits for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert layers.pop("lm_head") == 8 and set(layers.values()) == {BITS[quantize]}
    assert isinstance(model.lm_head, QuantizedLinear) and not any(type(layer) is nn.Linear for layer in model.modules())
    rows = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(rows).logits, other(rows).logits)


def test_shards(tmp_path: Path) -> None:
    path = save(tmp_path, made(), max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    assert_same(*both(path))
    last = max(path.glob("*.safetensors"))
    last.unlink()
    with pytest.raises(GraftError, match=last.name):
        load(str(path), quantize="int8")


def test_ties_that_the_weights_do_not_keep(tmp_path: Path) -> None:
    """A head of its own in the checkpoint though the config says that it is the embeddings'."""
    path = save(tmp_path, made())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert_same(*both(path))


def test_one_weight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, made())
    given: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    real = load_lazily.Stored.__getitem__

    def counted(self: Any, index: Any) -> torch.Tensor:
        value = real(self, index)
        if value.dim() == 2 and "embed" not in self.name:
            alive.append(sum(ref() is not None for ref in given))
            given.append(weakref.ref(value))
        return value

    monkeypatch.setattr(load_lazily.Stored, "__getitem__", counted)
    load(str(path), quantize="int8")
    assert len(alive) == 15 and max(alive) <= 1  # one may wait for its turn to be dropped


def test_nothing_is_left_of_the_way(tmp_path: Path) -> None:
    model, _ = load(str(save(tmp_path / "model", made())), quantize="int8")
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
    assert not getattr(model, "is_quantized", False) and not hasattr(model.config, "_is_quantized")
    load(str(tmp_path / "model"), quantize="int8")  # the second time it is registered


@pytest.mark.parametrize("from_file", [True, False])
def test_the_generation_config(tmp_path: Path, from_file: bool) -> None:
    path = save(tmp_path, made())
    if from_file:
        GenerationConfig(temperature=0.5, top_k=7, do_sample=True).save_pretrained(path)
    else:
        (path / "generation_config.json").unlink()
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 7, "top_k": 9}))
    model, other = both(path)
    assert model.generation_config.to_dict() == other.generation_config.to_dict()
    assert model.generation_config.top_k == 7 if from_file else model.generation_config.eos_token_id == 7


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_what_is_not_finite(tmp_path: Path, part: str) -> None:
    path = save(tmp_path, made("qwen2"))
    weights = load_file(path / "model.safetensors")
    name = f"model.layers.1.self_attn.k_proj.{part}"
    weights[name].view(-1)[3] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GraftError, match=rf"^{name}: infinite or undefined values; expected finite"):
        load(str(path), quantize="int8")


def test_what_is_missing(tmp_path: Path) -> None:
    path = save(tmp_path, made())
    weights = load_file(path / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GraftError, match=f"lack 1 tensors the model needs, {WEIGHT}"):
        load(str(path), quantize="int8")


def test_what_is_read_at_once(tmp_path: Path) -> None:
    model = made()
    path = save(tmp_path, model)
    assert unread_weights(str(path), model.config, None) is None
    found = unread_weights(str(path), model.config, "int8")
    assert found is not None and set(found) == set(model.state_dict())
    model.config.auto_map = {"AutoModelForCausalLM": "code.Model"}
    assert unread_weights(str(path), model.config, "int8") is None
    del model.config.auto_map
    (path / "adapter_config.json").write_text("{}")
    assert unread_weights(str(path), model.config, "int8") is None
    (path / "adapter_config.json").unlink()
    (path / "model.safetensors").unlink()
    assert unread_weights(str(path), model.config, "int8") is None


def test_another_device_is_refused_before_anything_is_read() -> None:
    for quantize, bits in BITS.items():
        with pytest.raises(GraftError, match=f"{bits}-bit weights need the whole model on the CPU; asked for meta"):
            load("nobody/nothing", device="meta", quantize=quantize)


@pytest.mark.parametrize("quantize", list(BITS))
@pytest.mark.parametrize(("model_type", "more"), MODELS)
def test_the_bytes_that_are_asked_for(tmp_path: Path, model_type: str, more: dict[str, Any], quantize: str) -> None:
    model = made(model_type, **more)
    empty, dtype = skeleton(model.config), torch.bfloat16
    counted = weight_bytes(empty, dtype, quantize)
    quantized, _ = load(str(save(tmp_path, model)), "bfloat16", quantize=quantize)
    layers = [layer for layer in quantized.modules() if isinstance(layer, QuantizedLinear)]
    held = sum(layer.packed.nbytes for layer in layers) + sum(p.nbytes for p in quantized.parameters())
    biases = sum(layer.bias.numel() for layer in layers if layer.bias is not None)
    assert counted == held + 2 * biases
    largest = max(p.numel() for p in model.parameters())
    assert loading_bytes(empty, dtype, quantize, False, True) == counted + 2 * largest
    whole = weight_bytes(empty, dtype)
    assert loading_bytes(empty, dtype, quantize, False, False) == max(counted, whole) + 2 * largest
    assert loading_bytes(empty, dtype, None, True, True) == whole == loading_bytes(empty, dtype, None, False, False)
    assert loading_bytes(empty, dtype, None, True, False) == whole + 8 * largest
