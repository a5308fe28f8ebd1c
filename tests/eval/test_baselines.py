"""What all baselines have in common."""

from __future__ import annotations

import pytest

from longgraft.config import GraftError
from longgraft.eval.baselines import BASELINES, open_baseline
from tests.eval.drafting import assert_tree, drafted
from tests.index.texts import TEXTS

OWN = [name for name in BASELINES if not name.startswith("arctic")]
PEERS = [pytest.param(name, marks=pytest.mark.peers) for name in BASELINES if name.startswith("arctic")]
SOUND = {name: [token for token in text if token >= 0] for name, text in TEXTS.items()}


@pytest.mark.parametrize("name", [*OWN, *PEERS])
def test_drafts_are_trees_within_the_budget(name: str) -> None:
    drafter = open_baseline(name)
    for text in SOUND.values():
        for budget in (1, 7, 60):
            whole = drafted(drafter, text, budget)
            assert_tree(*whole, budget)
            assert drafted(drafter, text, budget, pieces=40) == whole  # any cutting, and nothing left of before
            assert drafted(open_baseline(name), text, budget) == whole


@pytest.mark.parametrize("name", OWN)
def test_a_repeated_text_is_predicted(name: str) -> None:
    text = list(range(40)) * 2 + list(range(30))
    token_ids, parents = drafted(open_baseline(name), text, 16)
    assert token_ids[:2] == [30, 31]
    assert parents[:2] == [-1, 0]


def test_an_unknown_method_lists_those_known() -> None:
    with pytest.raises(GraftError, match=r"method 'best' is unknown: expected one of longgraft, arctic, .*, rest"):
        open_baseline("best")
