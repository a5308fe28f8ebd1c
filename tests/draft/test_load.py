"""Which kind of drafter a folder holds is read from its config; what does not fit is refused in one sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from longgraft.config import GraftError
from longgraft.draft import load as load_module
from longgraft.draft.block import BlockDrafter
from longgraft.draft.eagle import Eagle3Drafter
from longgraft.draft.lm import ModelDrafter
from longgraft.draft.load import config_of, load_drafter, refuse_other_tokenizer
from longgraft.kernels.packed_linear import KERNEL
from longgraft.quantized_linear import QuantizedLinear
from tests import saved_model
from tests.draft import blocks, heads
from tests.engines import model_of


def test_a_language_model_with_the_same_tokenizer(tmp_path: Path) -> None:
    drafter = load_drafter(saved_model.save(tmp_path), model_of(), saved_model.byte_level())
    assert isinstance(drafter, ModelDrafter) and drafter.model.dtype == torch.float64
    assert not any(isinstance(module, QuantizedLinear) for module in drafter.model.model.modules())


@pytest.mark.skipif(KERNEL is None, reason="no native kernel for 8-bit weights here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_model_drafts_in_8_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    target = copy.deepcopy(model_of()).to(dtype)
    drafter = load_drafter(saved_model.save(tmp_path), target, saved_model.byte_level())
    assert isinstance(drafter, ModelDrafter) and drafter.model.dtype == dtype
    assert isinstance(drafter.model.model.get_output_embeddings(), QuantizedLinear)


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_an_eagle_head(tmp_path: Path, layout: str) -> None:
    drafter = load_drafter(str(heads.save(tmp_path, layout, heads.loaded())), model_of(), None)
    assert isinstance(drafter, Eagle3Drafter) and drafter.feature_layers == (0, 1, 1)


def test_a_block_drafter(tmp_path: Path) -> None:
    drafter = load_drafter(str(blocks.save(tmp_path, blocks.ZLAB, blocks.tensors())), model_of(), None)
    assert isinstance(drafter, BlockDrafter)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    ours = saved_model.byte_level()

    class Other:
        def __init__(self, vocab: dict[str, int]) -> None:
            self.vocab = vocab

        def get_vocab(self) -> dict[str, int]:
            return self.vocab

    vocab = ours.get_vocab()
    swapped = {token: {3: 4, 4: 3}.get(number, number) for token, number in vocab.items()}
    with pytest.raises(GraftError, match=r"drafter 'x': its tokenizer is not the target's \(token .* has another id\)"):
        refuse_other_tokenizer("x", ours, Other(swapped))
    half = dict(list(vocab.items())[::2])
    with pytest.raises(GraftError, match=rf"only {len(half)} of {len(vocab)} tokens agree"):
        refuse_other_tokenizer("x", ours, Other(half))
    refuse_other_tokenizer("x", ours, Other({**vocab, "<|more|>": 10**6}))
    refuse_other_tokenizer("x", None, Other({}))


def test_what_is_no_drafter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sentence in {
        str(tmp_path / "nothing"): "no such folder; expected a folder, a hub id or a GGUF file",
        str(tmp_path): "its config.json could not be read",
    }.items():
        with pytest.raises(GraftError, match=sentence):
            load_drafter(name, model_of(), None)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(GraftError, match="holds a list: expected an object"):
        config_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(GraftError, match="could not be read"):
        config_of(str(tmp_path))
    assert config_of("anything.gguf") == {}

    def offline(name: str, file: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr(load_module, "_fetched", offline)
    with pytest.raises(GraftError, match=r"'some/head': its config.json could not be read: no network"):
        config_of("some/head")


def test_a_hub_id_is_fetched_once_for_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(load_module, "_fetched", lambda name, file: str(path))
    assert config_of("some/model") == {"model_type": "llama"}
