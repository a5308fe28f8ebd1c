"""What the tests of baselines share: texts, and what every draft must keep to."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from longgraft.eval.baseline_draft import Drafter, IntArray, lists_of
from longgraft.eval.traces import Trace
from tests.index.texts import noisy_copy

QUICK = settings(deadline=None, max_examples=60, derandomize=True)
texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.builds(noisy_copy, st.integers(0, 10**6), st.integers(1, 120), st.integers(1, 20)),
    st.builds(lambda unit, n: unit * n, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 20)),
)


def ids(tokens: list[int]) -> IntArray:
    return np.array(tokens, np.int32)


def drafted(drafter: Drafter, tokens: list[int], budget: int, pieces: int = 1) -> tuple[list[int], list[int]]:
    """Feed `tokens` in pieces (the first one large) and return (tokens, parents) of the draft."""
    drafter.reset()
    cut = max(len(tokens) - pieces + 1, 0)
    drafter.extend(ids(tokens[:cut]))
    for token in tokens[cut:]:
        drafter.extend(ids([token]))
    return lists_of(drafter.draft(budget))


def assert_tree(token_ids: list[int], parents: list[int], budget: int) -> None:
    assert len(token_ids) == len(parents) <= budget
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert len(set(zip(parents, token_ids))) == len(token_ids)


def paths(token_ids: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Return the path from the context to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(token_ids, parents):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


def edited_copies(count: int, seed: int = 0) -> list[Trace]:
    """Outputs that copy their prompt with one token in ten replaced."""
    rng = np.random.default_rng(seed)
    traces = []
    for number in range(count):
        prompt = rng.integers(0, 60, 150)
        output = np.where(rng.random(150) < 0.1, rng.integers(0, 60, 150), prompt)
        tokens = np.concatenate([prompt, [60], output]).astype(np.int32)
        traces.append(Trace(f"family {number % 2}", f"repository {number % 4}", tokens, 151))
    return traces
