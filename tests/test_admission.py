"""Who may run: the size of the KV pool, and the requests it refuses."""

from __future__ import annotations

import pytest
import torch

import longgraft.admission as admission
import longgraft.memory as memory
from longgraft.admission import (
    CHUNK_ROWS,
    FULL_REQUESTS,
    bytes_per_chunk,
    chunks_for,
    chunks_missing,
    pool_chunks,
    require_room,
)
from longgraft.cache import SequenceCache
from longgraft.config import EngineConfig, GraftError
from longgraft.memory import GIB, INDEX_BYTES_PER_TOKEN
from longgraft.target import Target
from tests.engines import model_of

CHUNK = 2 * 2 * 2 * 16 * CHUNK_ROWS * 4  # K and V, layers, heads, head size, rows, bytes


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(model_of("llama", torch.float32))


def free(patch: pytest.MonkeyPatch, size: int | None) -> None:
    patch.setattr(admission, "available_bytes", lambda device: size)
    patch.setattr(memory, "available_bytes", lambda device: size)


def test_a_chunk_is_as_large_as_the_pool_says(target: Target) -> None:
    assert bytes_per_chunk(target) == target.new_pool(3).bytes_per_chunk == CHUNK


@pytest.mark.parametrize("max_nodes", [0, 60, 1023])
def test_a_request_gets_chunks_for_its_tokens_and_one_tree(target: Target, max_nodes: int) -> None:
    """At most: all tokens but the last in the cache, and the rows of a widest tree behind them."""
    config = EngineConfig(max_nodes=max_nodes)
    for tokens in (1, 195, 196, 255, 256, 257, 2000):
        pool = target.new_pool(20)
        cache = SequenceCache(pool)
        cache.reserve(tokens - 1)
        cache.keep(range(tokens - 1))
        cache.reserve(max_nodes + 1)
        assert 20 - pool.num_free <= chunks_for(tokens, config) <= 20 - pool.num_free + 1


def test_the_pool_is_what_was_asked_for(target: Target) -> None:
    assert pool_chunks(target, EngineConfig(kv_bytes=5 * CHUNK + 1)) == 5
    assert pool_chunks(target, EngineConfig(kv_bytes=CHUNK)) == 1


@pytest.mark.parametrize("kv_bytes", [-1, 0, 1, CHUNK - 1])
def test_a_pool_without_a_chunk_is_refused(target: Target, kv_bytes: int) -> None:
    with pytest.raises(GraftError, match=f"kv_bytes is {kv_bytes}: expected at least one chunk, {CHUNK} bytes"):
        pool_chunks(target, EngineConfig(kv_bytes=kv_bytes))


def test_by_default_the_pool_holds_several_full_requests(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (None, 999 * GIB):
        free(monkeypatch, size)
        for config, context in ((EngineConfig(), 2048), (EngineConfig(max_context=700), 700)):
            assert pool_chunks(target, config) == FULL_REQUESTS * chunks_for(context, config)


def test_a_pool_never_takes_all_there_is(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 10 * CHUNK)
    assert 1 <= pool_chunks(target, EngineConfig()) < 10
    free(monkeypatch, 10)
    assert pool_chunks(target, EngineConfig()) == 1


def test_a_request_that_never_fits_is_refused_with_numbers(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, None)
    pool, config = target.new_pool(4), EngineConfig(max_nodes=0)
    require_room(target, pool, 4 * CHUNK_ROWS - 1, config)
    with pytest.raises(GraftError, match=r"1024 tokens need 0\.00 GiB of KV cache, the pool has 0\.00; shorten them"):
        require_room(target, pool, 4 * CHUNK_ROWS, config)


def test_a_request_the_machine_has_no_memory_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, config = target.new_pool(8), EngineConfig(max_nodes=0)
    needed = 4 * CHUNK + 1000 * INDEX_BYTES_PER_TOKEN
    free(monkeypatch, needed)
    require_room(target, pool, 1000, config)
    free(monkeypatch, needed - 1)
    with pytest.raises(GraftError, match=r"a request of 1000 tokens \(KV and index\) needs .* free on cpu; shorten"):
        require_room(target, pool, 1000, config)


def test_the_pool_is_untouched_by_being_asked(target: Target) -> None:
    pool = target.new_pool(2)
    require_room(target, pool, 100, EngineConfig())
    assert pool.num_free == 2


def test_chunks_missing_for_a_round(target: Target) -> None:
    """As many as reserving takes, whoever shares the chunk it begins in."""
    for forks in (0, 1, 3):
        pool = target.new_pool(20)
        first = SequenceCache(pool)
        first.reserve(300)
        first.keep(range(300))
        needs = [(first, 10), *((first.fork(), rows) for rows in (1, 250, 0)[:forks])]
        expected, before = chunks_missing(needs), pool.num_free
        for cache, rows in needs:
            cache.reserve(rows)
        assert before - pool.num_free == expected
    assert chunks_missing([]) == 0
