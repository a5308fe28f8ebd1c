"""Who may run: how large the KV pool is, and whether one more request, or one more round, fits."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from longgraft.cache import ChunkPool, SequenceCache
from longgraft.config import EngineConfig, GraftError
from longgraft.memory import GIB, INDEX_BYTES_PER_TOKEN, available_bytes, require
from longgraft.sequence import Sequence
from longgraft.target import Target

CHUNK_ROWS = 256
# Share of the memory that is free when an engine starts that its KV pool may grow into.
POOL_SHARE = 0.6
# A pool never needs to be larger than this many requests of full length.
FULL_REQUESTS = 8
DEFAULT_CONTEXT = 32 * 1024
# Chunks of output that a request which starts has room for; what it needs beyond may be taken from a younger one.
HEADROOM = 2


def bytes_per_chunk(target: Target, side: int = 0) -> int:
    """Return the bytes of one chunk of K and V over all layers, and of `side` further columns."""
    per_row = side + sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in target.layers)
    return CHUNK_ROWS * per_row * int(target.dtype.itemsize)


def pool_chunks(target: Target, config: EngineConfig, side: int = 0) -> int:
    """Return how many chunks the pool gets: `kv_bytes` if given, else a share of what is free.

    On the CPU untouched chunks cost no memory, so a large pool is free until it is used. `side`: further columns a row.
    """
    size = bytes_per_chunk(target, side)
    if config.kv_bytes is not None:
        if config.kv_bytes < size:
            raise GraftError(f"kv_bytes is {config.kv_bytes}: expected at least one chunk, {size} bytes")
        return config.kv_bytes // size
    context = config.max_context or target.context_limit or DEFAULT_CONTEXT
    wanted = FULL_REQUESTS * chunks_for(context, config)
    free = available_bytes(target.device)
    return wanted if free is None else max(1, min(wanted, int(free * POOL_SHARE) // size))


def chunks_for(tokens: int, config: EngineConfig, chunk_rows: int = CHUNK_ROWS) -> int:
    """Return the chunks one request of `tokens` tokens holds at most, the rows of a tree included."""
    return -(-(tokens + config.max_nodes + 1) // chunk_rows)


def require_room(target: Target, pool: ChunkPool, tokens: int, config: EngineConfig) -> None:
    """Raise `GraftError` if a request of `tokens` tokens (prompt + output) can never fit."""
    chunks, size = chunks_for(tokens, config, pool.chunk_rows), pool.bytes_per_chunk
    if chunks > pool.num_chunks:
        raise GraftError(
            f"prompt and output of {tokens} tokens need {chunks * size / GIB:.2f} GiB of KV cache, the pool has "
            f"{pool.num_chunks * size / GIB:.2f}; shorten them, free memory or raise kv_bytes"
        )
    if target.device.type == "cpu":
        # Chunks that were written before have their memory, whatever they are filled with now.
        needed = max(0, chunks - pool.num_warm) * size + tokens * INDEX_BYTES_PER_TOKEN
        require(f"a request of {tokens} tokens (KV and index)", needed, target.device, "shorten it or free memory")


def chunks_to_grow(seq: Sequence, config: EngineConfig) -> int:
    """Return how many chunks a sequence may still take before it is fair to put another one back for it."""
    size = seq.cache.pool.chunk_rows
    tokens = len(seq.token_ids) + min(seq.stop.remaining, HEADROOM * size)
    return max(0, chunks_for(tokens, config, size) - len(seq.cache.chunks))


def chunks_missing(needs: Iterable[tuple[SequenceCache, int]]) -> int:
    """Return how many chunks must be free before each cache can reserve so many rows behind its prefix.

    A chunk that is not full and shared is copied by each that writes into it, but for the last that holds it; one that
    is held for later sequences is copied by all.
    """
    missing, writers = 0, Counter[int]()
    for cache, rows in needs:
        pool, chunks = cache.pool, cache.chunks
        missing += max(0, -(-(cache.length + rows) // pool.chunk_rows) - len(chunks))
        split, begun = divmod(cache.length, pool.chunk_rows)
        if rows and begun:
            writers[chunks[split]] += 1
            missing += writers[chunks[split]] < pool.references(chunks[split]) + pool.is_held(chunks[split])
    return missing


def token_ids_of(prompt: Any) -> list[int]:
    """Return a prompt's token ids as plain numbers; `GraftError` for anything but a flat sequence of them."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Seq) or not all(isinstance(i, int | np.integer) for i in ids):
        raise GraftError(f"a prompt of type {type(prompt).__name__}: expected text or a flat sequence of token ids")
    return [int(i) for i in ids]
