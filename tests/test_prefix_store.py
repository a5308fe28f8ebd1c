"""Held chunks by their text, against texts in plain Python: rows are a function of the tokens up to them."""

from __future__ import annotations

import zlib
from collections import Counter
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import longgraft.prefix_store as prefix_store
from longgraft.cache import SequenceCache
from longgraft.config import GraftError
from longgraft.pool import ChunkPool, LayerShape
from longgraft.prefix_entry import Entry, common, name_of, within
from longgraft.prefix_spill import Spill
from longgraft.prefix_store import PrefixStore

LAYERS = (LayerShape(2, 2, 2), LayerShape(1, 3, 1))
SIZE, CHUNKS = 4, 9
SPILL = 5000  # bytes: about three chunks' files
ROOTS = (b"one", b"other")


def row_of(root: bytes, tokens: list[int], row: int) -> float:
    """What stands in row `row` of a text: depends on the root and on all tokens up to it."""
    return float(zlib.crc32(root + bytes(tokens[: row + 1])) % 1_000_003)


def column(root: bytes, tokens: list[int], first: int) -> torch.Tensor:
    rows = [row_of(root, tokens, row) for row in range(first, len(tokens))]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 1, 1)


def append(cache: SequenceCache, root: bytes, tokens: list[int], *, has_side: bool = True) -> None:
    """Compute the rows of `tokens` that the cache does not hold."""
    first = cache.length
    values = column(root, tokens, first)
    cache.reserve(len(values))
    for layer, shape in enumerate(LAYERS):
        cache.write(
            layer, values.repeat(1, shape.kv_heads, shape.key_dim), -values.repeat(1, shape.kv_heads, shape.value_dim)
        )
    cache.keep(range(len(values)))
    if has_side and len(values):
        cache.write_side(first, values[:, 0] + 1)


def holds(cache: SequenceCache, root: bytes, tokens: list[int]) -> bool:
    want = column(root, tokens, 0)[:, 0, 0].tolist()
    for layer in range(len(LAYERS)):
        runs = cache.runs(layer)
        keys = [float(row.flatten()[0]) for key, _ in runs for row in key]
        values = [-float(row.flatten()[0]) for _, value in runs for row in value]
        if not keys == values == want:
            return False
    begin, end = cache.side_rows
    known = [] if begin == end else (cache.read_side(begin, end)[:, 0] - 1).tolist()
    return known == want[begin:end]


def make(chunks: int = CHUNKS) -> PrefixStore:
    return PrefixStore(ChunkPool(LAYERS, chunks, torch.float64, chunk_rows=SIZE, side=1))


def array(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def opened(store: PrefixStore, root: bytes, tokens: list[int], live: tuple[Entry, ...] = (), grid: int = 1):
    """A cache that begins with what is there of a text, and how many rows those were."""
    cache = SequenceCache(store.pool)
    match = store.find(root, array(tokens), live, grid)
    cache.attach(match.chunks, match.rows % SIZE, match.side_begin)
    return cache, match.rows


def kept(store: PrefixStore, root: bytes, tokens: list[int], **options: bool) -> None:
    """Compute a text from nothing and leave it in the store."""
    cache = SequenceCache(store.pool)
    append(cache, root, tokens, **options)
    store.publish(root, array(tokens), cache, len(tokens), has_end=True)
    cache.release()


class StoreMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet come, grow, fork and go; some of the store's chunks go to disk and back."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make()
        self.folder = TemporaryDirectory()
        self.spill = Spill(self.folder.name, SPILL, self.store.pool)
        self.store.on_drop, self.store.restore = self.spill.put, self.spill.restore
        self.running: list[tuple[SequenceCache, bytes, list[int]]] = []

    def tokens(self, data: st.DataObject, most: int) -> list[int]:
        return data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), max_size=most), label="tokens")

    def ends(self) -> list[Entry]:
        """The unfinished chunks of running sequences."""
        found = []
        for cache, root, tokens in self.running:
            name, full = root, len(tokens) // SIZE
            for index in range(full):
                name = name_of(name, array(tokens[index * SIZE : (index + 1) * SIZE]))
            if len(tokens) % SIZE:
                side = within(cache.side_rows, full, SIZE)
                found.append(Entry(b"", name, array(tokens[full * SIZE :]), cache.chunks[full], side))
        return found

    @precondition(lambda self: len(self.running) < 3)
    @rule(data=st.data(), root=st.sampled_from(ROOTS), grid=st.sampled_from([1, 1, 2, 3, 4, 8]), has_side=st.booleans())
    def come(self, data: st.DataObject, root: bytes, grid: int, has_side: bool) -> None:
        tokens = self.tokens(data, 14)
        free = self.store.pool.num_free
        try:
            cache, rows = opened(self.store, root, tokens, tuple(self.ends()), grid)
        except GraftError:
            assert free == 0 or self.store.pool.num_free == 0
            self.leak_nothing()
            return
        assert rows % grid == 0 and holds(cache, root, tokens[:rows])
        try:
            append(cache, root, tokens, has_side=has_side)
        except GraftError:
            cache.release()
            return
        self.store.publish(root, array(tokens), cache, len(tokens))
        self.running.append((cache, root, tokens))

    def leak_nothing(self) -> None:
        """A copy that finds no room leaves references behind: the engine asks for room before."""
        held = Counter(chunk for cache, _, _ in self.running for chunk in cache.chunks)
        pool = self.store.pool
        for chunk in range(CHUNKS):
            pool.release([chunk] * (pool.references(chunk) - held[chunk]))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        cache, root, tokens = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        longer = tokens + self.tokens(data, 5)
        try:
            append(cache, root, longer)
        except GraftError:
            return
        tokens[:] = longer

    @precondition(lambda self: 0 < len(self.running) < 3)
    @rule()
    def fork(self) -> None:
        cache, root, tokens = self.running[0]
        self.running.append((cache.fork(), root, list(tokens)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_published=st.booleans())
    def go(self, data: st.DataObject, is_published: bool) -> None:
        cache, root, tokens = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if is_published:
            self.store.publish(root, array(tokens), cache, len(tokens), has_end=True)
        cache.release()

    @rule()
    def clear(self) -> None:
        if not self.running:
            self.store.clear()

    @invariant()
    def every_sequence_holds_its_rows(self) -> None:
        assert all(holds(*one) for one in self.running)

    @invariant()
    def books_balance(self) -> None:
        pool = self.store.pool
        assert pool.check_integrity() == "" and self.store.check_integrity() == ""
        assert [cache.check_integrity() for cache, _, _ in self.running] == [""] * len(self.running)
        held = Counter(chunk for cache, _, _ in self.running for chunk in cache.chunks)
        assert [pool.references(chunk) for chunk in range(CHUNKS)] == [held[chunk] for chunk in range(CHUNKS)]
        assert len(self.store) <= CHUNKS and self.spill.num_bytes <= SPILL
        names = {entry.name for entry in self.store._entries.values()}
        assert all(entry.parent in names or entry.parent in ROOTS for entry in self.store._entries.values())

    def teardown(self) -> None:
        for cache, _, _ in self.running:
            cache.release()
        assert self.store.pool.num_free == CHUNKS
        self.store.clear()
        assert self.store.pool.num_idle == 0
        self.spill.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=25, derandomize=True)
TestStore = StoreMachine.TestCase

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def test_whole_chunks_and_an_end_are_found() -> None:
    store = make()
    kept(store, b"r", TEXT)
    for text, rows in ((TEXT, 11), (TEXT[:10], 10), (TEXT[:8], 8), ([*TEXT[:6], 0, 0], 6), ([0], 0), ([], 0)):
        cache, found = opened(store, b"r", text)
        assert (found, holds(cache, b"r", text[:rows])) == (rows, True)
        assert cache.side_rows == (0, rows)
        cache.release()
    assert store.pool.num_free == CHUNKS and store.check_integrity() == ""


def test_another_root_finds_nothing() -> None:
    store = make()
    kept(store, b"r", TEXT)
    assert opened(store, b"s", TEXT)[1] == 0


@pytest.mark.parametrize("grid, rows", [(1, 11), (2, 10), (3, 9), (4, 8), (5, 10), (8, 8), (12, 0)])
def test_rows_beyond_the_grid_are_left_out(grid: int, rows: int) -> None:
    store = make()
    kept(store, b"r", TEXT)
    cache, found = opened(store, b"r", TEXT, grid=grid)
    assert found == rows and holds(cache, b"r", TEXT[:rows])
    cache.release()
    assert store.pool.num_free == CHUNKS


def test_equal_names_of_different_texts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a broken hash reuses nothing wrong."""
    monkeypatch.setattr(prefix_store, "name_of", lambda parent, token_ids: b"always the same")
    store = make()
    kept(store, b"r", TEXT)
    cache, found = opened(store, b"r", [7, 7, 7, 7, 7])
    assert found == 0
    append(cache, b"r", [7, 7, 7, 7, 7])
    store.publish(b"r", array([7] * 5), cache, 5)
    assert holds(cache, b"r", [7] * 5)
    cache.release()
    assert store.pool.check_integrity() == ""


def test_two_that_computed_the_same_share_it_afterwards() -> None:
    store = make()
    first, second = SequenceCache(store.pool), SequenceCache(store.pool)
    for cache in (first, second):
        append(cache, b"r", TEXT)
    for cache in (first, second):
        store.publish(b"r", array(TEXT), cache, len(TEXT))
    assert first.chunks[:2] == second.chunks[:2] and first.chunks[2] != second.chunks[2]
    assert holds(first, b"r", TEXT) and holds(second, b"r", TEXT)
    assert store.pool.num_free == CHUNKS - 4 and store.check_integrity() == ""


def test_a_longer_end_takes_the_place_of_a_shorter_one() -> None:
    store = make()
    for length in (9, 11, 10, 12):
        kept(store, b"r", TEXT[:length] if length < 12 else [*TEXT, 8])
        assert len(store) == 3 and store.check_integrity() == ""
    assert opened(store, b"r", [*TEXT, 8])[1] == 12


def test_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    store = make(6)
    kept(store, b"r", TEXT[:8])
    kept(store, b"s", TEXT[:8])
    opened(store, b"r", TEXT[:8])[0].release()
    store.pool.release(store.pool.allocate(3))
    assert [opened(store, root, TEXT[:8])[1] for root in (b"r", b"s")] == [8, 4]
    assert store.num_dropped == 1 and store.check_integrity() == ""


def test_what_is_in_use_stays() -> None:
    store = make(4)
    kept(store, b"r", TEXT[:8])
    cache, _ = opened(store, b"r", TEXT[:8])
    assert len(store.pool.allocate(2)) == 2
    with pytest.raises(GraftError, match="0 of 4 free"):
        store.pool.allocate(1)
    assert holds(cache, b"r", TEXT[:8])


def test_a_match_that_fails_gives_back_what_it_took() -> None:
    store = make()
    kept(store, b"r", TEXT[:8])

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    store.restore = broken
    with pytest.raises(KeyboardInterrupt):
        store.find(b"r", array(TEXT[:8] + [0] * 4), (), 1)
    assert store.pool.num_free == CHUNKS


def test_rows_without_side_rows_say_so() -> None:
    store = make()
    kept(store, b"r", TEXT[:4], has_side=False)
    cache, _ = opened(store, b"r", TEXT)
    assert cache.side_rows == (4, 4)
    append(cache, b"r", TEXT)
    store.publish(b"r", array(TEXT), cache, len(TEXT), has_end=True)
    cache.release()
    again, rows = opened(store, b"r", TEXT)
    assert (rows, again.side_rows) == (11, (4, 11))


def test_common_and_within() -> None:
    assert common(array([1, 2, 3]), array([1, 2, 4, 5])) == 2
    assert common(array([1, 2]), array([1, 2, 4])) == 2
    assert common(array([]), array([1])) == 0
    assert [within((3, 9), index, 4) for index in range(4)] == [(3, 4), (0, 4), (0, 1), (0, 0)]
