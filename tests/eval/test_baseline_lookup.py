"""N-gram lookups against plain scans, and prompt lookup against transformers' own class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.eval.baseline_lookup import NgramLookup, NgramMod, scan_lookup
from longgraft.eval.baseline_peers import TransformersLookup
from tests.eval.drafting import QUICK, drafted, texts
from tests.index.texts import noisy_copy


@QUICK
@given(texts, st.sampled_from([(1, 2), (1, 4), (2, 8), (3, 3)]), st.integers(1, 30), st.integers(1, 9))
def test_lookup_is_the_scan(tokens: list[int], sizes: tuple[int, int], budget: int, pieces: int) -> None:
    found = drafted(NgramLookup(*sizes), tokens, budget, pieces)
    assert found[0] == scan_lookup(tokens, *sizes, budget)
    assert found[1] == list(range(-1, len(found[0]) - 1))


@pytest.mark.parametrize("limit", [10, None])
@pytest.mark.parametrize("seed", range(20))
def test_prompt_lookup_is_that_of_transformers(seed: int, limit: int | None) -> None:
    """On texts that copy from themselves, after every token."""
    tokens = noisy_copy(seed, 60, 3 + seed)
    quick, theirs = NgramLookup(1, 2, limit), TransformersLookup(limit)
    for size in range(len(tokens)):
        budget = 1 + (seed + size) % 16
        assert drafted(quick, tokens[:size], budget) == drafted(theirs, tokens[:size], budget)


def test_limits() -> None:
    tokens = [*range(50), 0]
    assert len(drafted(NgramLookup(1, 2, 10), tokens, 60)[0]) == 10
    assert drafted(NgramLookup(1, 2), tokens, 60)[0] == tokens[1:]
    assert drafted(NgramLookup(1, 2), tokens, 3)[0] == [1, 2, 3]


def newest_next(tokens: list[int], size: int, budget: int) -> list[int]:
    line = list(tokens)
    while len(tokens) >= size and len(line) < len(tokens) + budget:
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == line[-size:]]
        if not ends:
            break
        line.append(tokens[ends[-1]])
    return line[len(tokens) :]


@QUICK
@given(texts, st.integers(1, 5), st.integers(1, 20), st.integers(1, 9))
def test_ngram_mod_is_the_scan(tokens: list[int], size: int, budget: int, pieces: int) -> None:
    assert drafted(NgramMod(size), tokens, budget, pieces)[0] == newest_next(tokens, size, budget)
