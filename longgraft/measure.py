"""What a model's forwards cost on this machine: a few widths behind two context lengths, timed over random K/V.

Knows a model behind our attention, be it target or drafter; no prompt is read and no number is a guess.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from longgraft.cache import ChunkPool, SequenceCache
from longgraft.cost import CostTable
from longgraft.target import Segment, Target

# Widths timed at load behind a short context, and those timed again behind a long one; what lies between is
# interpolated until real rounds correct it.
SHORT_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
LONG_WIDTHS = (1, 16)


def measure_costs(target: Target, pool: ChunkPool, contexts: tuple[int, int] = (128, 2048)) -> CostTable:
    """Time a few forwards behind two context lengths filled with random K/V; no prompt is read."""
    low, high = contexts
    high = max(min(high, (pool.num_free - 1) * pool.chunk_rows), 2)
    low = min(low, high // 2)
    cache = filled(target, pool, high)
    try:
        time_forward(target, cache, 2, repeats=1)
        times = {(rows, high): time_forward(target, cache, rows, 2) for rows in LONG_WIDTHS}
        cache.truncate(low)
        times |= {(rows, low): time_forward(target, cache, rows, 3 if rows == 1 else 2) for rows in SHORT_WIDTHS}
    finally:
        cache.release()
    return CostTable.fit(times)


def filled(target: Target, pool: ChunkPool, length: int) -> SequenceCache:
    """Return a cache of `length` rows of random K/V (values do not matter for time; denormals would)."""
    cache = SequenceCache(pool)
    cache.reserve(length)
    for layer, shape in enumerate(target.layers):
        keys = torch.randn(length, shape.kv_heads, shape.key_dim, device=target.device).to(target.dtype)
        values = torch.randn(length, shape.kv_heads, shape.value_dim, device=target.device).to(target.dtype)
        cache.write(layer, keys, values)
    cache.keep(range(length))
    return cache


def time_forward(target: Target, cache: SequenceCache, rows: int, repeats: int = 2) -> float:
    """Return the best time in seconds of a forward of `rows` new rows behind the cache; the cache is unchanged."""
    # Positions do not matter for time, but a model with a table of them has none beyond its limit.
    last = (target.context_limit or cache.length + rows) - 1
    positions = np.minimum(np.arange(cache.length, cache.length + rows, dtype=np.int32), last)
    segment = Segment(cache, np.zeros(rows, np.int32), positions)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        target.forward([segment])
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        best = min(best, time.perf_counter() - begin)
        cache.truncate(cache.length)
    return best
