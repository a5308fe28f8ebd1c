"""Shared answers: bounded, by tenant, least recently used first."""

from __future__ import annotations

from longgraft.history import History


def test_one_tenant_never_sees_another() -> None:
    history = History(100)
    history.add("a", [1, 2, 3])
    history.add("b", [4, 5])
    assert history.of("a") == [(1, 2, 3)]
    assert history.of("b") == [(4, 5)]
    assert history.of("c") == []
    history.forget("a")
    assert history.of("a") == [] and history.num_tokens == 2


def test_least_recently_used_answers_go_first() -> None:
    history = History(10)
    for first in (10, 20, 30):
        history.add("a", range(first, first + 3))
    assert history.num_tokens == 9
    history.add("b", [1, 2])
    assert [answer[0] for answer in history.of("a")] == [20, 30]
    history.of("b")
    history.add("b", [7] * 6)  # room for it is made by the two of "a", used longer ago
    assert history.of("a") == []
    assert history.num_tokens == 8


def test_the_same_answer_is_kept_once_and_a_long_one_by_its_end() -> None:
    history = History(4)
    history.add("a", [1, 2])
    history.add("a", [1, 2])
    assert history.num_tokens == 2
    history.add("a", range(10))
    assert history.of("a") == [(6, 7, 8, 9)]
    history.add("a", [])
    assert history.num_tokens == 4


def test_no_room_keeps_nothing() -> None:
    history = History(0)
    history.add("a", [1])
    assert history.of("a") == [] and history.num_tokens == 0
