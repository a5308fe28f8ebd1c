"""What the tests of the learnt index share: weights, both kinds of index, operations on them, what a draft holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from longgraft.index.features import BASES, NUM_WEIGHTS
from longgraft.index.learnt_twin import PythonLearntIndex
from tests.index.texts import NATIVE_MODULE

VOCAB = 40
NO_PATH = np.zeros(0, np.int32)
ZEROS = np.zeros(NUM_WEIGHTS)
RANDOM = np.random.default_rng(7).normal(0.0, 1.0, NUM_WEIGHTS)
CLASSES = (np.arange(VOCAB - 9) * 5 % 8).astype(np.uint8)  # shorter than the vocabulary
ROWS = np.array([[(t * 7 + k) % VOCAB if (t + k) % 4 else -1 for k in range(10)] for t in range(30)], np.int32)


def weights_with(**entries: float) -> np.ndarray:
    """Weights of zero but for all entries of the named tables."""
    weights = ZEROS.copy()
    order = [*BASES.values(), NUM_WEIGHTS]
    for table, value in entries.items():
        base = BASES[table]
        weights[base : order[order.index(base) + 1]] = value
    return weights


def make(
    native: bool,
    tokens: Sequence[int] = (),
    weights: np.ndarray = RANDOM,
    classes: np.ndarray | None = CLASSES,
    rate: float = 0.0,
    shrink: float = 0.12,
) -> Any:
    """An index whose prompt is `tokens`."""
    kind = NATIVE_MODULE.LearntIndex if native else PythonLearntIndex
    index = kind(weights, classes, rate, shrink)
    index.begin(len(tokens))
    feed(index, tokens, follow=False)
    return index


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def cosines(n: int) -> np.ndarray:
    """Falling cosines of so many hints, with the edges of bins among them."""
    return np.linspace(1.0, -0.1, 12)[np.arange(n) % 12]


def feed(index: Any, tokens: Sequence[int], follow: bool = True, rows: np.ndarray | None = None) -> None:
    assert index.extend(ids(tokens), follow, rows, VOCAB) == -1


class Nodes(NamedTuple):
    token_ids: list[int]
    parents: list[int]
    scores: np.ndarray
    match_lens: list[int]
    places: list[int]

    def path(self, node: int) -> list[int]:
        """Tokens from the root down to a node."""
        path: list[int] = []
        while node >= 0:
            path.insert(0, self.token_ids[node])
            node = self.parents[node]
        return path


def draft(
    index: Any, budget: int, path: Sequence[int] = (), threshold: float = 1e-3, rows: np.ndarray | None = None
) -> Nodes:
    out = np.full((5, budget), -7, np.int32)
    n = index.draft(out, ids(path), threshold, rows)
    assert np.all(out[:, n:] == -7)
    token_ids, parents, bits, match_lens, places = out[:, :n]
    return Nodes(token_ids.tolist(), parents.tolist(), bits.view(np.float32), match_lens.tolist(), places.tolist())


def probabilities(index: Any, path: Sequence[int] = (), rows: np.ndarray | None = None) -> dict[int, float]:
    """Probability of each listed token, -1: of none of them."""
    tokens, _, _, p, rest = index.options(ids(path), rows)
    assert len(set(tokens.tolist())) == len(tokens)
    return {**dict(zip(tokens.tolist(), p.tolist())), -1: rest}


def texts_of(index: Any, side: Sequence[int] = ()) -> dict[int, int]:
    """Token at each place of the own and the side text."""
    own = dict(enumerate(index.tokens().tolist()))
    return {**own, **{(1 << 30) + i: token for i, token in enumerate(side)}}


def assert_same(a: Any, b: Any, path: Sequence[int] = (), rows: np.ndarray | None = None) -> None:
    for ours, theirs in zip(a.options(ids(path), rows), b.options(ids(path), rows)):
        np.testing.assert_array_equal(ours, theirs)
    for budget, threshold in ((0, 0.1), (1, 1e-3), (24, 1e-3)):
        ours, theirs = draft(a, budget, path, threshold, rows), draft(b, budget, path, threshold, rows)
        assert ours._replace(scores=None) == theirs._replace(scores=None)
        np.testing.assert_array_equal(ours.scores, theirs.scores)
    assert a.copy() == b.copy()
    np.testing.assert_array_equal(a.weights(), b.weights())
    assert (len(a), a.side_len, a.num_pairs) == (len(b), b.side_len, b.num_pairs)


# One step in the life of an index: a verb and what it needs.
tokens_lists = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.integers(-1, 5), min_size=1, max_size=20),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    st.builds(lambda unit, n: unit * n, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 9)),
)
places = st.integers(-2, 60) | st.integers(2**30 - 2, 2**30 + 30)
edits = st.sampled_from(["as it is", "rename", "insert", "delete", "document"])
operations = st.one_of(
    st.tuples(st.just("extend"), tokens_lists, st.booleans()),
    st.tuples(st.just("copy"), st.tuples(st.floats(0, 1), st.integers(1, 60)), edits),
    st.tuples(st.just("copy"), st.tuples(st.floats(0, 1), st.integers(1, 60)), edits),
    st.tuples(st.just("side"), tokens_lists, st.none()),
    st.tuples(
        st.just("hint"), st.lists(st.integers(-2, 60) | st.integers(2**30 - 2, 2**30 + 30), max_size=8), st.none()
    ),
    st.tuples(st.just("begin"), st.integers(0, 50), st.none()),
    st.tuples(st.just("truncate"), st.floats(0, 1), st.none()),
    st.tuples(st.sampled_from(["reset", "clear_side"]), st.none(), st.none()),
)


def edited(block: list[int], edit: str) -> list[int]:
    """A copied block as someone may have changed it."""
    middle = len(block) // 2
    if edit == "rename":
        return [(t + 1) % VOCAB if t == block[middle] and t >= 0 else t for t in block]
    if edit == "insert":
        return [*block[:middle], 3, 1, 4, *block[middle:]]
    if edit == "delete":
        return block[:middle] + block[middle + 3 :]
    return [-1, *block] if edit == "document" else block


def do(index: Any, operation: tuple[str, Any, Any], rows: np.ndarray | None = None) -> None:
    verb, what, how = operation
    if verb == "extend":
        feed(index, what, how, rows)
    elif verb == "copy" and len(index):
        start = int(what[0] * (len(index) - 1))
        feed(index, edited(index.tokens().tolist()[start : start + what[1]], how), True, rows)
    elif verb == "side":
        assert index.extend_side(ids([*what, -1]), VOCAB) == -1
    elif verb == "hint":
        index.hint(ids(what), cosines(len(what)))
    elif verb == "begin":
        index.begin(what)
    elif verb == "truncate":
        index.truncate(int(what * len(index)))
    elif verb in ("reset", "clear_side"):
        getattr(index, verb)()
