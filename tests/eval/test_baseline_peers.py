"""Other projects' own code: what is said when it is missing, and that it is asked rightly when it is there."""

from __future__ import annotations

import sys

import pytest

from longgraft.config import GraftError
from longgraft.eval.baseline_peers import Arctic, ArcticOptions, TransformersLookup
from longgraft.eval.baselines import open_baseline
from tests.eval.drafting import assert_tree, drafted, ids, paths
from tests.index.texts import noisy_copy


@pytest.mark.parametrize("name", ["arctic", "arctic-max"])
def test_a_missing_package_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(GraftError, match=r"--no-build-isolation --no-deps arctic-inference==0\.3\.0"):
        open_baseline(name)


def test_prompt_lookup_without_a_text() -> None:
    lookup = TransformersLookup()
    assert len(lookup.draft(8).token_ids) == 0
    assert drafted(lookup, [1], 8) == ([], [])
    assert drafted(lookup, [1, 2, 1], 8) == ([2, 1], [-1, 0])


@pytest.fixture
def arctic() -> Arctic:
    try:
        return Arctic(ArcticOptions(64.0, 64.0, 0.0, True))
    except GraftError as error:
        pytest.skip(str(error))


@pytest.mark.peers
def test_arctic_follows_real_matches(arctic: Arctic) -> None:
    """Every path of its tree follows some suffix of the text where that occurred before."""
    for seed in range(10):
        tokens = noisy_copy(seed, 300, 12)
        token_ids, parents = drafted(arctic, tokens, 32, pieces=1 + seed)
        assert_tree(token_ids, parents, 32)
        assert token_ids
        for path in paths(token_ids, parents):
            line = [tokens[-1], *path]
            assert any(tokens[i : i + len(line)] == line for i in range(len(tokens)))


@pytest.mark.peers
def test_arctic_by_default_copies_no_more_than_matched(arctic: Arctic) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert drafted(Arctic(), tokens, 32) == ([4, 5, 6], [-1, 0, 1])
    assert drafted(arctic, tokens, 32)[0] == [4, 5, 6, 7, 8, 9, 1, 2, 3]


@pytest.mark.peers
def test_arctic_forgets_and_starts_empty(arctic: Arctic) -> None:
    assert len(arctic.draft(8).token_ids) == 0
    assert arctic.memory_bytes is None
    arctic.extend(ids([]))
    assert len(arctic.draft(8).token_ids) == 0
    assert drafted(arctic, [1, 2, 1], 8)[0] == [2, 1]
    assert arctic.memory_bytes is not None and arctic.memory_bytes > 0
    assert drafted(arctic, [2, 5], 8)[0] == []
