"""EAGLE-3 says what its head says reading the whole text densely, however prompts, rounds and windows are cut."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longgraft.attention import returned
from longgraft.config import EngineConfig, GraftError, SamplingParams
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.draft import eagle
from longgraft.draft.eagle import Eagle3Drafter
from longgraft.engine import Engine
from longgraft.prune import grow
from longgraft.tree import Acceptance, Level, Source, TreeBuilder
from tests import engines
from tests.draft import dense_head as dense
from tests.draft.heads import kept_ids, loaded
from tests.engines import cost_of, model_of, prompt_of

POLICIES = ("adaptive", "dense", "pruned", "paper")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def drafter_of(window: int = 1024, **options: Any) -> Eagle3Drafter:
    return Eagle3Drafter(loaded(**options), window=window, cost=cost_of(0.1))


def states_of(tokens: list[int], drafter: Eagle3Drafter, seed: int = 0) -> Tensor:
    """Made-up target states, one row a token of any text of this seed."""
    generator = torch.Generator().manual_seed(seed)
    width = drafter.head.fc.in_features
    return torch.randn(len(tokens), width, generator=generator, dtype=torch.float64)


def read(drafter: Eagle3Drafter, tokens: list[int], states: Tensor, chunk: int = 1000) -> Any:
    """A sequence whose prompt the target has just read."""
    seq = SimpleNamespace(token_ids=list(tokens), draft_state=None)
    begin, end = max(0, len(tokens) - 1 - drafter.feature_window), len(tokens) - 1
    for first in range(begin, end, chunk):
        drafter.prefill(seq, first, states[first : min(first + chunk, end)])
    return seq


def committed(drafter: Eagle3Drafter, seq: Any, new: list[int], states: Tensor, path: list[int] | None = None) -> None:
    """Commit tokens as the engine does; the result's rows are shuffled, so that only the path finds them."""
    first = len(seq.token_ids) - 1
    path = path or [0, *range(7, 7 + len(new) - 1)]
    rows = torch.full((40, states.shape[1]), float("nan"), dtype=states.dtype)
    rows[path[: len(new)]] = states[first : first + len(new)]
    seq.token_ids += new
    drafter.extend(seq, new, SimpleNamespace(features=rows), Acceptance(path, [*new, 0][: len(path)]))  # type: ignore[arg-type]


def grown(drafter: Eagle3Drafter, seq: Any, depth: int = 2, width: int = 2) -> TreeBuilder:
    draft, builder = drafter.begin(seq), TreeBuilder(seq.token_ids[-1])
    assert draft is not None and not draft.in_one_pass
    grow(draft, builder, depth, width)
    return builder


def path_of(builder: TreeBuilder, node: int) -> list[int]:
    return [] if node == 0 else [*path_of(builder, builder.parents[node]), builder.token_ids[node]]


def check(drafter: Eagle3Drafter, builder: TreeBuilder, tokens: list[int], states: Tensor, start: int) -> None:
    """Every node against the dense reference."""
    model = SimpleNamespace(head=drafter.head, embed=drafter.embed)
    said: dict[int, Tensor] = {}
    for node in range(1, len(builder)):
        parent = builder.parents[node]
        if parent not in said:
            path = path_of(builder, parent)
            said[parent] = dense.says(model, tokens, states[: len(tokens) - 1], path, start)  # type: ignore[arg-type]
        number = drafter.draft_ids[builder.token_ids[node]]
        assert builder.scores[node] - builder.scores[parent] == pytest.approx(float(said[parent][number]), abs=1e-4)
        assert number in said[parent].topk(2).indices.tolist()


@pytest.mark.parametrize(
    "options", [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True, "norm_before_fc": True}]
)
def test_every_level_is_what_the_head_says_after_the_path(options: dict[str, Any]) -> None:
    drafter, tokens = drafter_of(**options), prompt_of(20)
    states = states_of(tokens, drafter)
    builder = grown(drafter, read(drafter, tokens, states))
    assert len(builder) == 1 + 2 + 4 + 4
    check(drafter, builder, tokens, states, 0)


def test_known_children_are_scored_and_those_outside_the_draft_vocabulary_are_not() -> None:
    drafter, tokens = drafter_of(), prompt_of(20)
    states = states_of(tokens, drafter)
    outside = next(token for token in range(320) if token not in kept_ids().tolist())
    builder = TreeBuilder(tokens[-1])
    inside = [builder.add(0, token, -1.0, Source.PROMPT) for token in kept_ids()[:5].tolist()]
    stranger = builder.add(0, outside, -1.0, Source.PROMPT)
    draft = drafter.begin(read(drafter, tokens, states))
    assert draft is not None
    level = draft.expand(builder, [0], 3)
    says = dense.says(loaded(), tokens, states[:-1], [])
    found = dict(zip(level.token_ids.tolist(), level.scores.tolist()))
    assert len(found) == len(level.token_ids) and outside not in found
    assert {builder.token_ids[node] for node in inside} <= set(found)
    assert {int(kept_ids()[i]) for i in says.topk(3).indices} <= set(found)
    for token, score in found.items():
        assert score == pytest.approx(float(says[drafter.draft_ids[token]]), abs=1e-4)
    below = draft.expand(builder, [stranger, inside[0]], 1)
    assert below.parents.tolist() == [stranger, inside[0]]
    says = dense.says(loaded(), tokens, states[:-1], [outside])
    assert below.scores[0] == pytest.approx(float(says.max()), abs=1e-4)


def test_a_node_before_its_parent_is_refused_and_asking_twice_changes_nothing() -> None:
    drafter, tokens = drafter_of(), prompt_of(20)
    draft = drafter.begin(read(drafter, tokens, states_of(tokens, drafter)))
    assert draft is not None
    builder = TreeBuilder(tokens[-1])
    child = builder.add(0, 5, -1.0, Source.PROMPT)
    with pytest.raises(ValueError, match="parents to have been asked"):
        draft.expand(builder, [child], 2)
    first, again = draft.expand(builder, [0], 2), draft.expand(builder, [0], 2)
    assert first.token_ids.tolist() == again.token_ids.tolist() and first.scores == pytest.approx(again.scores)
    nothing: Level = draft.expand(builder, [], 2)
    assert len(nothing.token_ids) == 0


@pytest.mark.parametrize("gap", [1, 3, 9])
@pytest.mark.parametrize("positions", [512, 36])
def test_reading_on_after_rounds_is_reading_from_the_start(gap: int, positions: int) -> None:
    """Rounds with accepted drafts, with clipped paths, with nothing drafted; windows that restart."""
    drafter, tokens = drafter_of(max_positions=positions), prompt_of(100)
    states = states_of(tokens, drafter)
    seq = read(drafter, tokens[:30], states)
    rng, starts = np.random.default_rng(gap), set()
    while len(seq.token_ids) + gap <= 96:
        if rng.random() < 0.7:
            grown(drafter, seq)
        new = tokens[len(seq.token_ids) : len(seq.token_ids) + gap]
        committed(drafter, seq, new, states, [0, *range(7, 7 + gap + int(rng.integers(0, 2)) - 1)])
        ours = grown(drafter, seq)
        start = seq.draft_state.start
        starts.add(start)
        fresh: Any = SimpleNamespace(token_ids=list(seq.token_ids), draft_state=None)
        drafter.prefill(fresh, start, states[start : len(seq.token_ids) - 1])
        theirs = grown(drafter, fresh)
        assert ours.token_ids == theirs.token_ids and ours.scores == pytest.approx(theirs.scores, abs=1e-4)
    assert (len(starts) > 2) == (positions == 36)


def test_a_head_of_64_positions_behind_a_prompt_of_1000() -> None:
    drafter, tokens = drafter_of(max_positions=64), prompt_of(1100)
    states = states_of(tokens, drafter)
    seq = read(drafter, tokens[:1000], states, chunk=7)
    assert drafter.feature_window == 24
    for _ in range(30):
        builder = grown(drafter, seq, depth=1)
        state = seq.draft_state
        assert state.end == len(seq.token_ids) - 1 and 24 <= state.rows <= 48 and len(state.inputs) == 64
        committed(drafter, seq, tokens[len(seq.token_ids) :][:3], states)
    tokens = seq.token_ids
    builder = grown(drafter, seq)
    check(drafter, builder, tokens, states, seq.draft_state.start)


def test_what_is_never_asked_for_is_not_kept() -> None:
    drafter, tokens = drafter_of(max_positions=64), prompt_of(700)
    states = states_of(tokens, drafter)
    seq = read(drafter, tokens[:100], states)
    while len(seq.token_ids) < 690:
        committed(drafter, seq, tokens[len(seq.token_ids) :][:4], states)
        assert seq.draft_state.num_waiting <= drafter.last_row
    check(drafter, grown(drafter, seq), seq.token_ids, states, seq.draft_state.start)


def test_it_steps_aside_without_states_and_starts_with_what_comes() -> None:
    drafter, tokens = drafter_of(), prompt_of(30)
    states = states_of(tokens, drafter)
    seq: Any = SimpleNamespace(token_ids=tokens[:20], draft_state=None)
    assert drafter.begin(seq) is None
    committed(drafter, seq, tokens[20:24], states)  # an answer whose prompt came from a cache
    check(drafter, grown(drafter, seq), seq.token_ids, states, 19)
    drafter.prefill(seq, 40, states[:3])  # a gap: what lies before it is of no use
    assert seq.draft_state.start == 40
    drafter.reset(seq)
    assert seq.draft_state is None and drafter.begin(seq) is None


def test_catching_up_and_restarting_are_priced() -> None:
    drafter, tokens = drafter_of(max_positions=64), prompt_of(40)
    states = states_of(tokens, drafter)
    short, long = (drafter.begin(read(drafter, tokens[:n], states)) for n in (2, 25))
    assert short is not None and long is not None
    assert short.seconds(1) == pytest.approx(1.0) and short.seconds(4) == pytest.approx(1.3)
    assert long.seconds(1) == pytest.approx(1.0 + 23 * 7.3 / 64) and long.seconds(4, True) == pytest.approx(1.3)
    builder = TreeBuilder(tokens[24])
    long.expand(builder, [0], 2)
    assert long.seconds(1) == pytest.approx(1.0)


def test_costs_are_measured_when_first_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle, "REPEATS", 1)
    drafter = Eagle3Drafter(loaded(max_positions=64))
    tokens = prompt_of(20)
    seq = read(drafter, tokens, states_of(tokens, drafter))
    grown(drafter, seq)
    assert drafter._cost is None
    draft = drafter.begin(seq)
    assert draft is not None and draft.seconds(8) >= draft.seconds(1) > 0
    assert drafter.cost is drafter.cost and drafter.cost.read >= 0
    before = drafter.cost.table.correction.copy()
    committed(drafter, seq, [3], states_of([*tokens, 3], drafter))
    grown(drafter, seq)
    assert not np.array_equal(before, drafter.cost.table.correction)


def test_frozen_costs_stay() -> None:
    drafter, tokens = drafter_of(), prompt_of(20)
    grown(drafter, read(drafter, tokens, states_of(tokens, drafter)))
    assert np.all(drafter.cost.table.correction == 1.0)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(GraftError, match="window of the EAGLE-3 head is 0"):
        drafter_of(window=0)


@pytest.mark.parametrize("positions", [1, 2, 3, 5])
def test_hardly_any_positions(positions: int) -> None:
    drafter, tokens = drafter_of(max_positions=positions), prompt_of(40)
    states = states_of(tokens, drafter)
    seq = read(drafter, tokens[:20], states)
    while len(seq.token_ids) < 38:
        check(drafter, grown(drafter, seq, depth=1), seq.token_ids, states, seq.draft_state.start)
        committed(drafter, seq, tokens[len(seq.token_ids) :][:2], states)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("temperature", "dtype"), [(0.0, torch.float64), (1.0, torch.float32)])
def test_the_output_is_that_of_plain_decoding(policy: str, temperature: float, dtype: torch.dtype) -> None:
    model = model_of(dtype=dtype)
    cheap = CostTable(np.full(len(ROW_BUCKETS), 1e-4), np.zeros(len(ROW_BUCKETS)), frozen=True)
    drafter = Eagle3Drafter(loaded(model, max_positions=64), cost=cheap)
    engine = Engine(model, drafter=drafter, cost=engines.all_nodes())
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=16)
    prompts = [prompt_of(n) for n in (1, 100)]
    plain = engine.generate(prompts, params, policy="plain")
    drafted = engine.generate(prompts, params, policy=policy)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert any(out.stats["nodes_by_source"].get("draft") for out in drafted)


@torch.no_grad()
def test_the_states_it_reads_are_those_of_the_committed_text() -> None:
    """Through the engine: chunked prompts, accepted paths and bonus tokens leave what one whole forward gives."""
    model = model_of()
    drafter = Eagle3Drafter(loaded(model), cost=cost_of(0.1))
    engine = Engine(model, drafter=drafter, cost=engines.all_nodes(), config=EngineConfig(prefill_rows=7))
    seq = engine.open(prompt_of(30), SamplingParams(temperature=0.0, max_new_tokens=12))
    for _ in engine.run([seq]):
        if not seq.is_finished:
            check(drafter, grown(drafter, seq, 1), list(seq.token_ids), layer_outputs(model, seq.token_ids), 0)
    assert len(seq.new_token_ids) == 12


def layer_outputs(model: Any, token_ids: list[int]) -> Tensor:
    """What layers 0, 1 and 1 put out over a text read in one piece, side by side."""
    seen: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).view(len(token_ids), -1))

    hooks = [model.model.layers[layer].register_forward_hook(keep) for layer in (0, 1)]
    with returned(model):
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[0], seen[1], seen[1]], -1)
