"""The hazard table, and what learning does to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.index import rank
from longgraft.index.native import native_module
from longgraft.index.suffix_automaton import SuffixAutomaton

KINDS = [False] if native_module() is None else [False, True]


def cell(length: int = 0, share: int = 0, total: int = 0, order: int = 0, age: int = 0) -> int:
    return int(np.ravel_multi_index((length, share, total, order, age), rank.MATCH_SHAPE))


def test_packaged_priors_are_sane() -> None:
    priors = rank.load_priors()
    assert priors.shape == (rank.NUM_CELLS,)
    assert np.all((priors >= rank.LOWEST) & (priors <= rank.HIGHEST))
    sure = [cell(length, share=6, total=1, age=2) for length in range(rank.MATCH_SHAPE[0])]
    assert priors[sure[-1]] > 0.98
    assert priors[sure[-1]] > priors[sure[3]] > priors[sure[0]]
    rare, common = cell(1, share=1, total=4), cell(1, share=5, total=4)
    assert priors[common] > 2 * priors[rare]
    assert priors[rank.SUCCESSOR_BASE] > priors[rank.SUCCESSOR_BASE + 7 * rank.NUM_CONTEXTS]


def test_table_survives_writing(tmp_path: Path) -> None:
    table = rank.read_table()
    path = tmp_path / "hazards.json"
    path.write_text(rank.format_table(table))
    assert json.loads(path.read_text()) == table
    np.testing.assert_array_equal(rank.load_priors(path), rank.load_priors())


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not JSON"), ("[]", "object"), ("{}", "lacks"), ('{"bias": 0, "match": {"0x3": [1]}}', "does not fit")],
)
def test_bad_table_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "hazards.json"
    path.write_text(text)
    with pytest.raises(GraftError, match=says):
        rank.load_priors(path)
    with pytest.raises(GraftError, match="absent"):
        rank.load_priors(tmp_path / "absent.json")


def test_bad_ranking_is_refused() -> None:
    for priors in (np.full(3, 0.5), np.zeros(rank.NUM_CELLS), np.full(rank.NUM_CELLS, 0.5, np.float32)):
        with pytest.raises(GraftError, match="priors"):
            rank.Ranking(priors)
    with pytest.raises(GraftError, match="decay"):
        rank.Ranking(decay=0.0)


@pytest.mark.parametrize("native", KINDS)
def test_options_use_their_cells(native: bool) -> None:
    """One entry, one known cell: its probability is that cell's prior."""
    automaton = SuffixAutomaton(native=native)
    automaton.extend([1, 2, 3, 4, 1, 2, 3])
    options = automaton.options()
    expected = cell(length=2, share=6, total=0, order=0, age=0)  # 3 tokens matched, the only follower, seen once
    assert options.token_ids[0] == 4
    assert options.cells[0] == expected
    assert options.probabilities[0] == rank.load_priors()[expected]


@pytest.mark.parametrize("native", KINDS)
def test_learning_moves_hazards_to_what_was_seen(native: bool) -> None:
    """Unbiased: with decay 1 a cell's hazard is (weight * prior + hits) / (weight + trials)."""
    ranking = rank.Ranking(prior_weight=10.0, decay=1.0)
    automaton = SuffixAutomaton(ranking=ranking, native=native)
    automaton.extend([1, 2, 3, 4] * 3)
    before = automaton.options()
    automaton.extend([1], learn=True)
    trials, hits = automaton.learnt()
    assert trials.sum() == hits.sum() == 1
    assert trials[before.cells[0]] == 1
    automaton.extend([9], learn=True)  # listed nowhere: a trial for every entry, a hit for none
    trials, hits = automaton.learnt()
    assert hits.sum() == 1
    assert trials.sum() > 2
    after = automaton.options([1, 2, 3])
    moved = (10 * ranking.priors + hits) / (10 + trials)
    rest = 1.0
    for number, p in zip(after.cells.tolist(), after.probabilities.tolist()):
        assert p == pytest.approx(rest * moved[number], rel=1e-12)
        rest *= 1 - moved[number]


@pytest.mark.parametrize("native", KINDS)
def test_forgetting_keeps_a_bounded_memory(native: bool) -> None:
    automaton = SuffixAutomaton(ranking=rank.Ranking(decay=0.9), native=native)
    automaton.extend([1, 2] * 300, learn=True)
    trials, hits = automaton.learnt()
    assert 9.5 < trials.max() <= 10.0
    assert np.all(hits <= trials)


@pytest.mark.parametrize("native", KINDS)
def test_learning_is_a_function_of_tokens_and_is_cleared(native: bool) -> None:
    text = np.random.default_rng(0).integers(0, 9, 400)
    first, second = SuffixAutomaton(native=native), SuffixAutomaton(native=native)
    second.extend([5, 5, 5] * 20, learn=True)
    second.draft(30)
    second.reset()
    for automaton in (first, second):
        automaton.extend(text[:100])
        automaton.draft(5)
        automaton.extend(text[100:], learn=True)
    for x, y in zip(first.learnt() + first.draft(40), second.learnt() + second.draft(40)):
        np.testing.assert_array_equal(x, y)
    second.reset()
    assert not np.any(second.learnt()[0])


@pytest.mark.parametrize("native", KINDS)
def test_frozen_ranking_learns_nothing(native: bool) -> None:
    frozen = SuffixAutomaton(ranking=rank.Ranking(learns=False), native=native)
    plain = SuffixAutomaton(native=native)
    text = np.random.default_rng(1).integers(0, 5, 200)
    frozen.extend(text, learn=True)
    plain.extend(text, learn=False)
    np.testing.assert_array_equal(frozen.draft(40).scores, plain.draft(40).scores)
    assert not np.any(frozen.learnt()[0])


@pytest.mark.parametrize("native", KINDS)
def test_prompt_is_not_learnt_from(native: bool) -> None:
    automaton = SuffixAutomaton(native=native)
    automaton.extend([1, 2, 3] * 50)
    assert not np.any(automaton.learnt()[0])
