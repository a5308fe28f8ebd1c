"""The chunk pool and one sequence's rows, against lists in plain Python."""

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from longgraft.cache import ChunkPool, LayerShape, SequenceCache
from longgraft.config import GraftError

LAYERS = (LayerShape(2, 4, 4), LayerShape(1, 3, 5), LayerShape(2, 4, 4))


def make_pool(num_chunks: int = 12, chunk_rows: int = 4) -> ChunkPool:
    return ChunkPool(LAYERS, num_chunks, torch.float32, chunk_rows=chunk_rows)


def rows_of(layer: int, tags: list[int]) -> tuple[Tensor, Tensor]:
    """Keys and values that tell their tag and layer in every element."""
    shape, column = LAYERS[layer], torch.tensor(tags, dtype=torch.float32).reshape(-1, 1, 1) * 10 + layer
    return column.repeat(1, shape.kv_heads, shape.key_dim), -column.repeat(1, shape.kv_heads, shape.value_dim)


def write(cache: SequenceCache, tags: list[int]) -> None:
    for layer in range(len(LAYERS)):
        cache.write(layer, *rows_of(layer, tags))


def append(cache: SequenceCache, tags: list[int]) -> None:
    cache.reserve(len(tags))
    write(cache, tags)
    cache.keep(range(len(tags)))


def read(cache: SequenceCache, layer: int = 0) -> list[int]:
    """The tags of the prefix; every element of every row must agree."""
    runs = cache.runs(layer)
    keys = torch.cat([k for k, _ in runs]) if runs else torch.zeros(0, 1, 1)
    tags = [round((float(row.flatten()[0]) - layer) / 10) for row in keys]
    want_keys, want_values = rows_of(layer, tags)
    if runs:
        assert torch.equal(keys, want_keys)
        assert torch.equal(torch.cat([v for _, v in runs]), want_values)
    return tags


class CacheMachine(RuleBasedStateMachine):
    """Sequences that share one small pool, each beside the list of tags it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.sequences: list[tuple[SequenceCache, list[int]]] = [(SequenceCache(self.pool), [])]
        self.next_tag = 1

    def pick(self, data: st.DataObject) -> tuple[SequenceCache, list[int]]:
        return self.sequences[data.draw(st.integers(0, len(self.sequences) - 1), label="sequence")]

    @rule(data=st.data(), rows=st.integers(0, 9))
    def a_round(self, data: st.DataObject, rows: int) -> None:
        cache, model = self.pick(data)
        before = (cache.chunks, cache.length, self.pool.num_free)
        try:
            cache.reserve(rows)
        except GraftError:
            assert (cache.chunks, cache.length, self.pool.num_free) == before
            return
        assert cache.check_integrity() == ""
        tags = list(range(self.next_tag, self.next_tag + rows))
        self.next_tag += rows
        write(cache, tags)
        moved = cache.rows_moved
        path = data.draw(st.lists(st.integers(0, max(rows - 1, 0)), unique=True, max_size=rows), label="path")
        cache.keep(path)
        assert cache.rows_moved - moved == sum(row != place for place, row in enumerate(path))
        model += [tags[row] for row in path]

    @rule(data=st.data(), rows=st.integers(0, 9))
    def an_abandoned_round(self, data: st.DataObject, rows: int) -> None:
        cache, _ = self.pick(data)
        if -(-rows // 4) + 1 < self.pool.num_free:
            cache.reserve(rows)
            write(cache, [9999] * rows)
            cache.truncate(cache.length)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        cache, model = self.pick(data)
        length = data.draw(st.integers(0, len(model)), label="length")
        cache.truncate(length)
        del model[length:]

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, model = self.pick(data)
        free = self.pool.num_free
        self.sequences.append((cache.fork(), list(model)))
        assert self.pool.num_free == free

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cache, model = self.pick(data)
        cache.release()
        model.clear()

    @invariant()
    def every_sequence_holds_its_rows(self) -> None:
        for cache, model in self.sequences:
            assert cache.length == len(model)
            assert [read(cache, layer) for layer in range(len(LAYERS))] == [model] * len(LAYERS)

    @invariant()
    def books_balance(self) -> None:
        assert self.pool.check_integrity() == ""
        assert [cache.check_integrity() for cache, _ in self.sequences] == [""] * len(self.sequences)
        held = Counter(chunk for cache, _ in self.sequences for chunk in cache.chunks)
        assert [self.pool.references(chunk) for chunk in range(12)] == [held[chunk] for chunk in range(12)]
        for cache, model in self.sequences:
            assert len(cache.chunks) == -(-len(model) // 4)

    def teardown(self) -> None:
        for cache, _ in self.sequences:
            cache.release()
        assert self.pool.num_free == 12


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=25, derandomize=True)
TestCache = CacheMachine.TestCase


def test_equal_layers_share_one_allocation() -> None:
    pool = make_pool()
    assert pool.keys[0].shape == (48, 2, 4)
    assert pool.values[1].shape == (48, 1, 5)
    assert pool.keys[0].untyped_storage().data_ptr() == pool.keys[2].untyped_storage().data_ptr()
    assert pool.keys[0].untyped_storage().data_ptr() != pool.keys[1].untyped_storage().data_ptr()
    assert pool.bytes_per_chunk == 4 * 4 * (2 * (8 + 8) + 3 + 5)


def test_one_sequence_is_one_run() -> None:
    pool = make_pool()
    cache = SequenceCache(pool)
    for start in range(0, 44, 11):
        append(cache, list(range(start, start + 11)))
    ((keys, values),) = cache.runs(0)
    assert keys.shape == (44, 2, 4)
    assert keys.data_ptr() == pool.keys[0].data_ptr()
    assert values.data_ptr() == pool.values[0].data_ptr()


def test_sequences_that_grow_in_turns_stay_whole() -> None:
    pool = make_pool(num_chunks=32)
    caches = [SequenceCache(pool) for _ in range(3)]
    for step in range(6):
        for number, cache in enumerate(caches):
            append(cache, [number * 100 + step] * 4)
    assert [len(cache.runs(0)) for cache in caches] == [1, 1, 1]


def test_fragments_are_runs_in_order() -> None:
    pool = make_pool(num_chunks=6)
    plugs = [SequenceCache(pool) for _ in range(6)]
    for plug in plugs:
        append(plug, [0])
    for plug in sorted(plugs, key=lambda plug: plug.chunks)[::2]:
        plug.release()
    cache = SequenceCache(pool)
    append(cache, list(range(1, 11)))
    assert sorted(cache.chunks) == [0, 2, 4]
    assert [len(keys) for keys, _ in cache.runs(0)] == [4, 4, 2]
    assert read(cache, 1) == list(range(1, 11))


def test_reserved_rows_can_be_read_behind_the_prefix() -> None:
    cache = SequenceCache(make_pool())
    append(cache, [1, 2, 3])
    cache.reserve(3)
    write(cache, [4, 5, 6])
    ((keys, _),) = cache.runs(0, reserved=2)
    assert torch.equal(keys, rows_of(0, [1, 2, 3, 4, 5])[0])
    assert read(cache) == [1, 2, 3]
    with pytest.raises(ValueError, match="4 reserved rows asked for, 3"):
        cache.runs(0, reserved=4)


def test_a_round_moves_no_more_rows_when_the_context_is_long() -> None:
    pool = make_pool(num_chunks=64, chunk_rows=8)
    moved = []
    for length in (3, 333):
        cache = SequenceCache(pool)
        append(cache, list(range(length)))
        where = cache.chunks
        cache.reserve(16)
        write(cache, list(range(1000, 1016)))
        cache.keep([0, 1, 7, 15])
        moved.append(cache.rows_moved)
        assert read(cache) == [*range(length), 1000, 1001, 1007, 1015]
        assert cache.chunks[: len(where)] == where
    assert moved == [2, 2]


def test_a_fork_copies_the_partial_chunk_only_and_only_when_written() -> None:
    pool = make_pool()
    parent = SequenceCache(pool)
    append(parent, list(range(10)))
    child = parent.fork()
    assert (child.rows_moved, pool.num_free) == (0, 9)
    append(child, [77])
    assert (child.rows_moved, pool.num_free) == (2, 8)
    assert child.chunks[:2] == parent.chunks[:2]
    append(parent, [88])
    assert parent.rows_moved == 0
    assert (read(parent), read(child)) == ([*range(10), 88], [*range(10), 77])


def test_exhaustion_is_one_sentence_and_changes_nothing() -> None:
    pool = make_pool(num_chunks=3)
    cache = SequenceCache(pool)
    append(cache, list(range(10)))
    twin = cache.fork()
    with pytest.raises(GraftError, match="1 chunks of 4 rows needed, 0 of 3 free: raise kv_bytes by 640"):
        twin.reserve(1)
    assert (twin.chunks, twin.reserved, read(twin)) == (cache.chunks, 0, list(range(10)))
    cache.release()
    append(twin, [10])
    assert read(twin) == list(range(11))


def test_writing_is_checked() -> None:
    cache = SequenceCache(make_pool())
    keys, values = rows_of(0, [1, 2, 3])
    cache.reserve(2)
    with pytest.raises(ValueError, match=r"layer 0: keys are .* 2 are reserved"):
        cache.write(0, keys, values)
    with pytest.raises(ValueError, match="layer 1: keys are"):
        cache.write(1, keys[:2], values[:2])
    with pytest.raises(ValueError, match=r"values are \[1, 2, 4\]: expected 2 rows"):
        cache.write(0, keys[:2], values[:1])
    with pytest.raises(ValueError, match=r"torch.float64, the cache holds torch.float32"):
        cache.write(0, keys[:2].double(), values[:2].double())


def test_written_rows_do_not_keep_a_graph() -> None:
    cache = SequenceCache(make_pool())
    keys, values = (x.requires_grad_() for x in rows_of(0, [1]))
    cache.reserve(1)
    cache.write(0, keys, values)
    assert not cache.pool.keys[0].requires_grad


def test_misuse_is_refused() -> None:
    cache = SequenceCache(make_pool())
    append(cache, [1, 2, 3])
    cache.reserve(2)
    with pytest.raises(ValueError, match="fork between rounds"):
        cache.fork()
    for path in ([0, 0], [2], [-1]):
        with pytest.raises(ValueError, match="expected different rows below 2"):
            cache.keep(path)
    with pytest.raises(ValueError, match="cannot truncate 3 rows to 4"):
        cache.truncate(4)
    with pytest.raises(ValueError, match="expected 0 or more"):
        cache.reserve(-1)
    with pytest.raises(ValueError, match="expected 1 or more"):
        ChunkPool([], 1, torch.float32)


def test_the_pool_refuses_to_count_free_chunks() -> None:
    pool = make_pool()
    (chunk,) = pool.allocate(1)
    pool.share([chunk])
    pool.release([chunk, chunk])
    with pytest.raises(ValueError, match="is free already"):
        pool.release([chunk])
    with pytest.raises(ValueError, match="expected one in use"):
        pool.share([chunk])


def test_integrity_says_what_is_wrong() -> None:
    pool = make_pool()
    cache = SequenceCache(pool)
    append(cache, list(range(6)))
    pool.num_free += 1
    assert pool.check_integrity() == "10 chunks are free, num_free says 11"
    cache.length = 9
    assert cache.check_integrity() == "2 chunks cannot hold 9 rows"
    cache.length = 6
    cache.reserve(1)
    pool.share(cache.chunks[1:])
    assert cache.check_integrity() == "reserved rows lie in a shared chunk"
    pool.release([*cache.chunks, cache.chunks[1]])
    assert cache.check_integrity() == "a chunk in use is free in the pool"
