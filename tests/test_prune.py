"""Growing and pruning: EAGLE-2's beam against a transcription of its rule, and when a gate ends it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.prune import ConfidenceGate, Gates, add_level, always, best, grow
from longgraft.tree import Level, Source, TreeBuilder
from tests.drafters import DRAFTERS, ScriptedDraft, path_of
from tests.models import VOCAB

ROOT = 7
TRUTH = [ROOT, *((11 * i * i + 3) % VOCAB for i in range(1, 40))]
Path_ = tuple[int, ...]


def draft_of(name: str = "right", truth: list[int] = TRUTH) -> ScriptedDraft:
    draft = DRAFTERS[name](truth).begin(SimpleNamespace(token_ids=[ROOT], draft_state=None))
    assert draft is not None
    return draft


def level(*rows: tuple[int, int, float]) -> Level:
    """Make a level of (token, parent, score)."""
    tokens, parents, scores = zip(*rows) if rows else ((), (), ())
    return Level(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32))


class Table:
    """A draft over few tokens whose probabilities come from a seeded table; `is_coarse` makes most of them equal."""

    in_one_pass = False

    def __init__(self, seed: int, vocab: int, is_coarse: bool) -> None:
        self.seed, self.vocab, self.is_coarse = seed, vocab, is_coarse

    def log_probs(self, path: Path_) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *path])
        logits = rng.integers(0, 2, self.vocab).astype(float) if self.is_coarse else rng.normal(size=self.vocab) * 2
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    def top(self, path: Path_, width: int) -> list[tuple[int, float]]:
        scores = self.log_probs(path)
        return [(int(t), float(scores[t])) for t in np.argsort(-scores, kind="stable")[:width]]

    def expand(self, tree: TreeBuilder, nodes: Any, width: int) -> Level:
        return level(*[(t, node, s) for node in nodes for t, s in self.top(tuple(path_of(tree, node)), width)])

    def seconds(self, rows: int) -> float:
        return 0.0


def eagle(draft: Table, depth: int, width: int) -> list[tuple[Path_, float]]:
    """EAGLE-2's rule in its own words: every candidate with its cumulative score, in the order of creation."""
    frontier = [((token,), score) for token, score in draft.top((), width)]
    made = list(frontier)
    for _ in range(depth):
        candidates = [((*path, t), score + s) for path, score in frontier for t, s in draft.top(path, width)]
        made += candidates
        frontier = sorted(candidates, key=lambda c: -c[1])[:width]
    return made


def paths_of(builder: TreeBuilder) -> list[Path_]:
    return [tuple(path_of(builder, node)) for node in range(len(builder))]


# The beam ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 999), st.integers(1, 5), st.integers(0, 4), st.booleans(), st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_growth_is_eagles_rule(seed: int, width: int, depth: int, is_coarse: bool, total: int) -> None:
    draft = Table(seed, 9, is_coarse)
    builder = TreeBuilder(ROOT)
    assert grow(draft, builder, depth, width) == depth + 1
    made = eagle(draft, depth, width)
    assert len(builder) == 1 + width + depth * width**2 == 1 + len(made)
    assert paths_of(builder)[1:] == [path for path, _ in made]
    assert builder.scores[1:] == pytest.approx([score for _, score in made], abs=1e-5)
    # The rerank: the best total - 1 of all candidates, of equal ones the earlier, in the order of creation.
    ranked = sorted(range(len(made)), key=lambda i: -builder.scores[i + 1])[: total - 1]
    expected = [(), *(made[i][0] for i in sorted(ranked))]
    assert paths_of(best(builder, total)) == expected


def test_the_papers_beam_makes_710_proposals() -> None:
    """Width 10, depth 7: 10 + 7 * 100, of which the best 59 and the root are verified."""
    draft, builder = draft_of("fills"), TreeBuilder(ROOT)
    grow(draft, builder, 7, 10)
    assert len(builder) - 1 == 710
    assert [len(nodes) for nodes in draft.asked] == [1, *[10] * 7]
    assert len(best(builder, 60)) == 60


def test_width_1_is_a_chain() -> None:
    builder = TreeBuilder(ROOT)
    grow(draft_of(), builder, 5, 1)
    tree = builder.build()
    assert tree.is_chain and tree.token_ids.tolist() == TRUTH[:7]
    assert set(tree.sources[1:].tolist()) == {Source.DRAFT} and tree.sources[0] == Source.ROOT


def test_ties_go_to_what_was_drafted_first() -> None:
    draft, builder = draft_of("ties"), TreeBuilder(ROOT)
    grow(draft, builder, 2, 3)
    assert draft.asked == [[0], [1, 2, 3], [4, 5, 6]]
    assert len(set(builder.scores[4:13])) == 1
    assert paths_of(best(builder, 5)) == paths_of(builder)[:5]


def test_the_frontier_is_the_best_of_the_last_level_alone() -> None:
    """A node of an earlier level is never asked about again, however good."""
    draft, builder = draft_of("right_until"), TreeBuilder(ROOT)
    grow(draft, builder, 4, 4)
    at = [len(path) for path in paths_of(builder)]
    assert [{at[node] for node in nodes} for nodes in draft.asked] == [{0}, {1}, {2}, {3}, {4}]
    for nodes in draft.asked[1:]:
        scores = sorted((builder.scores[n] for n in range(len(builder)) if at[n] == at[nodes[0]]), reverse=True)
        assert [builder.scores[n] for n in nodes] == scores[:4]


@pytest.mark.parametrize(("name", "passes"), [("empty", 1), ("only_out_of_vocabulary", 1), ("empty_below", 4)])
def test_nothing_to_say_ends_it(name: str, passes: int) -> None:
    draft, builder = draft_of(name), TreeBuilder(ROOT)
    assert grow(draft, builder, 7, 3, vocab_size=VOCAB) == passes == len(draft.asked)
    assert len(builder) == (1 if passes == 1 else 1 + 3 + 9 + 9)


def test_a_depth_of_minus_1_asks_for_nothing() -> None:
    draft, builder = draft_of(), TreeBuilder(ROOT)
    assert grow(draft, builder, -1, 10) == 0
    assert not draft.asked and len(builder) == 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_tree_whatever_the_drafter_says(name: str) -> None:
    if name == "never_there" or name == "steps_aside":
        return
    builder = TreeBuilder(ROOT)
    grow(draft_of(name), builder, 5, 4, vocab_size=VOCAB)
    tree = best(builder, 30).build()
    assert len(tree) == min(30, len(builder))
    assert tree.token_ids.min() >= 0 and tree.token_ids.max() < VOCAB and tree.depths.max() <= 6
    assert np.all(np.isfinite(tree.scores)) and np.all(tree.scores[1:] <= tree.scores[tree.parents[1:]])


# One level ----------------------------------------------------------------------------------------------------------


def test_scores_are_given_the_parent_and_equal_tokens_are_merged() -> None:
    builder = TreeBuilder(ROOT)
    assert add_level(builder, level((1, 0, -0.5), (1, 0, -0.2), (2, 0, -0.3))) == [1, 2]
    assert add_level(builder, level((3, 1, -0.6), (1, 0, -0.1), (0, 2, -0.4))) == [3, 4]
    assert builder.token_ids == [ROOT, 1, 2, 3, 0]
    assert builder.scores == pytest.approx([0.0, -0.1, -0.3, -0.8, -0.7])


def test_what_is_no_token_and_no_probability_is_left_out() -> None:
    odd = [(VOCAB, 0, -0.1), (-1, 0, -0.1), (3, 0, math.nan), (4, 0, -math.inf), (5, 0, math.inf), (6, 0, 0.5)]
    builder = TreeBuilder(ROOT)
    assert add_level(builder, level(*odd), VOCAB) == [1]
    assert builder.token_ids == [ROOT, 6] and builder.scores == [0.0, 0.0]


def test_a_parent_that_does_not_exist_is_an_error() -> None:
    for parent in (9, -1):
        with pytest.raises(ValueError, match="for a tree of 1 nodes"):
            add_level(TreeBuilder(ROOT), level((1, parent, -0.1)))


def test_the_best_keep_source_origin_and_score() -> None:
    builder = TreeBuilder(ROOT)
    builder.add(0, 1, -2.0, Source.DRAFT)
    builder.add(0, 2, -1.0, Source.PROMPT, (0, 5))
    builder.add(2, 3, -1.5, Source.SUCCESSOR)
    kept = best(builder, 3)
    assert (kept.token_ids, kept.parents, kept.sources) == ([ROOT, 2, 3], [-1, 0, 1], [0, Source.PROMPT, 3])
    assert kept.origins == [(-1, -1), (0, 5), (-1, -1)] and kept.scores == [0.0, -1.0, -1.5]
    assert kept.add(0, 2, -3.0, Source.DRAFT) == 1, "tokens that were kept are still merged"
    assert len(best(builder, 99)) == 4 and len(best(builder, 1)) == 1


# The gate -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [0, 1, 2])
def test_the_level_of_the_refusal_is_kept_and_no_other_is_asked_for(stop_at: int) -> None:
    draft, builder, seen = draft_of(), TreeBuilder(ROOT), []

    def gate(depth: int, tree: TreeBuilder, frontier: Any) -> bool:
        seen.append((depth, len(tree), [tree.scores[node] for node in frontier]))
        return depth < stop_at

    assert grow(draft, builder, 4, 2, gate) == stop_at + 1 == len(draft.asked)
    assert len(builder) == 1 + 2 + 4 * stop_at
    assert [(depth, nodes) for depth, nodes, _ in seen] == [(d, 3 + 4 * d) for d in range(stop_at + 1)]
    assert all(len(scores) == 2 and scores[0] >= scores[1] for _, _, scores in seen)


def test_the_gate_is_not_asked_when_nothing_could_follow() -> None:
    asked = []
    grow(draft_of(), TreeBuilder(ROOT), 2, 2, lambda depth, *_: asked.append(depth) or True)
    assert asked == [0, 1]
    assert always(0, TreeBuilder(ROOT), []) and always(99, TreeBuilder(ROOT), [1])


def gate_of(probabilities: list[float], gates: Gates) -> tuple[int, int]:
    """Return (stage, draft passes) of a drafter whose best path has these probabilities, depth by depth."""

    class Best(Table):
        def expand(self, tree: TreeBuilder, nodes: Any, width: int) -> Level:
            depth = len(path_of(tree, nodes[0]))
            if depth >= len(probabilities):
                return level()
            parent = probabilities[depth - 1] if depth else 1.0
            score = math.log(probabilities[depth] / parent)
            return level((0, nodes[0], score), (1, nodes[0], score - 1.0))

    gate = ConfidenceGate(gates)
    passes = grow(Best(0, 2, False), TreeBuilder(ROOT), gates.depth, gates.width, gate)
    return gate.stage, passes


@pytest.mark.parametrize(
    ("probabilities", "stage", "passes"),
    [
        ([0.34, 0.3], 0, 1),
        ([0.36, 0.24, 0.2], 1, 2),
        ([0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 2, 6),
        ([0.9, 0.8, 0.01, 0.01, 0.01, 0.01], 2, 6),
        ([0.9, 0.26, 0.2, 0.2, 0.2, 0.16, 0.001, 0.001], 3, 8),
        ([0.9] * 8, 3, 8),
    ],
)
def test_the_papers_gate_asks_at_depths_0_1_and_5_only(probabilities: list[float], stage: int, passes: int) -> None:
    assert gate_of(probabilities, Gates()) == (stage, passes)


def test_a_path_exactly_at_the_threshold_goes_on() -> None:
    builder = TreeBuilder(ROOT)
    node = builder.add(0, 1, math.log(0.5), Source.DRAFT)
    exact = Gates(thresholds=(math.exp(builder.scores[node]), 0.25, 0.15))
    assert ConfidenceGate(exact)(0, builder, [node])
    above = Gates(thresholds=(math.nextafter(exact.thresholds[0], 1), 0.25, 0.15))
    gate = ConfidenceGate(above)
    assert not gate(0, builder, [node]) and gate.stage == 0


@pytest.mark.parametrize(("levels", "stage"), [(0, 0), (1, 1), (2, 2), (4, 2), (5, 2), (6, 3), (8, 3)])
def test_a_drafter_with_nothing_to_say_is_unsure_at_the_next_checkpoint(levels: int, stage: int) -> None:
    assert gate_of([0.9] * levels, Gates(thresholds=(0.0, 0.0, 0.0)))[0] == stage


# Settings -----------------------------------------------------------------------------------------------------------


def test_the_papers_numbers() -> None:
    gates = Gates()
    assert (gates.checkpoints, gates.shares, gates.rows) == ((0, 1, 5), (8, 24, 40, 60), 60)
    assert [(s, gates.rows - s) for s in gates.shares] == [(8, 52), (24, 36), (40, 20), (60, 0)]
    assert (gates.depth, gates.width) == (7, 10)


def test_gates_go_to_a_file_and_back(tmp_path: Path) -> None:
    gates = Gates(thresholds=(0.5, 0.25, 0.0), depth=5, width=4)
    gates.save(tmp_path / "gates.json", rounds=12)
    assert Gates.load(tmp_path / "gates.json") == gates
    assert json.loads((tmp_path / "gates.json").read_text())["notes"] == {"rounds": 12}
    (tmp_path / "few.json").write_text('{"longgraft_gates": 1, "thresholds": [1, 0, 0.5]}')
    assert Gates.load(str(tmp_path / "few.json")) == Gates(thresholds=(1, 0, 0.5))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"longgraft_gates": 2}',
        '{"longgraft_gates": 1, "tau": 3}',
        '{"longgraft_gates": 1, "thresholds": 0.5}',
        '{"longgraft_gates": 1, "thresholds": [0.5, 0.5]}',
        '{"longgraft_gates": 1, "thresholds": [0.5, -0.5, 0.1]}',
        '{"longgraft_gates": 1, "thresholds": [0.5, NaN, 0.1]}',
        '{"longgraft_gates": 1, "thresholds": [0.5, "a", 0.1]}',
        '{"longgraft_gates": 1, "checkpoints": [0, 5, 1]}',
        '{"longgraft_gates": 1, "checkpoints": [-1, 1, 5]}',
        '{"longgraft_gates": 1, "checkpoints": [0.0, 1, 5]}',
        '{"longgraft_gates": 1, "shares": [0, 24, 40, 60]}',
        '{"longgraft_gates": 1, "shares": [8, 24, 40, 40]}',
        '{"longgraft_gates": 1, "depth": 0}',
        '{"longgraft_gates": 1, "width": true}',
        '{"longgraft_gates": 1, "width": 2.5}',
        "[" * 100_000,
        "\x00",
    ],
)
def test_what_is_no_gates_file_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "gates.json").write_text(text)
    with pytest.raises(GraftError, match=r"gates\.json"):
        Gates.load(tmp_path / "gates.json")
    with pytest.raises(GraftError, match=r"none\.json: expected longgraft gates of version 1"):
        Gates.load(tmp_path / "none.json")


def test_no_checkpoint_at_all_never_prunes() -> None:
    assert gate_of([1e-9] * 8, Gates(checkpoints=(), shares=(60,), thresholds=())) == (0, 8)


def test_token_zero_is_a_token() -> None:
    builder = TreeBuilder(0)
    level = Level(np.array([0, 0], np.int32), np.array([0, 0], np.int32), np.log(np.array([0.5, 0.5], np.float32)))
    assert add_level(builder, level) == [1]
    assert builder.token_ids == [0, 0]
