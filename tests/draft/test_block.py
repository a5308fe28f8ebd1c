"""The drafter: its marginals against a dense account from scratch, round after round, and what it does at its edges."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longgraft.config import GraftError
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.draft.block import BlockDrafter, load_block_drafter
from longgraft.draft.block_draft import BlockDraft
from longgraft.draft.block_weights import load_block
from longgraft.tree import Acceptance, Level, Source, TreeBuilder, Verification, chain
from tests.draft.blocks import HIDDEN, SPECULATORS, ZLAB, Text, features_of, reference, save, tensors
from tests.draft.test_block_weights import SMALL, small_vocabulary
from tests.engines import cost_of, model_of, prompt_of
from tests.models import VOCAB

WINDOW = 12


def drafter(folder: Path, config: dict[str, Any] = ZLAB, weights: Any = None, **options: Any) -> BlockDrafter:
    target = model_of()
    options = {"cost": cost_of(0.5), **options}
    return BlockDrafter(target, *load_block(save(folder, config, weights or tensors()), target), **options)


def begin(made: BlockDrafter, text: Text) -> BlockDraft:
    draft = made.begin(text)  # type: ignore[arg-type]
    assert draft is not None
    return draft


def prefill(made: BlockDrafter, text: Text, chunk: int = 7) -> None:
    """Hand over the prompt's features, as an engine does: the last rows only, chunk by chunk."""
    rows = features_of(model_of(), text.token_ids[:-1], made.feature_layers)
    first = max(0, len(rows) - made.feature_window)
    for at in range(first, len(rows), chunk):
        made.prefill(text, at, rows[at : at + chunk])  # type: ignore[arg-type]


def commit(made: BlockDrafter, text: Text, tokens: list[int], clipped: int = 0) -> None:
    """A round that accepts all of `tokens` but commits `clipped` fewer."""
    root = len(text.token_ids) - 1
    tree = chain([text.root_token, *tokens[:-1], 5, 6])
    features = features_of(model_of(), [*text.token_ids[:-1], *tree.token_ids.tolist()], made.feature_layers)[root:]
    committed = tokens[: len(tokens) - clipped]
    text.token_ids += committed
    logits = torch.zeros(len(tree), VOCAB)
    result = Verification(tree, logits, features, np.arange(len(tree), dtype=np.int32))
    made.extend(text, committed, result, Acceptance(list(range(len(tokens))), tokens))  # type: ignore[arg-type]


def marginals(made: BlockDrafter, text: Text, rows: int) -> Tensor:
    """What the drafter should say, from the last `rows` rows of the text, from scratch in float64."""
    known = features_of(model_of(), text.token_ids[:-1], made.feature_layers)[-rows:]
    ids = torch.tensor([text.root_token] + [7] * (made.config.block_size - 1))
    hidden = reference(tensors(), made.ends.embed(ids), known)
    return (hidden[made.config.first :] @ made.ends.head.weight.double().T).log_softmax(-1)


def whole(draft: BlockDraft, text: Text, drafts: int = 4) -> Tensor:
    """Every marginal, asked along a chain of token 0."""
    tree, found = TreeBuilder(text.root_token), torch.full((drafts, VOCAB), -math.inf, dtype=torch.float64)
    for node in range(drafts):
        level = draft.expand(tree, [node], VOCAB)
        found[node, torch.as_tensor(level.token_ids).long()] = torch.as_tensor(level.scores).double()
        tree.add(node, 0, 0.0, Source.DRAFT)
    assert not len(draft.expand(tree, [drafts], 3).token_ids)
    return found


def test_every_round_equals_from_scratch(tmp_path: Path) -> None:
    made, text = drafter(tmp_path, window=40), Text(prompt_of(23))
    prefill(made, text)
    for number, count in enumerate([1, 3, 5, 2, 1, 4]):
        assert torch.allclose(whole(begin(made, text), text), marginals(made, text, 99), atol=1e-4), number
        commit(made, text, prompt_of(60)[number : number + count], clipped=number % 2 if count > 1 else 0)


def test_rounds_without_a_pass_are_caught_up(tmp_path: Path) -> None:
    made, text = drafter(tmp_path, window=40), Text(prompt_of(23))
    prefill(made, text)
    whole(begin(made, text), text)
    for _ in range(4):
        begin(made, text)  # begun and not asked
        commit(made, text, [3, 1, 4])
    assert torch.allclose(whole(begin(made, text), text), marginals(made, text, 99), atol=1e-4)
    again = whole(begin(made, text), text)  # asked twice without a commit in between
    assert torch.allclose(again, marginals(made, text, 99), atol=1e-4)


def test_window_restarts_and_never_leaves_the_trained_positions(tmp_path: Path) -> None:
    made, text = drafter(tmp_path, {**ZLAB, "max_position_embeddings": 29}, window=1000), Text(prompt_of(50))
    assert (made.feature_window, made.capacity) == (12, 24)  # 29 positions less a block of 5
    prefill(made, text)
    rows, seen = WINDOW, set()
    for number in range(25):
        found = whole(begin(made, text), text)
        state = text.draft_state
        assert state.context.length == rows and rows + 5 <= 29
        assert torch.allclose(found, marginals(made, text, rows), atol=1e-4)
        commit(made, text, [number, number + 1])
        rows = rows + 2 if rows + 2 <= 24 else WINDOW
        seen.add(rows)
        assert state.rows.kept <= made.feature_window + 6
    assert min(seen) == WINDOW and max(seen) == 24


def test_reading_the_last_layer_means_behind_the_norm(tmp_path: Path) -> None:
    options = {"mask_token_id": 7, "target_layer_ids": [0, 1]}
    made = drafter(tmp_path, {**ZLAB, "dflash_config": options}, tensors(2 * HIDDEN))
    text = Text(prompt_of(9))
    prefill(made, text)
    with torch.no_grad():
        states = model_of()(input_ids=torch.tensor([text.token_ids[:-1]]), output_hidden_states=True).hidden_states
    known = torch.cat([states[1][0], states[2][0]], -1)
    ids = torch.tensor([text.root_token] + [7] * 4)
    expected = reference(tensors(2 * HIDDEN), made.ends.embed(ids), known)[1:] @ made.ends.head.weight.double().T
    assert torch.allclose(whole(begin(made, text), text), expected.log_softmax(-1), atol=1e-4)


def test_one_pass_serves_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, text = drafter(tmp_path), Text(prompt_of(9))
    prefill(made, text)
    passes = []
    original = made.net.run
    monkeypatch.setattr(made.net, "run", lambda *args: passes.append(1) or original(*args))
    draft = begin(made, text)
    tree = TreeBuilder(text.root_token)
    assert draft.in_one_pass and draft.seconds(1) > 0 and not passes
    assert not len(draft.expand(tree, [], 3).token_ids) and not passes
    first, second = (tree.add(0, token, -1.0, Source.PROMPT) for token in (11, 12))
    deep = tree.add(first, 13, -2.0, Source.PROMPT)
    level = draft.expand(tree, [0, first, second, deep], 3)
    assert len(passes) == 1 and draft.seconds(60) == 0.0
    expected = marginals(made, text, 99)
    children = [set(level.token_ids[level.parents == node].tolist()) for node in (0, first, second, deep)]
    best = [set(row.topk(3).indices.tolist()) for row in expected]
    assert children == [best[0] | {11, 12}, best[1] | {13}, best[1], best[2]]
    depths = [[0, 1, 1, 2][int(parent)] for parent in level.parents]
    right = expected[torch.tensor(depths), torch.as_tensor(level.token_ids).long()]
    assert torch.allclose(torch.as_tensor(level.scores).double(), right, atol=1e-4)
    draft.expand(tree, [0, deep], 9)
    assert len(passes) == 1


@pytest.mark.parametrize(("width", "known"), [(0, 0), (1, 1), (VOCAB + 9, VOCAB), (-3, 0)])
def test_widths(width: int, known: int, tmp_path: Path) -> None:
    made, text = drafter(tmp_path), Text(prompt_of(9))
    prefill(made, text)
    level = begin(made, text).expand(TreeBuilder(text.root_token), [0], width)
    assert isinstance(level, Level) and len(level.token_ids) == len(set(level.token_ids.tolist())) == known


def test_a_small_vocabulary_speaks_in_the_targets_ids(tmp_path: Path) -> None:
    made = drafter(tmp_path, {**SPECULATORS, "draft_vocab_size": SMALL}, small_vocabulary())
    text = Text(prompt_of(9))
    prefill(made, text)
    tree = TreeBuilder(text.root_token)
    for token in (6, 7, 319, 10_000, -1):  # only 6 = 4 * 1 + 2 is one of its tokens
        tree.add(0, token, -1.0, Source.PROMPT)
    draft = begin(made, text)
    every = draft.expand(tree, [0], 999)
    assert sorted(every.token_ids.tolist()) == [4 * i + 2 for i in range(SMALL)]
    assert math.isclose(float(np.exp(every.scores.astype(float)).sum()), 1.0, rel_tol=1e-5)
    asked = draft.expand(tree, [0], 0)
    assert asked.token_ids.tolist() == [6]
    assert asked.scores[0] == every.scores[every.token_ids.tolist().index(6)]


def test_it_steps_aside_without_features(tmp_path: Path) -> None:
    made, text = drafter(tmp_path), Text(prompt_of(9))
    assert made.begin(text) is None  # type: ignore[arg-type]
    prefill(made, text)
    assert made.begin(text) is not None  # type: ignore[arg-type]
    tree = chain([text.root_token])
    blind = Verification(tree, torch.zeros(1, VOCAB), None, np.zeros(1, np.int32))
    text.token_ids += [4]
    made.extend(text, [4], blind, Acceptance([0], [4]))  # type: ignore[arg-type]
    assert made.begin(text) is None  # type: ignore[arg-type]
    commit(made, text, [2, 9])  # behind the gap it begins again, with what it then knows
    assert torch.allclose(whole(begin(made, text), text), marginals(made, text, 2), atol=1e-4)
    made.reset(text)  # type: ignore[arg-type]
    assert text.draft_state is None and made.begin(text) is None  # type: ignore[arg-type]
    single = Text([3])
    made.prefill(single, 0, torch.zeros(0, HIDDEN).double())  # type: ignore[arg-type]
    assert made.begin(single) is None  # type: ignore[arg-type]


def test_an_interrupted_pass_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, text = drafter(tmp_path), Text(prompt_of(19))
    prefill(made, text)
    whole(begin(made, text), text)
    commit(made, text, [1, 2])
    layer = made.net.layers[1]  # type: ignore[attr-defined]
    forward = layer.forward

    def stop(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer, "forward", stop)
    with pytest.raises(KeyboardInterrupt):
        whole(begin(made, text), text)
    monkeypatch.setattr(layer, "forward", forward)
    assert torch.allclose(whole(begin(made, text), text), marginals(made, text, 99), atol=1e-4)


def test_scores_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    made, text = drafter(tmp_path), Text(prompt_of(9))
    rows = features_of(model_of(), text.token_ids[:-1], (0,))
    made.prefill(text, 0, rows * math.nan)  # type: ignore[arg-type]
    with pytest.raises(GraftError, match="not finite"):
        begin(made, text).expand(TreeBuilder(0), [0], 1)


def test_sequences_do_not_know_each_other(tmp_path: Path) -> None:
    made = drafter(tmp_path)
    texts = [Text(prompt_of(15)), Text(prompt_of(11, seed=3))]
    for text in texts:
        prefill(made, text)
    drafts = [begin(made, text) for text in texts]
    for draft, text in zip(reversed(drafts), reversed(texts)):
        assert torch.allclose(whole(draft, text), marginals(made, text, 99), atol=1e-4)


def test_seconds_are_read_from_the_table(tmp_path: Path) -> None:
    fixed = np.array(ROW_BUCKETS, float)
    table = CostTable(fixed, np.full(len(ROW_BUCKETS), 0.01), frozen=True)
    made, text = drafter(tmp_path, window=200, cost=table), Text(prompt_of(31))
    prefill(made, text)
    assert math.isclose(begin(made, text).seconds(1), 5 + 30)
    assert math.isclose(begin(made, text).seconds(1, True), 5 + 1 + 0.29)
    whole(begin(made, text), text)
    commit(made, text, [1, 2, 3])
    assert math.isclose(begin(made, text).seconds(1), 5 + 3 + 0.3)
    long = Text(prompt_of(151))
    prefill(made, long)
    assert math.isclose(begin(made, long).seconds(1), 5 + 150)


def test_seconds_are_measured_when_there_is_no_table(tmp_path: Path) -> None:
    made, text = drafter(tmp_path, cost=None, window=16), Text(prompt_of(9))
    prefill(made, text)
    assert begin(made, text).seconds(1) > 0
    assert made.cost.table is not None
    before = made.cost.table.correction.copy()
    whole(begin(made, text), text)
    assert not np.array_equal(before, made.cost.table.correction)
    assert torch.allclose(whole(begin(made, text), text), marginals(made, text, 99), atol=1e-4)


@pytest.mark.parametrize(("window", "limit"), [(0, 512), (-1, 512), (8, 6), (8, 5)])
def test_windows_that_cannot_be(window: int, limit: int, tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"window|positions"):
        drafter(tmp_path, {**ZLAB, "max_position_embeddings": limit}, window=window)


def test_in_float32_with_our_kernels(tmp_path: Path) -> None:
    target = model_of(dtype=torch.float32)
    made = load_block_drafter(save(tmp_path, ZLAB, tensors()), target)
    text = Text(prompt_of(17))
    rows = features_of(target, text.token_ids[:-1], (0,))
    made.prefill(text, 0, rows)  # type: ignore[arg-type]
    with made.session(), made.session():
        inside = whole(begin(made, text), text)
    assert torch.allclose(inside, marginals(made, text, 99), atol=1e-3)
