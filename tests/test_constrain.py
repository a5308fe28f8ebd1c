"""Trees that a grammar constrains, with a scripted grammar: what goes, what comes, and what the rest is worth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.constrain import LEAST_PATH, constrain
from longgraft.tree import Source, TreeBuilder

EOS = 9


class Script:
    """A grammar of whole words over the digits 0-9: what may follow is what some word goes on with."""

    def __init__(self, *words: str) -> None:
        self.words = [[int(digit) for digit in word] for word in words]
        self.at: list[int] = []
        self.deepest = 0

    def _following(self) -> set[int]:
        n = len(self.at)
        return {word[n] for word in self.words if word[:n] == self.at and len(word) > n}

    def allows(self, token_id: int) -> bool:
        return token_id in self._following() - {EOS}

    def step(self, token_id: int) -> bool:
        if not self.allows(token_id):
            return False
        self.at.append(token_id)
        self.deepest = max(self.deepest, len(self.at))
        return True

    def back(self) -> None:
        self.at.pop()

    def forced(self) -> list[int]:
        found, start = list[int](), len(self.at)
        while len(following := self._following()) == 1 and following != {EOS}:
            self.at.append(following.pop())
            found.append(self.at[-1])
        del self.at[start:]
        return found


def tree(*paths: str, share: float = 0.5) -> TreeBuilder:
    """A tree of paths of digits; every node has `share` of its parent's probability."""
    builder = TreeBuilder(0)
    for path in paths:
        node = 0
        for depth, digit in enumerate(path):
            node = builder.add(node, int(digit), (depth + 1) * math.log(share), Source.PROMPT, (0, depth))
    return builder


def paths(builder: TreeBuilder) -> dict[str, float]:
    """Every node's path, and its probability."""
    found = dict[str, float]()
    for node in range(1, len(builder)):
        path, at = "", node
        while at:
            path, at = str(builder.token_ids[at]) + path, builder.parents[at]
        found[path] = math.exp(builder.scores[node])
    return found


def made(builder: TreeBuilder, script: Script, most: int = 10, max_depth: int = 10) -> dict[str, float]:
    found = paths(constrain(builder, script, most, max_depth))
    assert script.at == [], "the walker does not stand at the root again"
    return {path: pytest.approx(value) for path, value in found.items()}


def test_forbidden_nodes_go_with_all_below_and_their_share_goes_to_the_others() -> None:
    got = made(tree("12", "34", "31"), Script("31", "32", "4"))
    assert got == {"3": 1.0, "31": 1.0}
    assert made(tree("1", "2", share=0.4), Script("1", "3")) == {"1": 0.4 / 0.6}


def test_forced_runs_are_certain_and_their_siblings_go() -> None:
    assert made(TreeBuilder(0), Script("1234", "1235")) == {"1": 1.0, "12": 1.0, "123": 1.0}
    assert made(tree("5", "15", "12"), Script("123", "124")) == {"1": 1.0, "12": 1.0}


def test_forced_below_a_node_that_was_proposed() -> None:
    got = made(tree("1", "2", share=0.4), Script("134", "15", "267", "268"))
    assert got == {"1": 0.4, "2": 0.4, "26": 0.4}


def test_what_hangs_behind_forced_tokens_stays() -> None:
    assert made(tree("1235", "1237"), Script("1235", "1236"))["1235"] == pytest.approx(1.0)


def test_eos_is_never_visited() -> None:
    assert made(tree("19", "9", "12"), Script("19", "12", "9")) == {"1": 1.0, "12": 1.0}
    assert made(TreeBuilder(0), Script("19")) == {"1": 1.0}


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_no_more_forced_nodes_than_asked_for(most: int) -> None:
    assert len(made(TreeBuilder(0), Script("1234567"), most)) == most


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_no_deeper_than_allowed(depth: int) -> None:
    assert len(made(TreeBuilder(0), Script("1234567"), 10, depth)) == depth


def test_nothing_is_added_below_what_hardly_comes() -> None:
    share = math.exp(LEAST_PATH) / 2
    assert made(tree("1", share=share), Script("123", "2")) == {"1": share}


def test_sources_and_places() -> None:
    builder = TreeBuilder(0)
    builder.add(0, 1, -0.5, Source.PROMPT, (0, 17))
    node = builder.add(0, 2, -0.6, Source.DRAFT)
    builder.add(node, 3, -0.7, Source.DRAFT)
    forced = constrain(builder, Script("14"), 5, 5)
    assert forced.sources == [Source.ROOT, Source.PROMPT, Source.GRAMMAR] and forced.origins[1] == (0, 17)
    forced = constrain(builder, Script("23"), 5, 5)
    assert forced.sources == [Source.ROOT, Source.GRAMMAR, Source.GRAMMAR]
    free = constrain(builder, Script("1", "23", "24"), 0, 5)
    assert free.sources == [Source.ROOT, Source.PROMPT, Source.DRAFT, Source.DRAFT]


def test_a_walker_that_stops_leaves_a_tree() -> None:
    script = Script("1234")
    script.step = lambda token_id: False  # type: ignore[method-assign]
    assert paths(constrain(tree("12"), script, 9, 9)).keys() == {"1"}


def test_deep_chains_need_no_stack() -> None:
    word = "12" * 1500
    builder = tree(word, share=0.9999)
    assert len(constrain(builder, Script(word, "3"), 0, 5000)) == 3001


WORDS = st.text("123", min_size=1, max_size=6)


@settings(deadline=None, max_examples=200)
@given(st.lists(WORDS, min_size=1, max_size=5), st.lists(WORDS, max_size=6), st.integers(0, 8), st.integers(0, 7))
def test_all_that_is_left_is_allowed_and_nothing_allowed_is_lost(
    words: list[str], proposed: list[str], most: int, max_depth: int
) -> None:
    builder, script = tree(*proposed, share=0.3), Script(*words)
    got = constrain(builder, script, most, max_depth)
    assert script.at == []
    kept, allowed = paths(got), {word[:n] for word in words for n in range(1, len(word) + 1)}
    assert kept.keys() <= allowed
    assert paths(builder).keys() & allowed <= kept.keys()
    assert len(kept.keys() - paths(builder).keys()) <= most
    assert all(len(path) <= max_depth for path in kept.keys() - paths(builder).keys())
    got.build()  # its scores never grow along a path, each token hangs once from a parent
    assert all(got.scores[node] <= got.scores[got.parents[node]] for node in range(1, len(got)))
