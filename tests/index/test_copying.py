"""Copies that survive edits, in readable text, native and twin alike; and the twin's parts alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from longgraft.index.copying import MAX_PAIRS, Copy, Step, Substitutions, add_nearby, follow_copy, longest_of
from longgraft.index.features import BASES
from longgraft.index.places import ELSEWHERE, NOWHERE, Found, Library
from tests.index.learnt import NO_PATH, VOCAB, draft, feed, ids, make, probabilities, weights_with
from tests.index.texts import KINDS

kinds = pytest.mark.parametrize("native", KINDS)
WORDS = "def foo ( a , b ) : x = a + b return if y > 0 else z * 2 # bar baz qux NL lost . ; for in".split()
LIKELY = weights_with(substitution=6.0, at_source=6.0)
LIKELY[BASES["substitution"] + 5 : BASES["substitution"] + 8] = 0.0  # what was replaced is as likely as any


def words(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def source_of(index: Any) -> int:
    return int(index.copy()[0])


SOURCE = words("# def foo ( a ) : y = foo ( b ) NL if x > 0 : return foo ( z ) else foo ( y ) . ;")


@kinds
def test_a_copy_is_followed(native: bool) -> None:
    index = make(native, SOURCE, weights=LIKELY)
    feed(index, SOURCE[:5])
    source, run, lost, *_ = index.copy()
    assert (source, lost) == (5, 0)
    assert run >= 2
    nodes = draft(index, 6, threshold=0.01)
    assert nodes.token_ids[0] == SOURCE[5]
    assert nodes.places[0] == 5


@kinds
def test_a_pointer_resumes_after_an_edit(native: bool) -> None:
    """Two new words instead of one: the next word of the source is proposed though nothing matches before it."""
    index = make(native, SOURCE, weights=LIKELY)
    feed(index, SOURCE[:9])
    feed(index, words("qux"))
    _, _, lost, left, since, *_ = index.copy()
    assert (lost, left, since) == (1, 9, len(SOURCE) + 9)
    tokens, lens, places, _, _ = index.options(NO_PATH, None)
    resumed = {int(place): int(n) for place, n in zip(places, lens)}
    assert resumed[10] == 0  # the word after the one that was replaced
    assert SOURCE[10] in tokens
    feed(index, SOURCE[10:14])
    assert source_of(index) == 14
    assert index.copy()[2] == 0


@kinds
def test_a_substitution_is_proposed_the_second_time(native: bool) -> None:
    """foo became bar once; where the copy comes to foo again, bar is proposed, and behind it the copy goes on."""
    index = make(native, SOURCE, weights=LIKELY)
    renamed = [words("bar")[0] if t == words("foo")[0] else t for t in SOURCE]
    first, second, third, _ = (i for i, t in enumerate(SOURCE) if t == words("foo")[0])
    feed(index, renamed[:first])
    assert words("bar")[0] not in probabilities(index)
    assert index.num_pairs == 0
    feed(index, renamed[first:second])
    assert index.num_pairs == 1
    assert source_of(index) == second
    p = probabilities(index)
    assert p[words("bar")[0]] > 0.3
    nodes = draft(index, 12, threshold=0.01)
    node = nodes.token_ids.index(words("bar")[0])
    assert (node, nodes.parents[node]) in ((0, -1), (1, -1))  # it or what it replaced comes first
    after = [t for t, parent in zip(nodes.token_ids, nodes.parents) if parent == node]
    assert SOURCE[second + 1] in after  # behind the new word the copy goes on
    feed(index, renamed[second:third])
    assert (source_of(index), index.num_pairs) == (third, 1)
    assert index.copy()[2] == 0


@kinds
def test_longer_substitutions_are_written_to_their_end(native: bool) -> None:
    index = make(native, SOURCE, weights=LIKELY)
    old, new = words("foo"), words("lost . qux")
    renamed = [t for token in SOURCE for t in (new if [token] == old else [token])]
    second = [i for i, t in enumerate(renamed) if t == new[0]][1]
    feed(index, renamed[: second + 1])
    assert index.copy()[5] >= 0  # a pair is being written
    for written in (1, 2):
        p = probabilities(index, new[1:written])
        assert max(p, key=p.__getitem__) == new[written]
    feed(index, renamed[second + 1 : second + 3])
    assert index.copy()[5] == -1
    assert index.tokens()[source_of(index)] == words("(")[0]


@kinds
def test_a_sentinel_is_no_part_of_a_substitution(native: bool) -> None:
    """What a document that ended in the middle of a copy was replaced by is nothing to propose."""
    index = make(native, SOURCE, weights=LIKELY)
    feed(index, [*SOURCE[:6], -1, *SOURCE[7:14]])
    feed(index, [*SOURCE[:6], 30, -1, *SOURCE[7:14], *SOURCE[:6]])
    assert -1 not in index.options(NO_PATH, None)[0]
    assert -1 not in draft(index, 40, threshold=1e-6).token_ids


@kinds
def test_a_token_is_not_its_own_source(native: bool) -> None:
    """(b y -> y x) was written once; in "b b b y" the pointer stands one token back, so a broken-off second time ends
    at the end of the text, where every token would look like a copy of itself."""
    index = make(native, words("def foo b y a : x NL"), weights=LIKELY)
    feed(index, words("def foo y x a :"))
    assert index.num_pairs == 1
    feed(index, words("b b b b b b y"))
    assert index.copy()[5] == 0
    for token in words("lost qux baz for"):
        feed(index, [token])
        assert source_of(index) == NOWHERE
        assert index.copy()[1] == 0


@kinds
def test_a_far_jump_keeps_the_place_left(native: bool) -> None:
    filler = [i % 5 + 30 for i in range(300)]
    index = make(native, [*SOURCE, *filler, *words("bar baz qux lost ; . in for")], weights=LIKELY)
    feed(index, SOURCE[:8])
    feed(index, words("bar baz qux lost ;"))
    assert source_of(index) == len(SOURCE) + 300 + 5
    assert abs(index.copy()[7] - 8) <= 2


@kinds
def test_side_texts_are_copied_and_forgotten(native: bool) -> None:
    index = make(native, words("NL"), weights=LIKELY)
    assert index.extend_side(ids(SOURCE), VOCAB) == -1
    feed(index, SOURCE[:6])
    assert source_of(index) == ELSEWHERE + 6
    assert draft(index, 4).places[0] == ELSEWHERE + 6
    index.clear_side()
    assert (source_of(index), index.side_len) == (NOWHERE, 0)
    assert all(place < ELSEWHERE for place in index.options(NO_PATH, None)[2])


def library(own: Sequence[int]) -> Library:
    texts = Library()
    for token in own:
        texts.own.append(token)
    return texts


def test_longest_then_newest() -> None:
    assert longest_of({}) == longest_of({4: 0, 9: 0}) == (NOWHERE, 0)
    assert longest_of({4: 2, 9: 3, 7: 3, 12: 1}) == (9, 3)


def test_pairs_lose_what_both_sides_share() -> None:
    texts = library([1, 2, 3, 4, 5, 0, 1, 2, 9, 4, 5])
    pairs = Substitutions(texts)
    pairs.add(0, 5, 6, 5)
    pair = pairs.find(2)
    assert pair is not None
    assert (pair.source, pair.source_len, pair.written, pair.written_len) == (2, 1, 8, 1)
    pairs.add(1, 3, 7, 3)
    assert (len(pairs), pair.hits) == (1, 2)
    assert pairs.find(2, 9) is pair
    assert pairs.find(2, 4) is pairs.find(1) is pairs.find(-1) is pairs.find(99) is None


@pytest.mark.parametrize("what", [(0, 0, 3, 1), (0, 1, 3, 0), (0, 9, 3, 1), (-1, 1, 3, 1), (0, 2, 0, 2), (5, 3, 0, 1)])
def test_what_is_no_substitution(what: tuple[int, int, int, int]) -> None:
    pairs = Substitutions(library([1, 2, 3, 4, 5, 6, 7]))
    pairs.add(*what)
    assert len(pairs) == 0


def test_pairs_of_one_token_are_few_and_all_are_bounded() -> None:
    texts = library([1, *range(2, 3 + MAX_PAIRS)])
    pairs = Substitutions(texts)
    for written in range(1, 7):
        pairs.add(0, 1, written, 1)
    assert [pairs.find(0, t) is not None for t in range(2, 8)] == [False, False, True, True, True, True]
    newest = pairs.find(0)
    assert newest is not None
    assert texts.at(newest.written) == 7
    for source in range(1, MAX_PAIRS):
        pairs.add(source, 1, 0, 1)
        assert len(pairs) <= MAX_PAIRS
    assert pairs.find(0) is None


def test_nearby_places_follow_the_same_token() -> None:
    texts = library([7, 1, 7, 2, 7, 3] + [0] * 400 + [7, 4])
    found: Found = {}
    add_nearby(texts, Copy(source=3, lost=1), [7], found)
    assert found == {1: 1, 3: 1, 5: 1, 4: 0}
    found = {}
    add_nearby(texts, Copy(), [7], found)
    assert found == {}


def test_a_lost_copy_rejoins_the_nearest_of_equal_matches() -> None:
    texts = library([1, 2, 3, 4, 5, 6] * 3)
    step = Step(texts, length=18, committed=False)
    lost = Copy(source=8, left=8, lost=2, since=10)
    after = follow_copy(Substitutions(texts), lost, 9, {4: 3, 10: 3, 16: 3}, step)
    assert (after.source, after.lost) == (10, 0)
    assert lost.source == 8
