"""One sequence's index: sources, origins, successor rows, doors."""

from __future__ import annotations

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.index.base import Retriever
from longgraft.index.context_index import ContextIndex
from longgraft.tree import Continuation, Source


def first(found: Continuation | None) -> tuple[int, int, tuple[int, int], int]:
    assert found is not None
    return (
        int(found.token_ids[0]),
        int(found.sources[0]),
        (int(found.origins[0, 0]), int(found.origins[0, 1])),
        int(found.match_lens[0]),
    )


def test_is_a_retriever() -> None:
    index: Retriever = ContextIndex(10)
    assert index.draft(4) is None
    assert index.check_integrity() == ""


def test_sources_tell_prompt_from_history() -> None:
    index = ContextIndex(50)
    index.extend([1, 2, 3, 4, 9, 1, 2, 3])
    assert first(index.draft(4)) == (4, Source.PROMPT, (0, 3), 3)
    index.extend([7, 8, 1, 2, 3], learn=True)
    assert index.prompt_len == 8
    found = index.draft(30)
    assert found is not None
    node = int(np.flatnonzero((found.token_ids == 7) & (found.parents == -1))[0])
    assert (found.sources[node], found.origins[node].tolist()) == (Source.HISTORY, [0, 8])
    assert first(index.draft(4, [4])) == (9, Source.PROMPT, (0, 4), 4)


def test_begin_marks_the_end_of_the_prompt() -> None:
    index = ContextIndex(50)
    index.extend([1, 2, 3])
    index.begin()
    index.extend([9, 1, 2, 3])
    assert index.prompt_len == 3
    assert first(index.draft(1)) == (9, Source.HISTORY, (0, 3), 3)
    index.begin(5)
    assert first(index.draft(1))[1] == Source.PROMPT


def test_nothing_matches_across_documents() -> None:
    index = ContextIndex(50)
    index.extend([1, 2, 3, -1, 4, 5, -1, 2, 3])
    found = index.draft(20)
    assert found is not None
    assert not np.any(found.match_lens[found.parents == -1] == 2)
    assert -1 not in found.token_ids
    index.extend([-1])
    found = index.draft(20)
    assert found is None or not np.any(found.match_lens[found.parents == -1])


def test_successors_speak_where_nothing_matches() -> None:
    index = ContextIndex(50)
    index.extend([1, 2, 3])
    index.observe([3, 30], [[30, 0, 31], [0, 32, 33]])
    found = index.draft(12)
    assert found is not None
    roots = found.token_ids[found.parents == -1].tolist()
    assert {30, 0, 31} <= set(roots)
    node = found.token_ids.tolist().index(30)
    assert (found.sources[node], found.origins[node].tolist()) == (Source.SUCCESSOR, [-1, -1])
    below = found.token_ids[found.parents == node].tolist()
    assert {0, 32} <= set(below)  # the row of 30
    index.observe([3], [[7]])
    again = index.draft(12)
    assert again is not None
    assert 7 in again.token_ids[again.parents == -1]
    assert 30 not in again.token_ids


def test_match_and_successor_of_one_token_are_one_node() -> None:
    index = ContextIndex(50)
    index.extend([1, 2, 3, 1, 2])
    index.observe([2], [[3, 4]])
    found = index.draft(20)
    assert found is not None
    roots = found.token_ids[found.parents == -1].tolist()
    assert sorted(set(roots)) == sorted(roots)
    assert first(found)[:2] == (3, Source.PROMPT)


def test_path_and_place() -> None:
    index = ContextIndex(50)
    index.extend([1, 2, 3, 4, 5, 1])
    found = index.draft(3, [2, 3], at=17)
    assert first(found) == (4, Source.PROMPT, (0, 3), 3)
    assert found is not None
    assert found.at == 17
    assert len(index) == 6


def test_budget_and_threshold() -> None:
    index = ContextIndex(50, threshold=0.2)
    index.extend([1, 2, 3, 4] * 10)
    found = index.draft(5)
    assert found is not None
    assert len(found.token_ids) <= 5
    assert np.all(found.scores >= np.log(0.2) - 1e-6)
    assert index.draft(0) is None


def test_truncate_and_reset() -> None:
    index, short = ContextIndex(50), ContextIndex(50)
    for made in (index, short):
        made.extend([1, 2, 3, 1, 2])
        made.begin()
    index.extend([9, 9, 1, 2])
    index.truncate(5)
    ours, theirs = index.draft(9), short.draft(9)
    assert ours is not None
    assert theirs is not None
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_array_equal(ours.scores, theirs.scores)
    index.truncate(3)
    assert index.prompt_len == 3
    assert index.check_integrity() == ""
    index.observe([1], [[2]])
    assert index.memory_bytes > short.memory_bytes
    index.reset()
    assert len(index) == index.prompt_len == 0
    assert index.draft(9) is None
    assert index.successors.rows is None


def test_bad_ids_are_one_sentence() -> None:
    index = ContextIndex(50)
    with pytest.raises(GraftError, match="token id 50 at place 1: expected 0 to 49"):
        index.extend([1, 50])
    with pytest.raises(GraftError, match="-2"):
        index.extend([-2])
    with pytest.raises(GraftError, match="path"):
        index.draft(3, [50])
    with pytest.raises(GraftError, match="vocab_size"):
        ContextIndex(0)
    assert len(index) == 0


def test_integrity_names_what_is_broken() -> None:
    index = ContextIndex(50)
    index.extend([1, 2])
    index.begin(3)
    assert "prompt length 3" in index.check_integrity()


def test_pieces_of_one_document_and_texts_of_one_name() -> None:
    index = ContextIndex(50)
    newlines = np.zeros(50, np.uint8)
    newlines[7] = 1
    number = index.add_text("a", [1, 7, 2, 3], Source.CORPUS, offset=10, line=5)
    assert index.add_text("a", [7, 9], Source.CORPUS, offset=20, line=8, document=number) == number
    other = index.add_text("a", [7, 7, 4], Source.DOCUMENT)
    assert other != number and index.documents == ["", "a", "a"]
    asked = [(number, 10), (number, 11), (number, 12), (number, 21), (other, 2), (number, 14), (other, 3), (9, 0)]
    assert index.lines_of(asked, newlines) == [5, 5, 6, 9, 3, 0, 0, 0]
    assert index.fed_len == 6
    held = index.memory_bytes
    index.clear_fed()
    assert index.fed_len == 0 and index.documents == ["", "a", "a"] and index.memory_bytes <= held
    assert index.lines_of(asked, newlines) == [0, 0, 0, 0, 3, 0, 0, 0]


def test_a_text_that_is_refused_leaves_nothing() -> None:
    index = ContextIndex(50)
    with pytest.raises(GraftError, match="token id 50"):
        index.add_text("a", [50], Source.DOCUMENT)
    with pytest.raises(GraftError, match="document is 3"):
        index.add_text("a", [1], Source.DOCUMENT, document=3)
    assert index.documents == [""] and index.check_integrity() == ""
