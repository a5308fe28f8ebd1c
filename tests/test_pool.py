"""Chunks that stay filled for later sequences: free all the same, and given up when room is needed."""

import pytest
import torch

from longgraft.cache import SequenceCache
from longgraft.config import GraftError
from longgraft.pool import ChunkPool, LayerShape

LAYERS = (LayerShape(2, 4, 4), LayerShape(1, 3, 5))


def make_pool(num_chunks: int = 6, side: int = 0) -> ChunkPool:
    return ChunkPool(LAYERS, num_chunks, torch.float32, chunk_rows=4, side=side)


def hold_all(pool: ChunkPool, count: int) -> list[int]:
    """Fill `count` chunks, hold and release them; a keeper gives them up in order."""
    chunks = pool.allocate(count)
    for chunk in chunks:
        pool.hold(chunk)
    pool.release(chunks)
    left = list(chunks)

    def give_up(wanted: int) -> int:
        gone = [left.pop(0) for _ in range(min(wanted, len(left)))]
        for chunk in gone:
            pool.drop(chunk)
        return len(gone)

    pool.keepers.append(give_up)
    return chunks


def test_held_chunks_count_as_free_and_go_last() -> None:
    pool = make_pool()
    held = hold_all(pool, 4)
    assert (pool.num_free, pool.num_idle, pool.check_integrity()) == (6, 4, "")
    assert not set(pool.allocate(2)) & set(held)
    assert pool.allocate(3) == held[:3]
    assert (pool.num_free, pool.num_idle, pool.check_integrity()) == (1, 1, "")
    with pytest.raises(GraftError, match="2 chunks of 4 rows needed, 1 of 6 free"):
        pool.allocate(2)
    assert pool.is_held(held[3]) and pool.num_free == 1


def test_a_held_chunk_can_be_shared_again() -> None:
    pool = make_pool()
    held = hold_all(pool, 2)
    pool.share(held)
    assert (pool.num_free, pool.num_idle) == (4, 0)
    assert len(pool.allocate(4)) == 4 and all(map(pool.is_held, held))
    pool.release(held)
    assert (pool.num_free, pool.num_idle, pool.check_integrity()) == (2, 2, "")


def test_several_keepers_are_asked_in_turn() -> None:
    pool = make_pool()
    hold_all(pool, 3)
    hold_all(pool, 3)
    assert len(pool.allocate(5)) == 5
    assert (pool.num_free, pool.num_idle) == (1, 1)


def test_misuse_is_refused() -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match="expected one in use"):
        pool.hold(0)
    (chunk,) = pool.allocate(1)
    with pytest.raises(ValueError, match="is not held"):
        pool.drop(chunk)
    pool.hold(chunk)
    with pytest.raises(ValueError, match="is free or held"):
        pool.hold(chunk)


def test_warm_chunks_are_those_written_before() -> None:
    pool = make_pool()
    assert pool.num_warm == 0
    pool.release(pool.allocate(4)[:3])
    assert pool.num_warm == 3
    assert len(pool.allocate(5)) == 5 and pool.num_warm == 0


def test_side_rows_are_part_of_a_chunk() -> None:
    pool = make_pool(side=7)
    assert pool.bytes_per_chunk == make_pool().bytes_per_chunk + 4 * 7 * 4
    assert pool.side is not None and pool.side.shape == (24, 7)
    assert [len(pool.rows_of(0, 2)), len(pool.rows_of(0, 2, is_side=True))] == [4, 5]


def filled(pool: ChunkPool, rows: int) -> SequenceCache:
    cache = SequenceCache(pool)
    cache.reserve(rows)
    for layer, shape in enumerate(LAYERS):
        values = torch.arange(rows, dtype=torch.float32).reshape(-1, 1, 1)
        cache.write(
            layer,
            values.repeat(1, shape.kv_heads, shape.key_dim),
            values.repeat(1, shape.kv_heads, shape.value_dim),
        )
    cache.keep(range(rows))
    return cache


def test_side_rows_are_known_up_to_a_gap() -> None:
    pool = make_pool(side=2)
    cache = filled(pool, 10)
    rows = torch.arange(20.0).reshape(10, 2)
    cache.write_side(1, rows[1:4])
    cache.write_side(4, rows[4:6])
    assert cache.side_rows == (1, 6)
    assert torch.equal(cache.read_side(2, 6), rows[2:6])
    cache.write_side(8, rows[8:])
    assert cache.side_rows == (8, 10)
    for first, last in ((7, 9), (8, 11), (9, 8)):
        with pytest.raises(ValueError, match="only 8 to 10 are known"):
            cache.read_side(first, last)
    twin = cache.fork()
    twin.reserve(1)
    assert torch.equal(twin.read_side(8, 10), rows[8:])
    cache.truncate(9)
    assert cache.side_rows == (8, 9) and torch.equal(cache.read_side(8, 9), rows[8:9])
    cache.truncate(3)
    assert cache.side_rows == (3, 3)


def test_a_cache_without_side_rows_takes_none() -> None:
    cache = filled(make_pool(), 5)
    cache.write_side(0, torch.zeros(5, 2))
    assert cache.side_rows == (0, 0)
    with pytest.raises(ValueError, match="only 0 to 0 are known"):
        cache.read_side(0, 1)


def test_nobody_writes_into_a_held_chunk() -> None:
    """A fork writes behind what its source left; where that is held, it writes into a copy."""
    pool = make_pool()
    cache = filled(pool, 6)
    twin = cache.fork()
    pool.hold(cache.chunks[1])
    cache.release()
    twin.reserve(1)
    assert not pool.is_held(twin.chunks[1]) and twin.check_integrity() == ""
    assert (pool.num_idle, pool.check_integrity()) == (1, "")


def test_attach_shares_whole_chunks_and_copies_an_end() -> None:
    pool = make_pool()
    cache = filled(pool, 7)
    pool.share(cache.chunks)
    twin = SequenceCache(pool)
    twin.attach(cache.chunks, 2, 3)
    assert (twin.length, twin.side_rows, twin.rows_moved) == (6, (3, 6), 2)
    assert twin.chunks[0] == cache.chunks[0] and twin.chunks[1] != cache.chunks[1]
    assert [pool.references(chunk) for chunk in cache.chunks] == [2, 1]
    assert torch.cat([keys for keys, _ in twin.runs(0)])[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="2 chunks are held"):
        twin.attach([], 0)
    twin.release()
    cache.release()
    assert pool.num_free == 6


def test_attach_without_room_changes_nothing() -> None:
    pool = make_pool(2)
    cache = filled(pool, 7)
    pool.share(cache.chunks)
    twin = SequenceCache(pool)
    with pytest.raises(GraftError, match="1 chunks of 4 rows needed, 0 of 2 free"):
        twin.attach(cache.chunks, 2)
    assert (twin.chunks, twin.length, [pool.references(chunk) for chunk in cache.chunks]) == ((), 0, [2, 2])


def test_before_release_is_called_once_and_release_happens_whatever_it_does() -> None:
    pool, calls = make_pool(), []
    cache = filled(pool, 5)

    def call() -> None:
        calls.append(cache.length)
        raise RuntimeError("no")

    cache.before_release = call
    with pytest.raises(RuntimeError, match="no"):
        cache.release()
    cache.release()
    assert (calls, pool.num_free) == ([5], 6)
