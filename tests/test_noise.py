"""Noise: published Philox vectors, the documented layout bit for bit, and pruning that never changes a winner."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.noise import Key, gumbel, log, philox, winner, winner_plain


# The known-answer vectors of Random123 for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    low, high = _hex(key)
    column = np.array(_hex(counter), np.uint64)[:, None]
    got = philox(np.repeat(column, 3, axis=1), (low, high))
    assert got.tolist() == [_hex(words)] * 3


def _hex(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k, q & 0xFFFFFFFF, (p >> 32) ^ d ^ m, p & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9),
)
def test_documented_layout(seed: int, sample_index: int, position: int, token_ids: list[int]) -> None:
    got = gumbel(seed, sample_index, position, np.array(token_ids))
    for token_id, noise in zip(token_ids, got):
        counter = [token_id >> 2, position, sample_index & 0xFFFFFFFF, sample_index >> 32]
        x = philox_by_hand(counter, [seed & 0xFFFFFFFF, seed >> 32])[token_id & 3]
        u = (x + 0.5) / 2**32
        assert noise == pytest.approx(-math.log(-math.log(u)), rel=1e-13, abs=1e-15)


def test_bits_are_pinned() -> None:
    """The same doubles on every machine: other implementations must return exactly these."""
    bits = gumbel(2**63 + 5, 3, 1000, np.array([0, 1, 2, 3, 151935])).view(np.uint64)
    assert [f"{b:016x}" for b in bits.tolist()] == PINNED


PINNED = ["3ff85e593128c018", "bfe4652c920c8d3f", "bfe32f207e415651", "3fff8d9e6ef66e6f", "3fedc9ed36a8c2ca"]


def test_noise_depends_on_nothing_but_its_key() -> None:
    token_ids = np.array([9, 4, 1000, 5, 6, 7, 4])
    whole = gumbel(11, 0, 3, np.arange(1001))
    assert np.array_equal(gumbel(11, 0, 3, token_ids), whole[token_ids])
    others = [(12, 0, 3), (11 + 2**40, 0, 3), (11, 1, 3), (11, 2**33, 3), (11, 0, 4)]
    for key in others:
        assert not np.any(gumbel(*key, np.arange(1001)) == whole), key


def test_log_is_accurate() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            np.exp(rng.normal(size=20000) * 8),
            1 - np.arange(1, 3000) * 2.0**-33,
            2.0 ** np.arange(-60.0, 60.0),
            np.nextafter(0.7071067811865476, [0.0, 1.0]),
        ]
    )
    want = np.log(x.astype(np.longdouble)).astype(np.float64)
    assert np.max(np.abs(log(x) - want) / np.maximum(np.spacing(np.abs(want)), 5e-324)) <= 3
    assert log(np.array([1.0])).tolist() == [0.0]


def test_extreme_words_give_finite_noise() -> None:
    """The words 0 and 2**32 - 1 are the ends of the range: no 0 or 1 reaches a logarithm."""
    for word, bound in ((0, -math.log(33 * math.log(2))), (2**32 - 1, 33 * math.log(2))):
        u = np.array([(word + 0.5) * 2.0**-32])
        assert -log(-log(u))[0] == pytest.approx(bound, rel=1e-9)


def test_distribution_is_gumbel() -> None:
    noise = np.sort(gumbel(1, 0, 0, np.arange(200_000)))
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.95 / math.sqrt(len(noise))


SHAPES = {
    "wide": lambda rng, n: rng.normal(size=n) * 2.5,
    "peaked": lambda rng, n: rng.normal(size=n) * 12,
    "flat": lambda rng, n: np.zeros(n),
    "narrow": lambda rng, n: rng.normal(size=n) * 0.1,
    "rounded": lambda rng, n: np.round(rng.normal(size=n) * 8) / 4,
    "sparse": lambda rng, n: np.where(rng.random(n) < 0.5, -np.inf, rng.normal(size=n)),
    "offset": lambda rng, n: rng.normal(size=n) * 3 + 1e4,
    "one": lambda rng, n: np.where(np.arange(n) == n // 2, 1.0, -np.inf),
    "edge": lambda rng, n: np.where(np.arange(n) == 3, 0.0, -20.0 - rng.random(n) * 6),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_pruning_never_changes_the_winner(shape: str, dtype: type) -> None:
    rng = np.random.default_rng(4)
    for position in range(12):
        n = int(rng.choice([1, 2, 5, 1023, 4097, 20001]))
        scores = SHAPES[shape](rng, n).astype(dtype)
        scores[n // 2] = max(scores[n // 2], 0)
        key: Key = (position * 7919, 0, position)
        assert winner(scores, key) == winner_plain(scores, np.arange(n), key)


@pytest.mark.parametrize("margin", [1e-3, -1e-3])
def test_a_token_that_barely_wins_is_never_pruned(margin: float) -> None:
    """The hardest case for the bounds: the token with the most noise against one with the least."""
    for position in range(20):
        noise = gumbel(9, 0, position, np.arange(20001))
        most, least = int(noise.argmax()), int(noise.argmin())
        for others in (-60.0, noise[least] - noise[most] - 3.0):
            scores = np.full(20001, others) - noise  # all equal after the noise
            scores[least] = 0.0
            scores[most] = noise[least] - noise[most] + margin
            assert winner(scores, (9, 0, position)) == (most if margin > 0 else least)


def test_equal_sums_go_to_the_lowest_id() -> None:
    same_noise = np.array([8, 3, 8, 8])
    assert winner_plain(np.array([0.0, -99.0, 0.0, 0.0]), same_noise, (1, 0, 0)) == 8
    scores = np.full(5000, -np.inf)
    scores[[2, 5]] = 1e30  # beyond the resolution of noise: an exact tie
    assert winner(scores, (1, 0, 0)) == winner_plain(scores, np.arange(5000), (1, 0, 0)) == 2


def test_argmax_draws_from_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03]))
    draws = [winner(logits, (77, 0, position)) for position in range(2000)]
    counts = np.bincount(draws, minlength=5)
    expected = np.exp(logits) * len(draws)
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # chi-square, 4 degrees of freedom, p = 0.001
