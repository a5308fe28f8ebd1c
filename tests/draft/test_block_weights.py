"""Loading: both layouts give the same network; everything missing, unknown, misshapen or foreign is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from longgraft.config import GraftError
from longgraft.draft.block_weights import load_block
from tests.draft.blocks import HIDDEN, SPECULATORS, ZLAB, reference, save, tensors, values
from tests.engines import model_of
from tests.models import VOCAB

SMALL = 40
OFFSETS = torch.arange(SMALL) * 3 + 2  # token of output row i: 4 i + 2


def small_vocabulary() -> dict[str, Tensor]:
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[torch.arange(SMALL) + OFFSETS] = True
    return {**tensors(), "d2t": OFFSETS, "t2d": known, "lm_head.weight": values("head", SMALL, HIDDEN)}


def test_both_layouts_give_one_network(tmp_path: Path) -> None:
    weights = tensors()
    unused = {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": torch.ones(VOCAB, HIDDEN)}
    one, net, ends = load_block(save(tmp_path / "z", ZLAB, weights), model_of())
    two, other, other_ends = load_block(save(tmp_path / "s", SPECULATORS, {**weights, **unused}), model_of())
    features, block = values("f", 4, HIDDEN).double(), values("b", 5, HIDDEN).double()
    assert torch.equal(net.run(net.open(), block, features), other.run(other.open(), block, features))
    assert torch.allclose(net.run(net.open(), block, features), reference(weights, block, features), atol=2e-5)
    assert one.layer_ids == two.layer_ids == (0,)  # speculators' 1 is the output of layer 0
    ids = torch.tensor([0, 7, 319])
    assert torch.equal(ends.embed(ids), other_ends.embed(ids))
    assert ends.head is other_ends.head is model_of().get_output_embeddings()
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    save(tmp_path, ZLAB, tensors())
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors())
    files = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: tensors()[name] for name in part}, tmp_path / file)
    (tmp_path / "stray.safetensors").write_bytes(b"not read")
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_block(tmp_path, model_of())[0].block_size == 5
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(GraftError, match="cannot be read"):
        load_block(tmp_path, model_of())


def test_own_ends_and_vocabulary(tmp_path: Path) -> None:
    own = {**small_vocabulary(), "embed_tokens.weight": values("embed", VOCAB, HIDDEN)}
    config, _, ends = load_block(save(tmp_path, {**SPECULATORS, "draft_vocab_size": SMALL}, own), model_of())
    assert config.draft_vocab == ends.size == SMALL
    assert ends.ids is not None and ends.rows is not None
    assert ends.ids.tolist() == [4 * i + 2 for i in range(SMALL)]
    assert [int(ends.rows[token]) for token in (2, 6, 158, 3, 319)] == [0, 1, 39, -1, -1]
    hidden = values("h", 2, HIDDEN).double()
    assert torch.allclose(ends.logits(hidden), hidden @ own["lm_head.weight"].double().T)
    assert torch.allclose(ends.embed(torch.tensor([9])), own["embed_tokens.weight"][9:10].double())


def test_one_row_more_where_the_root_predicts_too(tmp_path: Path) -> None:
    config, _, _ = load_block(save(tmp_path, {**SPECULATORS, "sample_from_anchor": True}, tensors()), model_of())
    assert (config.first, config.drafts) == (0, 5)


def test_an_embedding_that_ends_with_a_norm_is_read_before_it() -> None:
    from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextNormedEmbedding

    from longgraft.draft.block_ends import Ends

    embedding = MuseGlimmerTextNormedEmbedding(9, 4, None)
    ids = torch.tensor([1, 8])
    with torch.no_grad():
        assert torch.equal(Ends(embedding, None).embed(ids), embedding.weight[ids])
        assert not torch.equal(embedding(ids), embedding.weight[ids])


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


OPTIONS = ZLAB["dflash_config"]
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no drafter": ({"model_type": "llama"}, "describes no block drafter"),
    "another speculator": ({"speculators_model_type": "eagle3"}, "describes no block drafter"),
    "no block size": (without(ZLAB, "block_size"), "block_size"),
    "no mask": ({**ZLAB, "dflash_config": {"target_layer_ids": [0]}}, "mask_token_id"),
    "no shape": (without(ZLAB, "head_dim"), "head_dim"),
    "no layers, no number": (
        without({**ZLAB, "dflash_config": {"mask_token_id": 7}}, "num_target_layers"),
        "num_target",
    ),
    "unknown option": ({**ZLAB, "dflash_config": {**OPTIONS, "markov": 1}}, "markov"),
    "block of one": ({**ZLAB, "block_size": 1}, "expected 2 or more"),
    "block of half": ({**ZLAB, "block_size": 4.5}, "block_size"),
    "mask not in the target": ({**ZLAB, "dflash_config": {**OPTIONS, "mask_token_id": VOCAB}}, "embeddings"),
    "layer not in the target": ({**ZLAB, "dflash_config": {**OPTIONS, "target_layer_ids": [0, 2]}}, "layers 0 to 1"),
    "layer below none": ({**ZLAB, "dflash_config": {**OPTIONS, "target_layer_ids": [-1]}}, "target layer id"),
    "layer twice": ({**ZLAB, "dflash_config": {**OPTIONS, "target_layer_ids": [0, 0]}}, "each once"),
    "no layer at all": ({**ZLAB, "dflash_config": {**OPTIONS, "target_layer_ids": []}}, "no target layer"),
    "speculators: unknown": ({**SPECULATORS, "markov_rank": 2}, "markov_rank"),
    "speculators: embeddings": ({**SPECULATORS, "aux_hidden_state_layer_ids": [0, 1]}, "embeddings"),
    "speculators: last layer": ({**SPECULATORS, "aux_hidden_state_layer_ids": [2]}, "last layer"),
    "speculators: no mask": (without(SPECULATORS, "mask_token_id"), "mask_token_id"),
    "speculators: width": ({**SPECULATORS, "target_hidden_size": 128}, "another width"),
    "speculators: vocabulary": ({**SPECULATORS, "draft_vocab_size": SMALL}, "d2t"),
    "odd types": ({**ZLAB, "dflash_config": 3}, "wrong type"),
    "odd ids": ({**ZLAB, "dflash_config": {**OPTIONS, "target_layer_ids": 1}}, "wrong type"),
    "odd layers": ({**SPECULATORS, "transformer_layer_config": [1]}, "wrong type"),
    "two layers read": ({**ZLAB, "dflash_config": {**OPTIONS, "target_layer_ids": [0, 1]}}, "fc.weight"),
    "three layers": ({**ZLAB, "num_hidden_layers": 3}, "lack 11 tensors"),
    "one layer": ({**ZLAB, "num_hidden_layers": 1}, "'layers.1"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs_are_named(name: str, tmp_path: Path) -> None:
    config, word = BAD_CONFIGS[name]
    with pytest.raises(GraftError, match=word):
        load_block(save(tmp_path, config, tensors()), model_of())


BAD_WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"hidden_norm.weight": None}, "hidden_norm.weight"),
    "unknown": ({"layers.0.self_attn.g_proj.weight": torch.ones(2)}, "g_proj"),
    "shape": ({"norm.weight": torch.ones(3)}, "norm.weight"),
    "not finite": ({"fc.weight": torch.full((HIDDEN, HIDDEN), torch.nan)}, "finite"),
    "whole numbers": ({"norm.weight": torch.ones(HIDDEN, dtype=torch.long)}, "floating"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_bad_weights_are_named(name: str, tmp_path: Path) -> None:
    change, word = BAD_WEIGHTS[name]
    weights = {key: tensor for key, tensor in {**tensors(), **change}.items() if tensor is not None}
    with pytest.raises(GraftError, match=word):
        load_block(save(tmp_path, ZLAB, weights), model_of())


BAD_MAPS: dict[str, tuple[dict[str, Any], str]] = {
    "no map": ({"d2t": None}, "no map d2t"),
    "no head": ({"lm_head.weight": None}, "lm_head"),
    "ids, not offsets": ({"d2t": OFFSETS + torch.arange(SMALL) + 200}, "offsets"),
    "two rows, one token": ({"d2t": -torch.arange(SMALL)}, "offsets"),
    "wrong length": ({"d2t": OFFSETS[:9].clone()}, "whole numbers"),
    "not whole": ({"d2t": OFFSETS.float()}, "whole numbers"),
    "contradiction": ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "contradict"),
    "head of another size": ({"lm_head.weight": torch.ones(SMALL + 1, HIDDEN)}, "shape"),
    "embedding of another size": ({"embed_tokens.weight": torch.ones(VOCAB - 1, HIDDEN)}, "shape"),
}


@pytest.mark.parametrize("name", BAD_MAPS)
def test_bad_vocabularies_are_named(name: str, tmp_path: Path) -> None:
    change, word = BAD_MAPS[name]
    weights = {key: tensor for key, tensor in {**small_vocabulary(), **change}.items() if tensor is not None}
    with pytest.raises(GraftError, match=word):
        load_block(save(tmp_path, {**SPECULATORS, "draft_vocab_size": SMALL}, weights), model_of())


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"config\.json cannot be read"):
        load_block(tmp_path / "nowhere", model_of())
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(GraftError, match=r"config\.json"):
            load_block(tmp_path, model_of())
    (tmp_path / "config.json").write_text(json.dumps(ZLAB))
    with pytest.raises(GraftError, match="found none"):
        load_block(tmp_path, model_of())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(GraftError, match="cannot be read"):
        load_block(tmp_path, model_of())


def test_default_layers_are_spread_as_the_authors_do() -> None:
    from longgraft.draft.block_config import spread

    assert spread(36, 5) == (1, 9, 17, 25, 33)  # those of Qwen3-8B-DFlash-b16, whose config spells them out
    assert spread(36, 1) == (18,)
