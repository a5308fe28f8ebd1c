"""GGUF files: what is read tensor by tensor is, bit for bit, what transformers reads at once."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longgraft.config import GraftError
from longgraft.gguf_header import quick, quick_headers
from longgraft.load import load
from longgraft.memory import skeleton
from longgraft.quantized_linear import QuantizedLinear
from tests import engines
from tests.gguf_files import made, write
from tests.saved_model import silent

gguf = pytest.importorskip("gguf")
load_gguf = pytest.importorskip("longgraft.load_gguf")

DOWN = "model.layers.1.mlp.down_proj.weight"
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,  # what transformers takes it for whatever the file says
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with silent(), engines.one_thread():
        yield


def at_once(path: Path, *options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longgraft.load.gguf_weights", lambda *asked: None)
        return load(str(path), *options)


def lazily(path: Path, *options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longgraft.load._read_at_once", lambda *asked: pytest.fail("the model was read at once"))
        return load(str(path), *options)


def differences(model: Any, other: Any) -> list[str]:
    mine, others = model.state_dict(), other.state_dict()
    assert list(mine) == list(others)
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in other.named_buffers())
    assert [name for name in mine if mine[name].dtype != others[name].dtype] == []
    return [name for name in mine if not torch.equal(mine[name], others[name])]


def refused(path: Path, *options: Any) -> str:
    with pytest.raises(GraftError) as error:
        load(str(path), *options)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message


MODELS = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("llama", {"tie_word_embeddings": True}, id="tied"),
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("gemma3_text", {}, id="gemma3"),
]


@pytest.mark.parametrize(("model_type", "more"), MODELS)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_same_weights(tmp_path: Path, model_type: str, more: dict[str, Any], dtype: str) -> None:
    path = write(tmp_path / "tiny.gguf", made(model_type, **more))
    model, tokenizer = lazily(path, dtype)
    other, others_tokenizer = at_once(path, dtype)
    assert differences(model, other) == []
    assert model.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32) and not model.training
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (other.lm_head.weight is other.model.embed_tokens.weight)
    assert tied == (model_type == "gemma3_text" or "tie_word_embeddings" in more)
    assert model.generation_config.to_dict() == other.generation_config.to_dict()
    assert model.name_or_path == other.name_or_path == model.config.name_or_path
    assert tokenizer("Hello, fox")["input_ids"] == others_tokenizer("Hello, fox")["input_ids"]
    assert torch.equal(model(torch.arange(9)[None]).logits, other(torch.arange(9)[None]).logits)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize(("model_type", "more"), MODELS)
def test_the_same_weights_in_8_and_4_bits(tmp_path: Path, model_type: str, more: dict[str, Any], quantize: str) -> None:
    path = write(tmp_path / "tiny.gguf", made(model_type, **more))
    model, _ = lazily(path, "auto", None, quantize)
    assert differences(model, at_once(path, "auto", None, quantize)[0]) == []
    assert isinstance(model.lm_head, QuantizedLinear) and model.lm_head.weight.dtype == torch.bfloat16
    assert not model.config.get_text_config().tie_word_embeddings
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")


def test_what_is_undone_and_what_stays(tmp_path: Path) -> None:
    """The numbers themselves, not only that two ways agree; F32 and F16 lose nothing."""
    model = made()
    path = write(tmp_path / "tiny.gguf", model)
    found = load_gguf.stored(path, skeleton(model.config), torch.float32)
    assert set(found) == set(model.state_dict())
    undone = {name.split(".")[-2] for name, tensor in found.items() if tensor.undo is not None}
    assert undone == {"q_proj", "k_proj"}
    weight = found["model.embed_tokens.weight"]
    assert weight.kind.name == "F32" and torch.equal(weight[...], model.model.embed_tokens.weight)
    permuted = found["model.layers.0.self_attn.q_proj.weight"]
    assert permuted.kind.name == "F16"
    expected = model.model.layers[0].self_attn.q_proj.weight.half().float().view(4, 8, 2, 64).transpose(1, 2)
    assert torch.equal(permuted[...], expected.reshape(64, 64))


@pytest.mark.parametrize("size", [1, 64, 200, 1 << 20])
def test_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path = write(tmp_path / "tiny.gguf", model := made())
    found = load_gguf.stored(path, skeleton(model.config), torch.bfloat16)
    monkeypatch.setattr(load_gguf, "SLICE", size)
    reader = gguf.GGUFReader(path)
    for tensor in found.values():
        if tensor.undo is None:
            there = next(held for held in reader.tensors if held.name == tensor.name)
            whole = torch.from_numpy(np.copy(gguf.dequantize(there.data, there.tensor_type)))
            assert torch.equal(tensor[...], whole.to(torch.bfloat16)), tensor.name


def test_one_weight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 8 bits no linear weight is there any more when the next is read."""
    path = write(tmp_path / "tiny.gguf", made())
    given: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    real = load_gguf.Stored.__getitem__

    def counted(self: Any, index: Any) -> torch.Tensor:
        value = real(self, index)
        if "_proj" in self.name or "ffn" in self.name or "attn_" in self.name or self.name.startswith("output."):
            alive.append(sum(ref() is not None for ref in given))
            given.append(weakref.ref(value))
        return value

    monkeypatch.setattr(load_gguf.Stored, "__getitem__", counted)
    model, _ = lazily(path, "auto", None, "int8")
    norms = sum("norm" in name for name, _ in model.named_parameters())
    assert len(alive) >= 15 and max(alive) <= norms


def test_grouped_experts_are_read_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", model := made("qwen3_moe", **MOE))
    with pytest.raises(load_gguf.UnknownWay, match="not one tensor of the file"):
        load_gguf.stored(path, skeleton(model.config), torch.float32)
    assert differences(load(str(path))[0], at_once(path)[0]) == []


def test_a_missing_weight_is_not_made_up(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", made(), leave=DOWN)
    for quantize in (None, "int8"):
        message = refused(path, "auto", None, quantize)
        assert "lack 1 tensors" in message and DOWN in message


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_weight_of_another_shape(tmp_path: Path, quantize: str | None) -> None:
    path = write(tmp_path / "tiny.gguf", made(), change={DOWN: np.zeros((64, 32), np.float32)})
    message = refused(path, "auto", None, quantize)
    assert DOWN in message and "[64, 32]" in message and "expected [64, 96]" in message


def test_a_weight_that_is_not_finite(tmp_path: Path) -> None:
    broken = np.zeros((64, 96), np.float32)
    broken[3, 3] = np.inf
    path = write(tmp_path / "tiny.gguf", made(), change={DOWN: broken})
    assert f"{DOWN}: infinite or undefined values" in refused(path, "auto", None, "int8")


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", made())
    whole = path.read_bytes()
    for share in (0.01, 0.2, 0.6, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert "tiny.gguf" in refused(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", model := made())
    found = load_gguf.stored(path, skeleton(model.config), torch.float32)
    path.write_bytes(path.read_bytes()[:-100])
    last = max(found.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(GraftError, match=r"tiny\.gguf ends within .*: expected a complete file"):
        last[...]


def test_a_tokenizer_with_more_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", made(vocab_size=320))
    assert "tokenizer and model do not belong together" in refused(path)


# The header ---------------------------------------------------------------------------------------------------------


def test_a_quick_header_is_the_same_header(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", made())
    plain, other = gguf.GGUFReader(path), quick(gguf.GGUFReader)(path)
    assert list(plain.fields) == list(other.fields) and plain.data_offset == other.data_offset
    for name, field in plain.fields.items():
        same = other.fields[name]
        assert (field.offset, field.data, field.types) == (same.offset, same.data, same.types)
        assert field.contents() == same.contents()
        for part, its in zip(field.parts, same.parts, strict=True):
            assert part.dtype == its.dtype and part.shape == its.shape and part.tobytes() == its.tobytes()
    assert [t.data_offset for t in plain.tensors] == [t.data_offset for t in other.tensors]


def test_the_reader_is_given_back() -> None:
    before = gguf.GGUFReader
    with pytest.raises(RuntimeError), quick_headers():
        assert gguf.GGUFReader is not before and issubclass(gguf.GGUFReader, before)
        raise RuntimeError
    assert gguf.GGUFReader is before


# Real files: LONGGRAFT_MODELS=FOLDER with some -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"])
def test_real_files(name: str, quantize: str | None) -> None:
    path = Path(os.environ.get("LONGGRAFT_MODELS", ".")) / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"no {path.name} in $LONGGRAFT_MODELS")
    model, tokenizer = lazily(path, "auto", "cpu", quantize)
    other, others_tokenizer = at_once(path, "auto", "cpu", quantize)
    assert differences(model, other) == []
    assert tokenizer.get_vocab() == others_tokenizer.get_vocab()
