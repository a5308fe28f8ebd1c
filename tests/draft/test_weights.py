"""Checkpoints of three layouts load alike, and every way to be wrong is one sentence naming what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from longgraft.config import GraftError
from longgraft.draft.eagle import Eagle3Drafter
from longgraft.draft.weights import LoadedHead, is_eagle3, load_head
from tests.draft.heads import DRAFT_VOCAB, config_for, head_for, kept_ids, save, tensors_for, write
from tests.engines import model_of
from tests.models import VOCAB

HIDDEN = 64


def target_of(num_layers: int = 12, vocab: int = VOCAB, hidden: int = HIDDEN) -> Any:
    """What the loader asks of a target."""
    config = SimpleNamespace(hidden_size=hidden, vocab_size=vocab, num_hidden_layers=num_layers)
    embed, out = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: config),
        get_input_embeddings=lambda: embed,
        get_output_embeddings=lambda: out,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def made(**changes: Any) -> LoadedHead:
    """A head as target_of() wants it: SafeAILab's layers of 12 are 1, 5 and 8."""
    changes = {"layers": (1, 5, 8), **changes}
    head = head_for(model_of(), **changes).float()
    return LoadedHead(head, kept_ids(head.shape.draft_vocab), torch.zeros(VOCAB, HIDDEN))


@pytest.mark.parametrize("layout", ["safeailab", "specforge", "speculators"])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}],
    ids=str,
)
def test_every_layout_gives_the_same_head(layout: str, options: dict[str, bool], tmp_path: Path) -> None:
    wanted, target = made(**options), target_of()
    found = load_head(str(save(tmp_path, layout, wanted)), target)
    assert found.head.shape == wanted.head.shape
    assert torch.equal(found.target_ids, wanted.target_ids)
    assert found.embed.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    weights = wanted.head.state_dict()
    assert found.head.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in found.head.state_dict().items())
    assert not any(parameter.requires_grad for parameter in found.head.parameters())
    rows = (torch.ones(2, HIDDEN), torch.ones(2, HIDDEN), torch.arange(2))
    assert torch.equal(found.head.project(*rows).query, wanted.head.project(*rows).query)


@pytest.mark.parametrize("layout", ["safeailab", "specforge", "speculators"])
def test_a_head_is_known_by_its_config(layout: str, tmp_path: Path) -> None:
    config = json.loads((save(tmp_path, layout, made()) / "config.json").read_text())
    assert is_eagle3(config)
    config.pop("architectures", None)
    assert is_eagle3(config)
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 3})


def test_layers_are_counted_by_output_in_specforge_and_by_input_elsewhere(tmp_path: Path) -> None:
    other = made(layers=(2, 7, 11))
    for layout in ("specforge", "speculators"):
        assert load_head(str(save(tmp_path / layout, layout, other)), target_of()).head.shape.layers == (2, 7, 11)
    assert load_head(str(save(tmp_path / "plain", "safeailab", made())), target_of(94)).head.shape.layers == (1, 46, 90)


def test_shards_the_targets_dtype_and_an_embedding_of_its_own(tmp_path: Path) -> None:
    wanted = made()
    tensors = tensors_for(wanted) | {"embed_tokens.weight": torch.full((VOCAB, HIDDEN), 0.5)}
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    names = sorted(tensors)
    write(tmp_path, config_for(wanted.head.shape), tensors)
    (tmp_path / "model.safetensors").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    index = {
        name: f"model-{number}.safetensors" for number, part in enumerate((names[::2], names[1::2])) for name in part
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    target = target_of()
    target.dtype = torch.bfloat16
    found = load_head(str(tmp_path), target)
    assert float(found.embed.min()) == 0.5 and found.embed.dtype == torch.bfloat16
    assert {weight.dtype for weight in found.head.parameters()} == {torch.bfloat16}
    assert found.head.rotary.inv_freq.dtype == torch.float32


def test_equal_vocabularies_need_no_maps(tmp_path: Path) -> None:
    wanted = made(draft_vocab=VOCAB)
    tensors = tensors_for(wanted)
    del tensors["d2t"], tensors["t2d"]
    config = config_for(wanted.head.shape)
    del config["draft_vocab_size"]
    write(tmp_path, config, tensors)
    assert load_head(str(tmp_path), target_of()).target_ids.tolist() == list(range(VOCAB))


def test_qwen3_layers_of_speculators_norm_queries_and_keys(tmp_path: Path) -> None:
    save(tmp_path, "speculators", made(qk_norm=True))
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"]["model_type"] = "qwen3"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_head(str(tmp_path), target_of()).head.shape.qk_norm


def test_rope_of_old_and_new_configs(tmp_path: Path) -> None:
    config, tensors = config_for(made().head.shape), tensors_for(made())
    linear = {"type": "linear", "factor": 2.0}
    write(tmp_path, config | {"rope_theta": 5e5, "rope_scaling": linear}, tensors)
    assert load_head(str(tmp_path), target_of()).head.shape.rope == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 5e5,
    }
    del config["rope_theta"]
    write(tmp_path, config | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, tensors)
    assert load_head(str(tmp_path), target_of()).head.shape.rope["rope_theta"] == 7.0


Change = Callable[[dict[str, Any], dict[str, Any]], Any]
WRONG: dict[str, tuple[Change, str]] = {
    "no d2t": (lambda c, t: t.pop("d2t"), "tensor d2t is missing"),
    "no t2d": (lambda c, t: t.pop("t2d"), "tensor t2d is missing"),
    "ids": (lambda c, t: t.update(d2t=kept_ids()), "tensor d2t: expected offsets .* its entries are target ids"),
    "others": (lambda c, t: t.update(t2d=t["t2d"].roll(1)), "tensor d2t: .* t2d marks other tokens"),
    "short map": (lambda c, t: t.update(d2t=t["d2t"][:-1].clone()), r"tensor d2t has shape \[119\]; expected \[120\]"),
    "no lm_head": (lambda c, t: t.pop("lm_head.weight"), r"tensor lm_head.weight \[120, 64\] is missing"),
    "no fc": (lambda c, t: t.pop("fc.weight"), "tensor fc.weight .* is missing"),
    "lm_head": (
        lambda c, t: t.update({"lm_head.weight": torch.ones(VOCAB, HIDDEN)}),
        r"tensor lm_head.weight has shape \[320, 64\]; its config says \[120, 64\]",
    ),
    "unknown": (lambda c, t: t.update({"midlayer.gate": torch.ones(1)}), "tensor midlayer.gate is not known"),
    "second layer": (
        lambda c, t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(1)}),
        "tensor layers.1.mlp.up_proj.weight is not known",
    ),
    "option": (lambda c, t: c.update(fc_norm=True), "tensor fc_norm.0.weight .* is missing"),
    "two layers": (lambda c, t: c.update(num_hidden_layers=2), "2 layers in its config"),
    "quantized": (lambda c, t: c.update(quantization_config={}), "quantized"),
    "hidden size": (lambda c, t: c.update(target_hidden_size=128), "target of hidden size 128; this target's is 64"),
    "vocabulary": (lambda c, t: c.update(vocab_size=999), "vocabulary of 999 tokens; this target's has 320"),
    "no sizes": (lambda c, t: c.pop("intermediate_size"), "config.json: KeyError.'intermediate_size'"),
    "odd sizes": (lambda c, t: c.update(hidden_size="wide"), "config.json: ValueError"),
    "heads": (lambda c, t: c.update(num_attention_heads=0), "config.json: .* expected the sizes"),
    "groups": (lambda c, t: c.update(num_key_value_heads=3), "4 query heads cannot share 3"),
    "activation": (lambda c, t: c.update(hidden_act="nonsense"), "hidden_act 'nonsense'"),
    "rope": (lambda c, t: c.update(rope_scaling={"type": "nonsense"}), "rope.*nonsense"),
    "layers": (
        lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 12]}),
        r"reads layers \[1, 5, 12\] of its target; this target's are 0 to 11",
    ),
    "embedding": (
        lambda c, t: t.update({"embed_tokens.weight": torch.ones(VOCAB, 3)}),
        r"embed_tokens.weight has shape \[320, 3\]; expected \[320, 64\]",
    ),
    "not a number": (
        lambda c, t: t.update({"norm.weight": torch.full((HIDDEN,), float("nan"))}),
        "tensor norm.weight .* not finite",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_checkpoint_is_one_sentence(kind: str, tmp_path: Path) -> None:
    change, message = WRONG[kind]
    config, tensors = config_for(made().head.shape), tensors_for(made())
    change(config, tensors)
    write(tmp_path, config, tensors)
    with pytest.raises(GraftError, match=message) as caught:
        load_head(str(tmp_path), target_of())
    assert "\n" not in str(caught.value)


def test_a_smaller_head_needs_its_own_embedding(tmp_path: Path) -> None:
    config, tensors = config_for(made().head.shape), tensors_for(made())
    config["target_hidden_size"] = 128
    tensors["fc.weight"] = torch.ones(HIDDEN, 3 * 128)
    write(tmp_path, config, tensors)
    with pytest.raises(GraftError, match=r"the target's embedding.* has shape \[320, 128\]; expected \[320, 64\]"):
        load_head(str(tmp_path), target_of(hidden=128))
    tensors["embed_tokens.weight"] = torch.ones(VOCAB, HIDDEN)
    write(tmp_path, config, tensors)
    assert load_head(str(tmp_path), target_of(hidden=128)).head.combine(torch.ones(1, 384)).shape == (1, HIDDEN)


def test_a_target_of_too_few_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"reads layers \[1, 0, -2\]"):
        load_head(str(save(tmp_path, "safeailab", made())), target_of(2))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json: could not be read"),
        ({"config.json": "{"}, "config.json: could not be read"),
        ({"config.json": "[]"}, "config.json: expected a JSON object"),
        ({"config.json": '{"transformer_layer_config": 3}'}, "transformer_layer_config: expected an object"),
        ({"config.json": "{}"}, "no weights there"),
        ({"config.json": "{}", "model.safetensors": "x"}, "model.safetensors: could not be read as tensors"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "pytorch_model.bin: could not be read as tensors"),
        (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"fc.weight": "gone.safetensors"}}'},
            "gone.safetensors: could not be read",
        ),
        ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "index.json: names no files"),
    ],
)
def test_a_folder_that_is_no_head(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(GraftError, match=message):
        load_head(str(tmp_path), target_of())


def test_a_pickle_of_more_than_tensors_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "safeailab", made())
    torch.save({"fc.weight": torch.ones(1), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(GraftError, match="expected a table of tensors"):
        load_head(str(tmp_path), target_of())
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(GraftError, match="could not be read as tensors"):
        load_head(str(tmp_path), target_of())


def test_names() -> None:
    with pytest.raises(GraftError, match="no such folder"):
        load_head("./nowhere", target_of())


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    save(tmp_path, "specforge", made())
    asked: list[str] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        if name == "some/nothing":
            raise OSError("no such\nrepository")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load_head("some/head", target_of()).head.shape.draft_vocab == DRAFT_VOCAB
    with pytest.raises(GraftError, match="could not be fetched: no such repository"):
        load_head("some/nothing", target_of())
    assert asked == ["some/head", "some/nothing"]


def test_a_drafter_from_a_folder(tmp_path: Path) -> None:
    save(tmp_path, "specforge", made(layers=(0, 1, 1)))
    drafter = Eagle3Drafter.from_pretrained(str(tmp_path), model_of(), window=32)
    assert drafter.feature_layers == (0, 1, 1) and drafter.feature_window == 32
    assert drafter.embed.dtype == torch.float64
