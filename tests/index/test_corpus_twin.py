"""Sorting and searching suffix arrays: native, twin, a scan and pysuffixarray agree."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.index import corpus_twin
from longgraft.index.corpus_pages import PAGE_BYTES, page_sums
from tests.index.corpus_cases import NATIVE, QUICK, arrays_of, each_kind, lookup, scan, searcher
from tests.index.texts import TEXTS, texts

both = pytest.mark.skipif(NATIVE is None, reason="needs the native module")
documents = st.lists(
    st.one_of(
        st.lists(st.integers(0, 1), min_size=1, max_size=40),
        st.lists(st.integers(0, 3), min_size=1, max_size=60),
        st.builds(lambda unit, n: unit * n, st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=4,
)
contexts = st.lists(st.integers(0, 4), max_size=40)


def sorted_by(kind: Any, tokens: list[int]) -> list[int]:
    array = np.array(tokens, np.int32)
    ends = np.empty_like(array)
    kind.sort_ends(array, ends)
    return [int(end) for end in ends]


def by_definition(tokens: list[int]) -> list[int]:
    """Sort ends by what stands before them; a context ends at a sentinel, at the start or after 32 tokens."""

    def key(end: int) -> tuple[list[int], int]:
        found = []
        for place in range(end - 1, max(-1, end - 1 - corpus_twin.DEPTH), -1):
            if tokens[place] == -1:
                break
            found.append(tokens[place])
        return found, end

    return sorted(range(1, len(tokens) + 1), key=key)


@each_kind
@pytest.mark.parametrize("name", TEXTS)
def test_order_of_hard_texts(kind: Any, name: str) -> None:
    assert sorted_by(kind, TEXTS[name]) == by_definition(TEXTS[name])


@each_kind
@QUICK
@given(texts)
def test_order(kind: Any, tokens: list[int]) -> None:
    assert sorted_by(kind, tokens) == by_definition(tokens)


@each_kind
def test_order_of_sparse_and_largest_ids(kind: Any) -> None:
    tokens = [2**31 - 2, 5, 2**31 - 2, 2**31 - 1, 5, -1, 2**31 - 1, 5, 70_000, 5] * 3
    assert sorted_by(kind, tokens) == by_definition(tokens)


@both
@pytest.mark.parametrize("seed", range(3))
def test_native_order_is_the_twins_on_longer_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    piece = rng.integers(0, 500, 2000).astype(np.int32)
    tokens = np.concatenate([piece, piece[100:1900], rng.integers(-1, 30, 3000), piece, np.zeros(500)]).astype(np.int32)
    assert sorted_by(NATIVE, tokens.tolist()) == sorted_by(corpus_twin, tokens.tolist())


@each_kind
@QUICK
@given(st.lists(documents, min_size=1, max_size=3), contexts)
def test_lookup_is_what_a_scan_finds(kind: Any, segments: list[list[list[int]]], context: list[int]) -> None:
    made = searcher(kind, segments)
    wanted_len, wanted_ends = scan(segments, context)
    match_len, count, ends = lookup(made, context)
    assert (match_len, count) == (wanted_len, len(wanted_ends))
    assert sorted(ends) == wanted_ends
    few = lookup(made, context, limit=3)
    assert few[:2] == (match_len, count) and len(few[2]) == min(3, count) == len(set(few[2]))
    assert set(few[2]) <= set(wanted_ends)
    assert lookup(made, context, min_match=wanted_len + 1) == (0, 0, [])


@both
@QUICK
@given(st.lists(documents, min_size=1, max_size=3), contexts, st.integers(0, 5))
def test_native_picks_what_the_twin_picks(segments: list[list[list[int]]], context: list[int], limit: int) -> None:
    answers = [lookup(searcher(kind, segments), context, 1, limit) for kind in (NATIVE, corpus_twin)]
    assert answers[0] == answers[1]


@each_kind
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["copies", "fibonacci", "twice", "period 7", "periods broken"])
def test_lookup_is_what_pysuffixarray_finds(kind: Any, name: str) -> None:
    from pysuffixarray.core import SuffixArray

    tokens = TEXTS[name][:200]
    made = searcher(kind, [[tokens]])
    letters = {token: chr(37 + i) for i, token in enumerate(sorted(set(tokens)))}
    text = "".join(letters[token] for token in tokens)
    array = SuffixArray(text)
    for begin in range(0, 150, 7):
        for length in (1, 3, 9):
            part = text[begin : begin + length]
            starts = [start for start in array.match(part) if start >= 0]
            match_len, count, ends = lookup(made, tokens[begin : begin + length])
            assert match_len == length and count == len(starts)
            assert sorted(ends) == sorted(start + length for start in starts)


@each_kind
def test_a_match_is_capped_and_ends_at_negative_tokens(kind: Any) -> None:
    made = searcher(kind, [[list(range(100))]])
    assert lookup(made, list(range(60))) == (32, 1, [60])
    assert lookup(made, [5, 6, -1, 7, 8]) == (2, 1, [9])
    assert lookup(made, [5, -1]) == lookup(made, []) == (0, 0, [])


@each_kind
def test_nothing_matches_across_documents(kind: Any) -> None:
    made = searcher(kind, [[[1, 2], [3, 4]], [[3, 1]]])
    assert lookup(made, [1, 2, 3]) == (1, 2, [7, 4])
    assert lookup(made, [2, 3, 4]) == (2, 1, [5])


@each_kind
def test_places_are_spread_over_documents_newest_segment_first(kind: Any) -> None:
    many, few = [[7, 8] * 40, [7, 8], [7, 8]], [[1, 7, 8]]
    match_len, count, ends = lookup(searcher(kind, [many, few]), [7, 8], limit=4)
    assert (match_len, count) == (2, 43)
    assert ends[0] == 81 + 3 + 3 + 3  # the newer segment's only one
    assert len(set(ends)) == 4
    assert lookup(searcher(kind, [many, few]), [7, 8], limit=0) == (2, 43, [])


@each_kind
def test_no_segments_find_nothing(kind: Any) -> None:
    assert lookup(kind.Segments(), [1, 2, 3]) == (0, 0, [])


@each_kind
@pytest.mark.parametrize("seed", range(40))
def test_garbage_with_the_right_checksums_is_read_safely(kind: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 2000))
    words = PAGE_BYTES // 4
    size = -(-n // words) * words
    high = [5, n + 2, 2**31 - 1][seed % 3]
    tokens, ends = rng.integers(-(2**31), 2**31, size) % 3 - 1, rng.integers(-2, high, size)
    data = np.concatenate([tokens, ends]).astype(np.int32).view(np.uint8)
    made = kind.Segments()
    starts = np.sort(rng.integers(0, n + 1, 5)).astype(np.int32)
    made.add(
        data,
        page_sums(data),
        np.zeros(len(data) // PAGE_BYTES, np.uint8),
        tokens_at=0,
        ends_at=4 * size,
        n=n,
        starts=starts,
    )
    for _ in range(5):
        match_len, count, found = lookup(made, rng.integers(0, 2, 20).tolist(), limit=20)
        out = np.zeros((3, 5), np.int32)
        assert made.follow(rng.integers(1, n + 1, 3), 2, out)[0] in (0, -1) and out.min() >= -1 and out.max() <= 1
        assert (match_len == -1 and count == 0 and found == []) or all(1 <= end <= n for end in found)


@both
def test_the_native_checksum_is_zlibs() -> None:
    rng = np.random.default_rng(0)
    for n in [*range(30), 4095, 4096, 5000]:
        data = rng.integers(0, 256, n).astype(np.uint8)
        assert NATIVE.crc32(data) == zlib.crc32(data.data)
    assert (NATIVE.DEPTH, NATIVE.PAGE_BYTES) == (corpus_twin.DEPTH, PAGE_BYTES)


@both
def test_arrays_that_do_not_fit_are_refused() -> None:
    data, starts = np.zeros(8192, np.uint8), np.array([0, 5], np.int32)
    sums, checked = page_sums(data), np.zeros(2, np.uint8)
    for tokens_at, ends_at, n in ((0, 4096, 1025), (8192, 0, 1), (-4, 0, 1), (2, 4096, 1), (0, 4096, 2**31)):
        with pytest.raises(ValueError, match="do not fit"):
            NATIVE.Segments().add(data, sums, checked, tokens_at=tokens_at, ends_at=ends_at, n=n, starts=starts)
    with pytest.raises(ValueError, match="do not fit"):
        NATIVE.Segments().add(data, sums[:1], checked, tokens_at=0, ends_at=4096, n=1, starts=starts)
    with pytest.raises(ValueError, match="do not fit"):
        NATIVE.Segments().add(data, sums, checked, tokens_at=0, ends_at=4096, n=1, starts=starts[:1])
    with pytest.raises(ValueError, match="outside the segments"):
        searcher(NATIVE, [[[1, 2]]]).follow(np.array([4]), 5, np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match="tokens below"):
        NATIVE.sort_ends(np.array([-2], np.int32), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="sizes"):
        NATIVE.sort_ends(np.array([1], np.int32), np.zeros(2, np.int32))


def test_documents_are_packed_with_sentinels() -> None:
    arrays = arrays_of([[1, 2], [3]])
    assert arrays.tokens.tolist() == [1, 2, -1, 3, -1]
    assert arrays.starts.tolist() == [0, 3, 5]
