"""Loading: what comes back is what was saved, and every failure is one sentence."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import longgraft.memory as memory
from longgraft.config import EngineConfig, GraftError, SamplingParams
from longgraft.cost import CostTable
from longgraft.engine import Engine
from longgraft.load import load, refuse_mismatch
from longgraft.memory import skeleton, weight_bytes
from longgraft.quantized_linear import QuantizedLinear
from tests import engines
from tests.small_tokenizers import byte_level

VOCAB = 330
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    """No network, no progress bars, no advice."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch, engines.one_thread():
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield
    logging.disable(level)


def made(vocab_size: int = VOCAB, dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.for_model(
        "llama", vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made().save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refused(name: Any, *options: Any, **more: Any) -> str:
    with pytest.raises(GraftError) as error:
        load(str(name), *options, **more)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message


def same_weights(model: Any, other: Any) -> bool:
    mine, others = model.state_dict(), other.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


# What comes back --------------------------------------------------------------------------------------------------


def test_what_was_saved_comes_back(saved: Path) -> None:
    model, tokenizer = load(str(saved))
    assert same_weights(model, made()) and not model.training
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    assert tokenizer.decode(tokenizer("Hello, world")["input_ids"]) == "Hello, world"


def test_sharded_weights_come_back(saved: Path, tmp_path: Path) -> None:
    made().save_pretrained(tmp_path, max_shard_size="20KB")
    byte_level().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_weights(load(str(tmp_path))[0], made())


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bf16", torch.bfloat16), ("float16", torch.float16), ("float64", torch.float64)]
)
def test_the_dtype_asked_for(saved: Path, dtype: str, expected: torch.dtype) -> None:
    assert load(str(saved), dtype)[0].dtype == expected


def test_auto_is_the_dtype_it_was_stored_in(tmp_path: Path) -> None:
    made(dtype=torch.bfloat16).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    assert load(str(tmp_path))[0].dtype == torch.bfloat16


def test_an_engine_from_a_folder_generates(saved: Path) -> None:
    cost: CostTable = engines.cost_of()
    engine = Engine.from_pretrained(str(saved), EngineConfig(max_nodes=8), dtype="fp32", device="cpu", cost=cost)
    output = engine.generate("the lazy dog", SamplingParams(max_new_tokens=5))
    assert len(output.token_ids) == 5 and engine.tokenizer is not None and engine.config.max_nodes == 8


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_in_8_and_4_bits(saved: Path, quantize: str) -> None:
    model, _ = load(str(saved), quantize=quantize)
    assert isinstance(model.lm_head, QuantizedLinear) and isinstance(model.model.layers[1].mlp.up_proj, QuantizedLinear)
    engine = Engine.from_pretrained(str(saved), quantize=quantize)
    prompt = [5, 6, 7, 8] * 4
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=12, ignore_eos=True)
        assert engine.generate(prompt, params).token_ids == engine.generate(prompt, params, policy="plain").token_ids
    assert "quantize 'int3': expected int8 or int4, or nothing" in refused(saved, quantize="int3")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for name in (tmp_path / "none", "./none", "~/surely/not/there"):
        assert "no such folder; expected a folder, a GGUF file or a hub id" in refused(name)


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    message = refused(tmp_path / "none.gguf")
    assert "no such file; expected a local GGUF file or hub/id:FILE.gguf" in message


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not at all " * 50)
    assert "bad.gguf" in refused(tmp_path / "bad.gguf")


def test_a_hub_id_without_a_network() -> None:
    assert "model 'nobody/nothing-of-this-name' could not be loaded" in refused("nobody/nothing-of-this-name")


def test_a_model_type_nobody_knows(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "flumox"}))
    assert "flumox" in refused(copied)


@pytest.mark.parametrize("text", ["{not json", "{}", "[]", '"llama"'])
def test_a_config_that_is_none(copied: Path, text: str) -> None:
    (copied / "config.json").write_text(text)
    assert "could not be loaded" in refused(copied)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "could not be loaded" in refused(tmp_path)


def test_an_encoder_decoder(copied: Path) -> None:
    (copied / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": VOCAB, "d_model": 16}))
    assert "T5Config" in refused(copied)


def test_a_tokenizer_of_another_model(copied: Path) -> None:
    made(vocab_size=100).save_pretrained(copied)
    message = refused(copied)
    assert "tokenizer and model do not belong together" in message and "329" in message and "100 embeddings" in message


def test_a_padded_embedding_is_fine() -> None:
    refuse_mismatch(made(vocab_size=512), byte_level())


def test_no_tokenizer(copied: Path) -> None:
    for file in copied.glob("tokenizer*"):
        file.unlink()
    assert "could not be loaded" in refused(copied)


@pytest.mark.parametrize("dtype", ["float8", "int4", "", "FLOAT32"])
def test_a_dtype_it_does_not_know(saved: Path, dtype: str) -> None:
    assert refused(saved, dtype).startswith(f"dtype {dtype!r}: expected auto or one of float32")


def test_a_device_there_is_not(saved: Path) -> None:
    assert "could not be loaded" in refused(saved, device="quux")
    if not torch.cuda.is_available():
        assert "CUDA" in refused(saved, device="cuda")


def test_a_missing_weight_is_not_made_up(copied: Path) -> None:
    """transformers would fill it with random numbers and say so in a log."""
    weights = load_file(copied / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    message = refused(copied)
    assert "lack 1 tensors" in message and WEIGHT in message


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_weight_of_the_wrong_shape(copied: Path, quantize: str | None) -> None:
    weights = load_file(copied / "model.safetensors")
    weights[WEIGHT] = torch.zeros(3, 3)
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    message = refused(copied, quantize=quantize)
    assert WEIGHT in message and "[3, 3]" in message and "expected [32, 32]" in message


def test_a_file_that_was_cut_off(copied: Path) -> None:
    data = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "could not be loaded" in refused(copied)


def test_a_missing_shard(tmp_path: Path) -> None:
    made().save_pretrained(tmp_path, max_shard_size="20KB")
    byte_level().save_pretrained(tmp_path)
    min(tmp_path.glob("*.safetensors")).unlink()
    assert "00001" in refused(tmp_path)


def test_more_than_fits_is_refused_before_anything_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1024**3
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 * gib)
    monkeypatch.setattr("longgraft.load.loading_bytes", lambda *how: 7 * gib)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    message = refused(saved)
    assert "needs 7.0 GiB, 2.0 free on cpu; choose a smaller model or dtype, or free memory" in message
    assert "in float32" in message


def test_weights_are_counted_without_storage() -> None:
    model = made()
    numbers = sum(p.numel() for p in model.parameters())
    empty = skeleton(model.config)
    assert empty.device.type == "meta"
    assert weight_bytes(empty, torch.bfloat16) == 2 * numbers
    assert weight_bytes(empty, torch.float64) == 8 * numbers
