"""Gumbel noise that depends on what is drawn, not on when or where: a pure function of four numbers.

Knows numpy only: no logits, no model, no generator state. The noise of a token is keyed by (seed, sample
index, output position, token id), so it is the same whichever other tokens survive a filter, whatever the
batch slot, the device or the number of rows in a forward. Adding it to log-probabilities and taking the
argmax draws exactly from them (Gumbel-max).

Layout, bit for bit (Philox4x32-10, Salmon et al., SC 2011):
  key     = (seed & 0xffffffff, seed >> 32)
  counter = (token_id >> 2, position, sample_index & 0xffffffff, sample_index >> 32)
  x       = word [token_id & 3] of the four 32-bit words this gives
  u       = (x + 0.5) / 2**32, an exact double in [2**-33, 1 - 2**-33]: never 0, never 1
  noise   = -log(-log(u)), with `log` as written below
`log` uses IEEE double add, subtract, multiply and divide in the order written, no fused multiply-add and no
library call, so that a kernel compiled without contraction returns the same bits as any CPU.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]
Key = tuple[int, int, int]  # seed, sample index, position

MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_MULTIPLIERS, _WEYL = np.array([MULTIPLIERS], np.uint64).T, np.array([WEYL], np.uint32).T
LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
# log(m) = sum over j of 2 / (2j + 1) * f ** (2j + 1), f = (m - 1) / (m + 1); |f| < 0.1716, the next term is <
# 2e-19.
SERIES = tuple(2.0 / (2 * j + 1) for j in range(11))
_FEW = 1024  # for fewer tokens their exact noise is cheaper than screening
_SLACK = 1 - 1e-3  # covers the rounding of the fp32 screen, about 1e-6, many times over


def philox(counter: Ints, key: tuple[int, int]) -> Words:
    """Return the four words of each Philox4x32-10 counter `[4, n]` under two 32-bit key words. [n, 4]"""
    even, odd = counter[0::2].astype(np.uint32), counter[1::2].astype(np.uint32)
    round_key = np.array(key, np.uint32)[:, None]
    product = np.empty(even.shape, "<u8")
    # 32-bit view of the products, lanes swapped: each lane's next words come from the other lane's product.
    halves = product.view("<u4")[::-1]
    for _ in range(10):
        np.multiply(even, _MULTIPLIERS, out=product)
        np.bitwise_xor(halves[:, 1::2], odd, out=even)
        even ^= round_key
        odd = halves[:, 0::2].copy()
        round_key = round_key + _WEYL
    return np.stack((even[0], odd[0], even[1], odd[1]), axis=1)


def _blocks(key: Key, numbers: Ints) -> Words:
    """Return the words of the tokens 4b .. 4b + 3 for every block number b. [n, 4]"""
    seed, sample_index, position = key
    counter = np.empty((4, len(numbers)), np.uint64)
    counter[0] = numbers
    counter[1:] = [[position], [sample_index & 0xFFFFFFFF], [sample_index >> 32]]
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32))


def log(x: Doubles) -> Doubles:
    """Return the natural logarithm of positive normal doubles: the same bits on every machine, within 3 ulp."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = np.where(low, mantissa + mantissa, mantissa)
    exponent = (exponent - low).astype(np.float64)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = f * f
    total = np.full_like(f, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        total = total * square + coefficient
    return exponent * LN2_HIGH + (exponent * LN2_LOW + total * f)


def _noise(words: Words) -> Doubles:
    return -log(-log((words.astype(np.float64) + 0.5) * 2.0**-32))


def gumbel(seed: int, sample_index: int, position: int, token_ids: Ints) -> Doubles:
    """Return the Gumbel noise of each token id: doubles between -3.2 and 22.9. [n]"""
    blocks = _blocks((seed, sample_index, position), token_ids >> 2)
    return _noise(blocks[np.arange(len(token_ids)), token_ids & 3])


def winner_plain(scores: Floats, token_ids: Ints, key: Key) -> int:
    """Return the token id with the largest score + noise; equal sums go to the lowest id.

    `scores [n]` are log-weights of `token_ids [n]`, free of NaN and +inf, `key` is (seed, sample index,
    position).
    """
    total = scores.astype(np.float64) + gumbel(*key, token_ids)
    return int(token_ids[total == total.max()].min())


def winner(scores: Floats, key: Key) -> int:
    """Return what `winner_plain` returns for all tokens, without the noise of those that cannot win.

    `scores [V]` are log-weights by token id, -inf where forbidden, at least one finite. Let S be the best
    score and e = exp(score - S). As -log(u) >= 1 - u, a token's exp(score + noise - S) is at most r =
    e / (1 - u), which is at most e * 2**33. Any one token's true score + noise, B, bounds the winner's from below,
    so a token whose r or e * 2**33 is below exp(B - S) can neither win nor tie. B is first the best token's:
    what remains needs random bits. Then it is that of the token with the largest r: what remains, mostly one,
    needs logarithms.
    """
    if len(scores) <= _FEW:
        return winner_plain(scores, np.arange(len(scores)), key)
    best = int(scores.argmax())
    padded = np.full(-(-len(scores) // 4) * 4, -np.inf, np.float32)
    np.subtract(scores, scores[best], out=padded[: len(scores)], casting="same_kind")
    weights = np.exp(padded, out=padded).reshape(-1, 4)
    floor = np.exp(gumbel(*key, np.array([best]))).item() * _SLACK
    alive = weights >= floor * 2.0**-33
    if np.count_nonzero(alive) <= _FEW:
        token_ids = np.flatnonzero(alive)
        return winner_plain(scores[token_ids], token_ids, key)
    numbers = np.flatnonzero(alive.any(axis=1))
    complement = np.invert(_blocks(key, numbers)).astype(np.float32) + np.float32(0.5)  # (1 - u) * 2**32
    bounds = (weights[numbers] / complement).ravel()
    first = _token_ids(numbers, bounds.argmax(keepdims=True))
    floor = np.exp(scores[first] - scores[best] + gumbel(*key, first)).item() * _SLACK
    rest = _token_ids(numbers, np.flatnonzero(bounds >= floor * 2.0**-32))
    return winner_plain(scores[rest], rest, key)


def _token_ids(numbers: Ints, words: Ints) -> Ints:
    """Return the token ids of these words, counted over the blocks `numbers`."""
    return numbers[words >> 2] * 4 + (words & 3)
