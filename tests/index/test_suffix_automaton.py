"""The automaton against oracles that share no code with it; its work, its counts and its doors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.index import rank
from longgraft.index.native import native_module
from longgraft.index.reference import scan_match, suffix_array_match
from longgraft.index.suffix_automaton import Options, SuffixAutomaton
from tests.index.texts import (
    KINDS,
    QUICK,
    TEXTS,
    both,
    de_bruijn,
    fibonacci,
    long_period,
    noisy_copy,
    successor_rows,
    texts,
    thue_morse,
)


@pytest.mark.parametrize("native", KINDS)
@QUICK
@given(texts)
def test_match_equals_scan(native: bool, tokens: list[int]) -> None:
    automaton = SuffixAutomaton(native=native)
    for end, token in enumerate(tokens, 1):
        automaton.extend([token])
        assert automaton.match() == scan_match(tokens[:end])


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=40))
def test_scan_equals_suffix_array(tokens: list[int]) -> None:
    pytest.importorskip("pysuffixarray")
    assert scan_match(tokens) == suffix_array_match(tokens)


def listed_by_scan(tokens: list[int], path: list[int]) -> list[tuple[int, int, int]]:
    """(token, match_len, origin) in listing order, by looking at every occurrence of every suffix."""
    size, context = len(tokens), tokens + path
    listed: list[tuple[int, int, int]] = []
    level: set[int] = set()
    levels = 0
    for length in range(len(context), 0, -1):
        suffix = context[-length:]
        if -1 in suffix:
            continue
        ends = {end for end in range(length, size + 1) if tokens[end - length : end] == suffix}
        if not ends or ends == level or (not path and ends == {size}):
            continue  # never, a longer one with the same ends, or the text's own end alone
        level, levels = ends, levels + 1
        if levels > rank.MAX_LEVELS:
            break
        followers: dict[int, list[int]] = {}
        for end in sorted(ends - {size}):
            if tokens[end] >= 0:
                followers.setdefault(tokens[end], []).append(end)
        known = {token for token, _, _ in listed}
        order = sorted(followers.keys() - known, key=lambda t: (-len(followers[t]), -followers[t][-1]))
        listed += [(token, length, followers[token][-1]) for token in order]
    return listed[: rank.MAX_MATCHES]


@pytest.mark.parametrize("native", KINDS)
@QUICK
@given(
    st.one_of(
        st.lists(st.integers(-1, 4), max_size=50),
        st.builds(noisy_copy, st.integers(0, 10**6), st.integers(1, 80), st.integers(1, 9)),
    ),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_list_equals_scan(native: bool, tokens: list[int], path: list[int]) -> None:
    automaton = SuffixAutomaton(native=native)
    automaton.extend(tokens)
    found = automaton.options(path)
    matched = int(np.sum(found.match_lens > 0))
    columns = (found.token_ids, found.match_lens, found.origins)
    assert list(zip(*(column[:matched].tolist() for column in columns))) == listed_by_scan(tokens, path)
    assert not np.any(found.match_lens[matched:])


@pytest.mark.parametrize("native", KINDS)
@QUICK
@given(texts, st.lists(st.integers(0, 30), max_size=4))
def test_every_node_followed_a_real_match(native: bool, tokens: list[int], path: list[int]) -> None:
    automaton = SuffixAutomaton(native=native)
    automaton.extend(tokens)
    nodes = automaton.draft(60, path, 1e-4)
    contexts: list[list[int]] = []
    pairs = set()
    for token, parent, length, origin in zip(*(a.tolist() for a in nodes[:2] + nodes[3:5])):
        context = tokens + path if parent < 0 else contexts[parent]
        contexts.append([*context, token])
        assert tokens[origin] == token
        assert length == 0 or tokens[origin - length : origin] == context[len(context) - length :]
        assert length == 0 or -1 not in context[len(context) - length :]
        pairs.add((parent, token))
    assert len(pairs) == len(nodes.token_ids)
    assert np.all(np.diff(nodes.scores) <= 0)


@pytest.mark.parametrize("native", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_probabilities_add_up_to_at_most_one(native: bool, name: str) -> None:
    automaton = SuffixAutomaton(native=native)
    automaton.extend(TEXTS[name], learn=True)
    options = automaton.options(successors=successor_rows(300))
    assert 0 <= options.probabilities.sum() < 1
    assert len(set(options.token_ids.tolist())) == len(options.token_ids)


@pytest.mark.parametrize("native", KINDS)
def test_draft_is_the_likeliest_part_of_the_full_tree(native: bool) -> None:
    automaton = SuffixAutomaton(native=native)
    automaton.extend(TEXTS["copies"])
    full = automaton.draft(300, (), 1e-3)
    for budget in (1, 5, 33):
        part = automaton.draft(budget, (), 1e-3)
        for x, y in zip(part, full):
            np.testing.assert_array_equal(x, y[:budget])
    above = automaton.draft(300, (), 0.05)
    assert len(above.scores) == int(np.sum(np.exp(full.scores.astype(np.float64)) >= 0.05))
    assert len(automaton.draft(0).token_ids) == 0


@pytest.mark.parametrize("native", KINDS)
def test_path_equals_commit(native: bool) -> None:
    """Drafting after a path proposes what drafting after committing it does, but for the path's own ends."""
    text = TEXTS["copies of many"]
    ahead, committed = SuffixAutomaton(native=native), SuffixAutomaton(native=native)
    ahead.extend(text[:-3])
    committed.extend(text)
    longest = committed.options().match_lens[0]
    assert longest == ahead.options(text[-3:]).match_lens[0]
    assert ahead.options(text[-3:]).token_ids[0] == committed.options().token_ids[0]


class TestLinearWork:
    N = 1 << 15

    @both
    @pytest.mark.parametrize(
        "make",
        [
            lambda n: [0] * n,
            lambda n: [0, 1] * (n // 2),
            lambda n: list(range(50)) * (n // 50),
            fibonacci,
            lambda n: [i % 97 if i % 3 else 0 for i in range(n)],
            lambda n: list(range(n)),
            lambda n: np.random.default_rng(0).integers(0, 2, n).tolist(),
            lambda n: ([0] * 200 + [1]) * (n // 201),
            lambda n: ([0, -1] * 3 + [1, 1]) * (n // 8),
            thue_morse,
            de_bruijn,
            long_period,
            lambda n: [t for i in range(n // 4) for t in (8, 7, 10 + i, 7)],
        ],
        ids=(
            "constant,period 2,period 50,fibonacci,mixed,distinct,binary,runs,documents,thue-morse,de bruijn,"
            "long period,wide".split(",")
        ),
    )
    def test_steps_are_linear(self, make: Callable[[int], list[int]]) -> None:
        """At most the credit walk (64) and the classic bound (3 transitions, 2 links) a token."""
        automaton = SuffixAutomaton(native=True)
        tokens = make(self.N)
        automaton.extend(tokens)
        assert automaton.steps <= (rank.WALK_CAP + 6) * len(tokens)
        assert automaton.memory_bytes <= 250 * len(tokens) + 400_000

    @both
    def test_a_million_equal_tokens(self) -> None:
        automaton = SuffixAutomaton(native=True)
        automaton.extend(np.zeros(1_000_000, np.int32))
        assert automaton.match() == (999_999, 999_999)
        assert automaton.steps <= 70_000_000
        nodes = automaton.draft(32, [0, 0, 5, 0])
        assert nodes.token_ids[:3].tolist() == [0, 0, 0]

    @both
    def test_real_like_text_is_small(self) -> None:
        automaton = SuffixAutomaton(native=True)
        automaton.extend(noisy_copy(3, self.N, 5000))
        fixed = SuffixAutomaton(native=True).memory_bytes
        assert automaton.memory_bytes - fixed <= 100 * self.N


class TestCounts:
    @QUICK
    @given(texts)
    def test_counts_exact_or_too_low(self, tokens: list[int]) -> None:
        automaton = SuffixAutomaton(native=False)
        automaton.extend(tokens)
        a = automaton._index.automaton
        for state in range(1, len(a.links)):
            text = tokens[a.ends[state] - a.lengths[state] : a.ends[state]]
            shortest = a.lengths[a.links[state]] + 1
            known = text[len(text) - shortest :]
            true = sum(tokens[e - shortest : e] == known for e in range(shortest, len(tokens) + 1))
            assert a.counts[state] <= true
            if -1 not in known:
                assert a.counts[state] == true or len(tokens) > rank.WALK_CAP

    def test_cap_makes_counts_too_low_not_wrong(self) -> None:
        automaton = SuffixAutomaton(native=False)
        automaton.extend([0] * 500)
        a = automaton._index.automaton
        state = a.edges[0][0]
        assert 1 <= a.counts[state] < 500
        assert a.counts[a.links[a.last]] == 2


class TestDoors:
    @pytest.mark.parametrize("native", KINDS)
    def test_bad_tokens_change_nothing(self, native: bool) -> None:
        automaton = SuffixAutomaton(10, native=native)
        automaton.extend([0, 9, 0])
        for bad in ([1, 10], [-2], [2**31], np.array([2**32 + 1])):
            with pytest.raises(GraftError, match="token id"):
                automaton.extend(bad)
        with pytest.raises(GraftError, match="place 1"):
            automaton.extend([1, 10])
        with pytest.raises(GraftError, match="path"):
            automaton.draft(4, [-1])
        with pytest.raises(GraftError, match="float"):
            automaton.extend([0.5])
        with pytest.raises(GraftError, match="shape"):
            automaton.extend([[1, 2]])
        assert automaton.tokens().tolist() == [0, 9, 0]

    @pytest.mark.parametrize("native", KINDS)
    def test_bad_requests(self, native: bool) -> None:
        automaton = SuffixAutomaton(native=native)
        automaton.extend([1, 2, 1])
        with pytest.raises(GraftError, match="truncate"):
            automaton.truncate(4)
        with pytest.raises(GraftError, match="threshold"):
            automaton.draft(4, (), 0.0)
        automaton.extend([])
        assert len(automaton) == 3
        automaton.reset()
        assert len(automaton) == 0
        assert automaton.match() == (0, 0)
        assert len(automaton.draft(8).token_ids) == 0

    def test_fallback_says_so_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        native_module.cache_clear()
        monkeypatch.setitem(sys.modules, "longgraft.index._native", None)
        try:
            with pytest.warns(RuntimeWarning, match="without its native index"):
                first = SuffixAutomaton()
            assert not first.is_native
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                second = SuffixAutomaton()
            second.extend([1, 2, 1])
            assert second.match() == (1, 1)
            with pytest.raises(GraftError, match="compiler"):
                SuffixAutomaton(native=True)
        finally:
            native_module.cache_clear()

    def test_imports_with_numpy_alone(self) -> None:
        code = (
            "import sys\n"
            "for name in ('torch', 'transformers', 'rich', 'typer', 'faiss', 'pysuffixarray'):\n"
            "    sys.modules[name] = None\n"
            "from longgraft.index.context_index import ContextIndex\n"
            "index = ContextIndex(100)\n"
            "index.extend([5, 6, 7, 5, 6])\n"
            "print(index.draft(4).token_ids[0])\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "7"


def test_options_name_their_fields() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([4, 5, 6, 4, 5])
    options = automaton.options()
    assert isinstance(options, Options)
    assert options.token_ids[0] == 6
    assert options.match_lens[0] == 2
    assert options.origins[0] == 2
