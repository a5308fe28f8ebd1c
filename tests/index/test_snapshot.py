"""Snapshots and marks: what they bring back is what was there; anything else is one error and changes nothing."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.index import snapshot
from longgraft.index.snapshot import Snapshot, pack, unpack
from longgraft.index.suffix_automaton import SuffixAutomaton
from tests.index.texts import KINDS, QUICK, TEXTS, assert_same_lists, both, noisy_copy, texts


def grown(native: bool, tokens: list[int], learnt: list[int] = []) -> SuffixAutomaton:  # noqa: B006
    automaton = SuffixAutomaton(1000, native=native)
    automaton.extend(tokens)
    automaton.extend(learnt, learn=True)
    return automaton


def assert_same(a: SuffixAutomaton, b: SuffixAutomaton) -> None:
    assert a.match() == b.match()
    np.testing.assert_array_equal(a.tokens(), b.tokens())
    np.testing.assert_array_equal(a.states(), b.states())
    for x, y in zip(a.learnt(), b.learnt()):
        np.testing.assert_array_equal(x, y)
    assert_same_lists(a, b, [], None)
    assert a.check_integrity() == b.check_integrity() == ""


@pytest.mark.parametrize("reader", KINDS)
@pytest.mark.parametrize("writer", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_snapshot_comes_back(writer: bool, reader: bool, name: str) -> None:
    tokens = TEXTS[name]
    before = grown(writer, tokens[:90], tokens[90:])
    data = before.snapshot()
    assert len(data) <= 4 * len(tokens) + 20 * 4240 + 32
    after = grown(reader, [5, 6, 7], [5, 6])
    after.restore(data)
    assert_same(after, before)
    for automaton in (before, after):
        automaton.extend([1, 2, 1], learn=True)
    assert_same(after, before)
    assert before.snapshot() == after.snapshot()


@QUICK
@given(st.data())
def test_damage_is_found(data: st.DataObject) -> None:
    """Any byte changed, any cut, any addition: an error and no change."""
    whole = grown(KINDS[-1], [1, 2, 3, 1, 2], [3, 1]).snapshot()
    place = data.draw(st.integers(0, len(whole) - 1))
    flip = data.draw(st.integers(1, 255))
    bad = [
        whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :],
        whole[:place],
        whole + b"x",
        data.draw(st.binary(max_size=80)),
    ]
    automaton = grown(KINDS[-1], [7, 8, 7])
    for wrong in bad:
        with pytest.raises(GraftError, match="snapshot"):
            automaton.restore(wrong)
    assert automaton.tokens().tolist() == [7, 8, 7]


def sealed(body: bytes) -> bytes:
    """Bytes with a right checksum, as a forger would write them."""
    return snapshot.HEAD.pack(snapshot.MAGIC, snapshot.VERSION, zlib.crc32(body)) + body


@pytest.mark.parametrize("native", KINDS)
def test_forged_snapshots_are_refused(native: bool) -> None:
    automaton = grown(native, [7, 8, 7])
    cells = len(automaton.learnt()[0])
    zero = np.zeros(cells)
    one = np.eye(1, cells)[0]
    forged = {
        "version 2": snapshot.HEAD.pack(snapshot.MAGIC, 2, 0) + bytes(40),
        "token id 1000": pack(Snapshot(np.array([1, 1000], np.int32), zero, zero)),
        "token id -2": pack(Snapshot(np.array([-2], np.int32), zero, zero)),
        "3 cells": pack(Snapshot(np.array([1], np.int32), np.zeros(3), np.zeros(3))),
        "between 0 and their trials": pack(Snapshot(np.array([1], np.int32), one, 2 * one)),
        "hits that are not": pack(Snapshot(np.array([1], np.int32), np.where(one > 0, np.inf, 0), one)),
        "names cells 9999 to 9999": sealed(struct.pack("<QII", 0, cells, 1) + struct.pack("<idd", 9999, 1.0, 0.0)),
        "names cells -1 to -1": sealed(struct.pack("<QII", 0, cells, 1) + struct.pack("<idd", -1, 1.0, 0.0)),
        "cut short": sealed(struct.pack("<QII", 2**62, cells, 0)),
        "4294967295|1048576 cells": sealed(struct.pack("<QII", 0, 2**32 - 1, 0)),
    }
    for says, data in forged.items():
        with pytest.raises(GraftError, match=says):
            automaton.restore(data)
    with pytest.raises(GraftError, match="str"):
        automaton.restore("text")  # type: ignore[arg-type]
    assert automaton.tokens().tolist() == [7, 8, 7]
    assert unpack(memoryview(automaton.snapshot())).token_ids.tolist() == [7, 8, 7]


@pytest.mark.parametrize("native", KINDS)
@QUICK
@given(texts, st.data())
def test_truncate_after_marks_equals_rebuild(native: bool, tokens: list[int], data: st.DataObject) -> None:
    """Whatever was marked, grown, truncated and marked before."""
    automaton = SuffixAutomaton(native=native)
    kept: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            automaton.mark()
        automaton.extend(tokens)
        kept += tokens
        if data.draw(st.booleans()):
            length = data.draw(st.integers(0, len(kept)))
            automaton.truncate(length)
            kept = kept[:length]
    built = SuffixAutomaton(native=native)
    built.extend(kept)
    assert_same(automaton, built)


@both
def test_marks_are_few_and_work() -> None:
    text = noisy_copy(5, 4000, 300)
    automaton = grown(True, text[:2000])
    plain = automaton.memory_bytes
    for end in range(2000, 4000, 100):
        automaton.mark()
        automaton.extend(text[end : end + 100])
    unmarked = grown(True, text)
    assert automaton.memory_bytes <= 3 * max(plain, unmarked.memory_bytes)
    before = automaton.steps
    automaton.truncate(3950)  # the latest mark lies at 3900
    assert automaton.steps < before
    assert_same(automaton, grown(True, text[:3950]))
    automaton.truncate(2010)  # only the earliest one is left
    assert_same(automaton, grown(True, text[:2010]))
    automaton.truncate(1999)
    assert_same(automaton, grown(True, text[:1999]))
    automaton.mark()
    automaton.reset()
    automaton.truncate(0)
    assert automaton.memory_bytes < plain
