"""What caps and limits do: counts under a capped walk, the most tokens, and no memory left."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.index import reference, suffix_automaton
from longgraft.index.reference import Automaton
from longgraft.index.suffix_automaton import MAX_TOKENS, SuffixAutomaton
from tests.index.texts import KINDS, NATIVE_MODULE, QUICK, both, de_bruijn, fibonacci, texts, thue_morse


class Uncapped(Automaton):
    """Credits every suffix and remembers the states that a capped walk would once have missed."""

    def __init__(self, cap: int) -> None:
        super().__init__()
        self.cap = cap
        self.missed: set[int] = set()

    def _target_of_length(self, p: int, token: int) -> int:
        q = self.edges[p][token]
        target = super()._target_of_length(p, token)
        if q in self.missed:
            self.missed.add(target)
        return target

    def _credit(self, size: int) -> None:
        p, walked = self.links[self.last], 0
        self.match_len, self.match_end = self.lengths[p], self.ends[p]
        while p != 0:
            self.counts[p] += 1
            self.ends[p] = size
            if walked >= self.cap:
                self.missed.add(p)
            p, walked = self.links[p], walked + 1


def ends_of(tokens: list[int], automaton: Automaton, state: int) -> list[int]:
    """By looking: every end of the state's longest string."""
    length, end = automaton.lengths[state], automaton.ends[state]
    known = tokens[end - length : end]
    return [e for e in range(length, len(tokens) + 1) if tokens[e - length : e] == known]


@pytest.mark.parametrize("cap", [1, 3, 64])
@QUICK
@given(st.one_of(texts, st.sampled_from([fibonacci(90), thue_morse(80), de_bruijn(70), [0] * 80])))
def test_counts_and_ends_are_exact_within_the_cap(cap: int, tokens: list[int]) -> None:
    """... and where a walk ever stopped short of a state, its count is too low and its end is an earlier one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "WALK_CAP", cap)
        capped, full = Automaton(), Uncapped(cap)
        for token in tokens:
            capped.append(token)
            full.append(token)
    assert capped.links == full.links
    for state in range(1, len(full.links)):
        text = tokens[full.ends[state] - full.lengths[state] : full.ends[state]]
        if -1 not in text:
            ends = ends_of(tokens, full, state)
            assert (full.counts[state], full.ends[state]) == (len(ends), ends[-1])
            assert 1 <= capped.counts[state] <= len(ends)
            assert capped.ends[state] in ends
        if state not in full.missed:
            assert (capped.counts[state], capped.ends[state]) == (full.counts[state], full.ends[state])


@both
@pytest.mark.parametrize("make", [fibonacci, thue_morse, de_bruijn, lambda n: [0] * n, lambda n: [0, 1, 1] * (n // 3)])
def test_native_caps_as_the_twin_does(make: object) -> None:
    tokens = make(1500)  # type: ignore[operator]
    native, twin = SuffixAutomaton(native=True), SuffixAutomaton(native=False)
    native.extend(tokens)
    twin.extend(tokens)
    np.testing.assert_array_equal(native.states(), twin.states())


@both
def test_a_million_fibonacci_tokens_are_linear() -> None:
    automaton = SuffixAutomaton(native=True)
    automaton.extend(np.array(fibonacci(1_000_000), np.int32))
    assert automaton.steps <= 70_000_000
    assert automaton.memory_bytes <= 160 * 1_000_000
    assert automaton.check_integrity() == ""


@pytest.mark.parametrize("native", KINDS)
def test_too_many_tokens_are_refused(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    automaton = SuffixAutomaton(native=native)
    automaton.extend([1, 2, 1])
    many = np.broadcast_to(np.int32(0), (MAX_TOKENS - 2,))
    with pytest.raises(GraftError, match=f"expected at most {MAX_TOKENS - 3}, the room left of {MAX_TOKENS}"):
        automaton.extend(many)
    monkeypatch.setattr(suffix_automaton, "MAX_TOKENS", 5)
    automaton.extend([1, 2])
    with pytest.raises(GraftError, match="expected at most 0"):
        automaton.extend([1])
    assert automaton.tokens().tolist() == [1, 2, 1, 1, 2]


@both
def test_limit_is_the_same() -> None:
    assert NATIVE_MODULE.MAX_TOKENS == MAX_TOKENS


@pytest.mark.parametrize("ragged", [[[1], [1, 2]], "text", None, [None], [1 + 2j], {1: 2}])
def test_what_is_no_row_of_integers_is_one_error(ragged: object) -> None:
    with pytest.raises(GraftError, match="token ids"):
        SuffixAutomaton().extend(ragged)  # type: ignore[arg-type]


@both
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits address space as Linux does")
def test_no_memory_is_one_error_and_an_empty_index() -> None:
    code = (
        "import resource, numpy as np\n"
        "from longgraft.config import GraftError\n"
        "from longgraft.index.suffix_automaton import SuffixAutomaton\n"
        "automaton = SuffixAutomaton(native=True)\n"
        "text = np.random.default_rng(0).integers(0, 2, 1_200_000).astype(np.int32)\n"
        "automaton.extend(text[:1000])\n"
        "pages = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "for spare in (20, 70):\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (pages + spare * 2**20,) * 2 if spare == 70 else\n"
        "                       (pages + spare * 2**20, resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        for start in range(0, 1_200_000, 250_000):\n"
        "            automaton.extend(text[start : start + 250_000])\n"
        "    except GraftError as error:\n"
        "        assert 'no memory for' in str(error), error\n"
        "        assert len(automaton) == 0\n"
        "    else:\n"
        "        raise SystemExit('never ran out')\n"
        "    automaton.extend([1, 2, 1])\n"
        "    assert automaton.draft(4).token_ids[0] == 2 and automaton.check_integrity() == ''\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
