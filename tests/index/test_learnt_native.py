"""Size and work of the native learnt index, and its records: what the twin is too slow for, or has not."""

from __future__ import annotations

import numpy as np
import pytest

from longgraft.index.features import NUM_WEIGHTS
from tests.index.learnt import NO_PATH, RANDOM, VOCAB, ZEROS, draft, feed, ids, make, probabilities
from tests.index.texts import NATIVE_MODULE, both, fibonacci, noisy_copy

pytestmark = both
ANY = 1 << 20


@pytest.mark.parametrize("alphabet", [4, 500, 100_000])
def test_memory_per_token(alphabet: int) -> None:
    n = 1 << 17
    index = make(True)
    empty = index.memory_bytes
    assert index.extend(ids(noisy_copy(alphabet, n, alphabet)), False, None, ANY) == -1
    assert index.memory_bytes - empty <= 140 * n


def test_a_million_times_the_same_token() -> None:
    index = make(True, weights=ZEROS, rate=0.05)
    assert index.extend(np.zeros(1_000_000, np.int32), False, None, ANY) == -1
    feed(index, [0] * 20_000)
    nodes = draft(index, 12)
    assert nodes.token_ids[:8] == [0] * 8
    assert nodes.match_lens[0] == 32
    assert index.num_pairs == 0
    assert index.check_integrity() == ""


@pytest.mark.parametrize("tokens", [[0, 1, 2, 1] * 25_000, fibonacci(100_000)], ids=["periodic", "fibonacci"])
def test_hard_texts_in_linear_work(tokens: list[int]) -> None:
    """Occurrences looked at are bounded by the visit caps however many there are."""
    index = make(True, tokens, weights=ZEROS, rate=0.05)
    feed(index, tokens[:3000])
    found, _, _, _, _ = index.options(NO_PATH, None)
    assert len(found) <= 4
    assert draft(index, 30, threshold=1e-4).token_ids
    assert index.check_integrity() == ""


def test_pairs_are_bounded() -> None:
    """Text in which every copy is edited anew makes pairs for ever; they are forgotten before there are too many."""
    rng = np.random.default_rng(0)
    unit = rng.integers(0, 30, 200).tolist()
    index, seen = make(True, unit), 0
    for _ in range(500):
        changed = list(unit)
        for place in range(4, 200, 10):
            changed[place] = int(rng.integers(100, 100_000))
        assert index.extend(ids(changed), True, None, ANY) == -1
        seen = max(seen, index.num_pairs)
        assert index.num_pairs <= 4096
    assert seen > 3000


def test_reserving_does_not_change_what_is_held() -> None:
    """A text in many chunks grows by steps, not at each of them."""
    tokens = noisy_copy(1, 30_000, VOCAB)
    whole, parts = make(True, tokens), make(True)
    sizes = set()
    for place in range(0, len(tokens), 100):
        feed(parts, tokens[place : place + 100], follow=False)
        sizes.add(parts.memory_bytes)
    parts.begin(len(tokens))
    assert probabilities(whole) == probabilities(parts)
    assert len(sizes) < 300


def test_records_fit_weights() -> None:
    tokens = noisy_copy(9, 900, 30)
    index = make(True, tokens[:300], weights=ZEROS)
    records = index.record(ids(tokens[300:]), None)
    assert index.tokens().tolist() == tokens
    fit = NATIVE_MODULE.Fit(ZEROS, 0.1, 1e-6)
    losses = [fit.learn(records, seed) for seed in range(4)]
    assert losses[-1] < 0.9 * losses[0]
    assert fit.weights().shape == (NUM_WEIGHTS,)
    before, after = (np.mean([surprise(w, tokens, at) for at in range(300, 900, 40)]) for w in (ZEROS, fit.weights()))
    assert after < before


def surprise(weights: np.ndarray, tokens: list[int], place: int) -> float:
    index = make(True, tokens[:300], weights=weights)
    feed(index, tokens[300:place])
    p = probabilities(index)
    return float(-np.log(p.get(tokens[place], p[-1])))


@pytest.mark.parametrize(
    "records", [[1], [1, 0, 0], [1, 5, 0, 0], [0, -1, 1, NUM_WEIGHTS], [0, -1, 2, 5], [1, 0, 0, 1, -3], [-1, -1, 0]]
)
def test_what_are_no_records_is_refused(records: list[int]) -> None:
    fit = NATIVE_MODULE.Fit(RANDOM, 0.1, 1e-6)
    with pytest.raises(ValueError, match="records"):
        fit.learn(np.array(records, np.int16), 0)
    np.testing.assert_array_equal(fit.weights(), RANDOM)


def test_records_of_wrong_ids_are_refused() -> None:
    index = make(True, [1, 2, 3])
    with pytest.raises(ValueError, match="ids"):
        index.record(ids([1, -2]), None)
    assert len(index) == 3
    assert NATIVE_MODULE.Fit(ZEROS, 0.1, 0.0).learn(np.zeros(0, np.int16), 1) == 0.0


def test_results_are_not_written_into_a_copy() -> None:
    """An array of another type would be converted, and what is drafted lost."""
    index = make(True, [1, 2, 3, 1, 2], weights=ZEROS)
    for out in (np.zeros((5, 8), np.int64), np.zeros((8, 5), np.int32).T, np.zeros((5, 16), np.int32)[:, ::2]):
        with pytest.raises(TypeError):
            index.draft(out, NO_PATH, 0.01, None)
    assert index.draft(np.zeros((5, VOCAB), np.int32), NO_PATH, 0.01, None) > 0
