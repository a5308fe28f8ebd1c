"""Transformers' own drafter class: our chain is what its own candidate generator proposes, round by round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from longgraft.config import GraftError
from longgraft.draft.block import BlockDrafter, load_block_drafter
from longgraft.tree import Source, TreeBuilder
from tests.draft.blocks import Text, features_of, values
from tests.engines import model_of, prompt_of

Proposals = list[tuple[list[int], list[int]]]


def assistant(**options: Any) -> MuseGlimmerAssistantModel:
    settings: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    settings |= {"block_size": 5, "mask_token_id": 7, "target_layer_ids": [0]}
    config = MuseGlimmerAssistantConfig(
        **{**settings, **options}, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    model = MuseGlimmerAssistantModel(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.copy_(values(name, *weight.shape))
    return model


def chain(drafter: BlockDrafter, text: Text) -> list[int]:
    """The block read as a chain: the likeliest child of each depth."""
    draft = drafter.begin(text)  # type: ignore[arg-type]
    assert draft is not None
    tree = TreeBuilder(text.root_token)
    for node in range(drafter.config.drafts):
        level = draft.expand(tree, [node], 1)
        assert tree.add(node, int(level.token_ids[0]), float(level.scores[0]), Source.DRAFT) == node + 1
    return tree.token_ids[1:]


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    """What transformers' generator proposes, with the text it stood behind."""
    seen: Proposals = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = original(self, input_ids, *args, **options)
        text = input_ids[0].tolist()
        seen.append((text, found[0][0, len(text) :].tolist()))
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", spy)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 256},
        {"sliding_window": 8},
        {"target_layer_ids": [0, 1], "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    ids=["whole", "window", "last_layer_and_mixed"],
)
def test_chain_is_what_transformers_proposes(options: dict[str, Any], proposals: Proposals, tmp_path: Path) -> None:
    model = model_of()
    original = assistant(**options)
    original.save_pretrained(tmp_path)
    prompt = torch.tensor([prompt_of(30)])
    model.generate(
        prompt, assistant_model=original, max_new_tokens=24, do_sample=False, speculation_type="dflash", pad_token_id=0
    )
    drafter = load_block_drafter(tmp_path, model)
    layers = options.get("target_layer_ids", [0])
    assert drafter.feature_layers == tuple(layers)
    text, known = Text([]), 0
    rounds = [(tokens, found) for tokens, found in proposals if found]
    for tokens, found in rounds:
        text.token_ids = list(tokens)
        rows = features_of(model, tokens[:-1], layers)[known:]
        drafter.prefill(text, known, rows)  # type: ignore[arg-type]
        known = len(tokens) - 1
        assert chain(drafter, text)[: len(found)] == found
    assert len(rounds) > 10 and len({tuple(found) for _, found in rounds}) > 5


def test_a_folder_with_a_missing_or_foreign_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    target = model_of()
    assistant().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for change in ({"norm.weight": None}, {"extra.weight": torch.ones(2)}, {"norm.weight": torch.ones(3)}):
        changed = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(GraftError, match=next(iter(change))):
            load_block_drafter(tmp_path, target)


def test_a_class_that_is_no_block_drafter_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 320}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    for name, value in {"block_size": 5, "mask_token_id": 7, "target_layer_ids": [0]}.items():
        setattr(config, name, value)
    LlamaModel(config).save_pretrained(tmp_path)
    with pytest.raises(GraftError, match="LlamaModel is no block drafter"):
        load_block_drafter(tmp_path, model_of())


def test_another_width_is_refused(tmp_path: Path) -> None:
    assistant(hidden_size=32).save_pretrained(tmp_path)
    with pytest.raises(GraftError, match="another target"):
        load_block_drafter(tmp_path, model_of())
