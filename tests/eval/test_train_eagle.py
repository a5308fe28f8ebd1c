"""A head trained for a moment on a tiny model: the files are a checkpoint, training goes on, and it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longgraft.draft.weights import load_head
from longgraft.eval import eagle_data, train_eagle
from longgraft.eval.eagle_data import Text, is_held_out, teacher_forced, written
from longgraft.eval.train_eagle import agreement, fit, new_head, nth, start_from_target, unrolled
from tests.draft import dense_head as dense
from tests.models import ARCHS, prompt_for, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    """Five layers, the fewest that SafeAILab's choice of layers fits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHS["llama"].config, "num_hidden_layers", 5)
        return tiny_model("llama", torch.float32)


def text_of(model: Any, length: int = 20, seed: int = 0) -> Text:
    return teacher_forced(model, prompt_for(model, length, seed), own=True, held_out=False)


def test_layers_are_those_of_eagle3() -> None:
    assert eagle_data.feature_layers(32) == (1, 15, 28)


def test_labels_are_the_targets_own(model: Any) -> None:
    text = text_of(model)
    with torch.no_grad():
        logits = model(input_ids=text.token_ids[None], use_cache=False).logits[0]
    assert torch.equal(text.likeliest, logits.argmax(-1))
    mine = text.last.float() @ model.lm_head.weight.T - text.log_sum[:, None]
    assert torch.allclose(mine, logits.log_softmax(-1), atol=0.15)  # `last` is kept in bfloat16
    assert text.features.shape == (20, 3 * 64)


def test_unrolled_steps_are_what_drafting_computes(model: Any) -> None:
    """Row t of step s is the head's word after token t + s + 1, its rows from t + 1 on fed by itself."""
    torch.manual_seed(0)
    head, text = new_head(model, 100, 64).double(), text_of(model, 12)
    embed = model.get_input_embeddings().weight.detach().double()
    plain = Text(text.token_ids, text.features.double(), text.last, text.log_sum, text.likeliest, True, False)
    with torch.no_grad():
        steps = unrolled(head, embed, plain, 3)
    assert [len(logits) for logits in steps] == [11, 10, 9]
    loaded: Any = type("Loaded", (), {"head": head, "embed": embed})
    tokens = text.token_ids.tolist()
    head.requires_grad_(False)
    for step, logits in enumerate(steps):
        for t in (0, 4, 8):
            says = dense.says(loaded, tokens[: t + 2], plain.features[: t + 1], tokens[t + 2 : t + 2 + step])
            assert torch.allclose(logits[t].log_softmax(-1), says, atol=1e-3)


def test_writing_stops_at_the_end(model: Any) -> None:
    class Tokenizer:
        pad_token_id = 0

    prompts = [prompt_for(model, n) for n in (3, 140)]
    texts = written(model, Tokenizer(), prompts, 12)
    assert texts[0][:3] == prompts[0] and len(texts[0]) == 15
    assert texts[1][: eagle_data.PROMPT_LEN] == prompts[1][-eagle_data.PROMPT_LEN :]
    end = texts[0][8]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.generation_config, "eos_token_id", end)
        stopped = written(model, Tokenizer(), prompts[:1], 12)[0]
    assert stopped == texts[0][: len(stopped)] and stopped[-1] == end and len(stopped) <= 9


def test_every_epoch_takes_every_text_once(model: Any) -> None:
    texts: list[Any] = list(range(5))
    epochs = [[nth(texts, 5 * epoch + i) for i in range(5)] for epoch in range(3)]
    assert all(sorted(map(int, epoch)) == texts for epoch in epochs) and len({tuple(e) for e in epochs}) > 1


def test_a_share_is_held_out() -> None:
    held = sum(is_held_out([i, 2, 3]) for i in range(1600))
    assert 60 < held < 140 and is_held_out([1, 2]) == is_held_out([1, 2])


@pytest.fixture
def portions(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for text made with a tokenizer; counts how often a portion is made."""
    made: list[int] = []

    def make(number: int) -> list[Text]:
        made.append(number)
        texts = [prompt_for(model, 24, i + number) for i in range(4)]
        return [teacher_forced(model, text, own=i % 2 == 0, held_out=i < 2) for i, text in enumerate(texts)]

    monkeypatch.setattr(train_eagle, "portions", lambda *_: [lambda n=n: make(n) for n in range(2)])
    monkeypatch.setattr(train_eagle, "all_given", lambda *_: [[1, 2, 2]])
    monkeypatch.setattr(train_eagle.AutoTokenizer, "from_pretrained", lambda _: None)
    monkeypatch.setattr(train_eagle.AutoModelForCausalLM, "from_pretrained", lambda *_a, **_k: model)
    return made


def test_one_command_makes_a_checkpoint_and_the_same_command_goes_on(
    model: Any, portions: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = tmp_path / "head", tmp_path / "data"
    command = ["model", str(out), "--data", str(data), "--portions", "3", "--length", "64", "--draft-vocab", "90"]
    train_eagle.main([*command, "--minutes", "0.002"])
    first = torch.load(out / "training.pt", weights_only=True)
    train_eagle.main([*command, "--minutes", "0.004"])
    assert portions == [0, 1]
    assert torch.load(out / "training.pt", weights_only=True)["step"] > first["step"] > 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1].partition(": ")[2])
    assert set(report) == {"given", "own"} and len(report["own"]) == 3
    found = load_head(str(out), model)
    assert found.head.shape.layers == (1, 1, 1) and found.head.shape.max_positions == 64
    assert torch.equal(found.target_ids, first["kept"]) and found.target_ids.tolist() == sorted(
        found.target_ids.tolist()
    )


def test_it_learns(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text_of(model, 24, seed) for seed in range(2)]
    kept = torch.arange(320)
    torch.manual_seed(0)
    head = new_head(model, 320, 64)
    start_from_target(head, model, kept)
    target = train_eagle.Target(model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach())
    monkeypatch.setattr(train_eagle, "WARM_UP", 5)
    args = train_eagle._arguments(["m", "o", "--data", "d", "--minutes", "0.03", "--rate", "3e-3"])
    before = agreement(head, target, texts, kept, 3)["own"]
    for _ in fit(head, target, texts, {}, args):
        pass
    after = agreement(head, target, texts, kept, 3)["own"]
    assert sum(after) > sum(before) + 0.5
