"""A language model as drafter says what it would say reading the whole text, however the passes are cut."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from longgraft.attention import returned
from longgraft.config import GraftError
from longgraft.draft import lm
from longgraft.draft.lm import ModelDrafter
from longgraft.tree import Source, TreeBuilder
from tests import engines
from tests.engines import cost_of, model_of, prompt_of
from tests.models import VOCAB


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def drafter_of(**options: Any) -> ModelDrafter:
    return ModelDrafter(model_of(), VOCAB, cost=cost_of(0.1), **options)


def sequence_of(tokens: list[int]) -> Any:
    return SimpleNamespace(token_ids=list(tokens), draft_state=None)


def truth(text: list[int]) -> torch.Tensor:
    """The model's own log-probabilities after a text."""
    with returned(model_of()), torch.no_grad():
        return torch.log_softmax(model_of()(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1], -1)


def grown(drafter: ModelDrafter, seq: Any, passes: int, width: int = 2) -> TreeBuilder:
    """Expand the whole last level again and again."""
    draft, builder, frontier = drafter.begin(seq), TreeBuilder(seq.token_ids[-1]), [0]
    assert draft is not None
    for _ in range(passes):
        level = draft.expand(builder, frontier, width)
        before = len(builder)
        for parent, token, score in zip(level.parents.tolist(), level.token_ids.tolist(), level.scores.tolist()):
            builder.add(parent, token, builder.scores[parent] + score, Source.DRAFT)
        frontier = list(range(before, len(builder)))
    return builder


def texts_of(builder: TreeBuilder) -> list[list[int]]:
    texts: list[list[int]] = [[]]
    for node in range(1, len(builder)):
        texts.append([*texts[builder.parents[node]], builder.token_ids[node]])
    return texts


def test_every_level_is_what_the_model_says_after_the_path() -> None:
    drafter, tokens = drafter_of(), prompt_of(40)
    with drafter.session():
        builder = grown(drafter, sequence_of(tokens), 3)
    texts = texts_of(builder)
    assert len(builder) == 1 + 2 + 4 + 8
    for node in range(1, len(builder)):
        parent = builder.parents[node]
        says = truth(tokens + texts[parent])
        assert builder.scores[node] - builder.scores[parent] == pytest.approx(
            float(says[builder.token_ids[node]]), abs=1e-5
        )
        assert builder.token_ids[node] in says.topk(2).indices.tolist()


def test_descendants_may_be_asked_about_in_one_pass_and_known_children_are_scored() -> None:
    drafter, tokens = drafter_of(), prompt_of(40)
    builder = TreeBuilder(tokens[-1])
    path = [builder.add(0, 5, -1.0, Source.PROMPT)]
    path += [builder.add(path[0], 6, -1.0, Source.PROMPT), builder.add(path[0], 7, -1.0, Source.PROMPT)]
    with drafter.session():
        draft = drafter.begin(sequence_of(tokens))
        assert draft is not None and draft.in_one_pass
        level = draft.expand(builder, [0, *path], 2)
    texts = texts_of(builder)
    for parent, token, score in zip(level.parents.tolist(), level.token_ids.tolist(), level.scores.tolist()):
        assert score == pytest.approx(float(truth(tokens + texts[parent])[token]), abs=1e-5)
    said = set(zip(level.parents.tolist(), level.token_ids.tolist()))
    assert {(0, 5), (path[0], 6), (path[0], 7)} <= said and len(said) == len(level.token_ids)


@pytest.mark.parametrize("gap", [1, 3, 30])
def test_reading_on_after_rounds_is_reading_from_the_start(gap: int) -> None:
    """Rounds with accepted drafts, with other tokens, and with none asked for."""
    drafter, tokens = drafter_of(), prompt_of(90)
    seq = sequence_of(tokens[:40])
    rng = np.random.default_rng(gap)
    with drafter.session():
        while len(seq.token_ids) + gap <= 85:
            builder = grown(drafter, seq, 2)
            follows = texts_of(builder)[-1] if rng.random() < 0.5 else []
            new = (follows + tokens[len(seq.token_ids) :])[:gap]
            seq.token_ids += new
            drafter.extend(seq, new, None, None)  # type: ignore[arg-type]
            assert not seq.draft_state.cache.check_integrity()
            fresh = sequence_of(seq.token_ids)
            ours, theirs = grown(drafter, seq, 2), grown(drafter, fresh, 2)
            assert ours.token_ids == theirs.token_ids and ours.scores == pytest.approx(theirs.scores, abs=1e-5)
            drafter.reset(fresh)
            seq.draft_state.cache.truncate(seq.draft_state.cache.length)
    drafter.reset(seq)
    assert drafter.pool.num_free == drafter.pool.num_chunks


def test_rows_of_accepted_nodes_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, seq = drafter_of(), sequence_of(prompt_of(40))
    with drafter.session():
        builder = grown(drafter, seq, 3)
        best = texts_of(builder)[-1]
        new = [*best[:2], 3]
        seq.token_ids += new
        drafter.extend(seq, new, None, None)  # type: ignore[arg-type]
    assert seq.draft_state.cache.length == len(seq.token_ids) - 1


def test_a_long_text_is_read_through_a_window() -> None:
    drafter, tokens = drafter_of(window=64), prompt_of(400)
    seq = sequence_of(tokens)
    with drafter.session():
        builder = grown(drafter, seq, 1)
        seen = tokens[: lm.SINKS] + tokens[-64:]
        assert builder.token_ids[1:] == truth(seen).topk(2).indices.tolist()
        for step in range(150):  # passes the end of the window several times
            new = [tokens[step]]
            seq.token_ids += new
            drafter.extend(seq, new, None, None)  # type: ignore[arg-type]
            grown(drafter, seq, 1)
            assert seq.draft_state.cache.length <= drafter.max_rows
    assert seq.draft_state.start > 400 - 64


def test_catching_up_is_priced() -> None:
    drafter = drafter_of()
    short, long = (drafter.begin(sequence_of(prompt_of(n))) for n in (5, 400))
    assert short is not None and long is not None
    assert short.seconds(1) < short.seconds(4) < long.seconds(4)
    assert short.seconds(1) == pytest.approx(1.4)


def test_it_steps_aside_where_it_knows_a_token_not_or_has_no_room() -> None:
    drafter = drafter_of()
    assert drafter.begin(sequence_of([1, VOCAB + 3, 2])) is None
    drafter.pool.allocate(drafter.pool.num_free)
    assert drafter.begin(sequence_of([1, 2])) is None


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(GraftError, match="window of the drafter is 0"):
        drafter_of(window=0)
