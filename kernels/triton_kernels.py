"""The Triton source of tree attention: split-KV partial results over a table of cached pieces, and their merge.

Knows numbers and pointers only; `triton.py` says what they are and owns every launch. The one idea: the keys of a
call, prefix first and tree behind it, are one line of blocks; a program takes one tile of folded rows, one key head
and one stretch of that line, and leaves softmax(logits) @ values over its stretch with the log-sum-exp. Rows are
folded as row = t * GROUP + g, so that a tile of many rows has few t and a causal tile ends where its rows do.

Traps met here. All logits are in base 2 (exp2 is the machine's own). `tl.dot` rounds fp32 to tf32 unless told not
to. The interpreter multiplies bfloat16 bit patterns: UPCAST widens operands first. A row that has seen nothing has
the maximum -inf, and -inf - -inf is NaN: 0 stands in for it.
"""

# No `from __future__ import annotations`: Triton recognises `constexpr` by the object.
import triton
import triton.language as tl
from triton.language import constexpr, tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a: tensor, b: tensor, UPCAST: constexpr) -> tensor:
    """Product in fp32: exact inputs, no tf32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _tanh(x: tensor) -> tensor:
    """Hyperbolic tangent to fp32 rounding: by exp2 far from 0, by a continued fraction near it, where 1 - e cancels."""
    far = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - far) / (1.0 + far)
    square = x * x
    near = x * (945.0 + square * (105.0 + square)) / (945.0 + square * (420.0 + square * 15.0))
    return tl.where(tl.abs(x) < 0.5, near, tl.where(x < 0, -far, far))


@triton.jit
def _tile(base: tensor, starts: tensor, valid: tensor, SIZE: constexpr, BLOCK: constexpr) -> tensor:
    """Load rows of SIZE numbers, padded to BLOCK, from `starts` on; 0 where a row is not valid, whatever lies there."""
    at = tl.arange(0, BLOCK)
    pointers = base + starts[:, None] + at[None, :]
    if SIZE == BLOCK:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    return tl.load(pointers, mask=valid[:, None] & (at < SIZE)[None, :], other=0.0)


@triton.jit
def _nothing(ROWS: constexpr, BLOCK: constexpr) -> tensor:
    """Return the state of rows that have seen no key: sums [ROWS, BLOCK], mass [ROWS], top [ROWS]."""
    return (
        tl.zeros([ROWS, BLOCK], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
    )


@triton.jit
def _absorb(
    state: tensor, query: tensor, keys: tensor, values: tensor, seen: tensor, scale: tensor, softcap: tensor,
    SOFTCAP: constexpr, UPCAST: constexpr,
) -> tensor:  # fmt: skip
    """Take one block of keys into the state (sums [M, DV], mass [M], top [M]); `seen [M, N]` or [1, N]."""
    sums, mass, top = state
    logits = _dot(query, tl.trans(keys), UPCAST) * scale
    if SOFTCAP:
        logits = _tanh(logits) * softcap
    logits = tl.where(seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    level = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - level[:, None])
    decay = tl.exp2(top - level)
    mass = mass * decay + tl.sum(weights, 1)
    sums = sums * decay[:, None] + _dot(weights.to(values.dtype), values, UPCAST)
    return sums, mass, new_top


@triton.jit
def _tree_seen(
    words: tensor, num_words: tensor, t: tensor, others: tensor, rows: tensor, oldest: tensor, positions: tensor,
    CAUSAL: constexpr, WINDOW: constexpr,
) -> tensor:  # fmt: skip
    """Which of the tree rows `others [N]` each row `t [M]` sees: its ancestors by bit, or all up to itself."""
    inside = (others < rows)[None, :] & (t < rows)[:, None]
    if CAUSAL:
        seen = inside & (others[None, :] <= t[:, None])
    else:
        word = tl.load(words + t[:, None] * num_words + (others // 32)[None, :], mask=inside, other=0)
        seen = inside & (((word >> (others % 32)[None, :]) & 1) != 0)
    if WINDOW:
        at = tl.load(positions + others, mask=others < rows, other=0)
        seen = seen & (at[None, :] >= oldest[:, None])
    return seen


@triton.jit
def _cached_block(
    keys: tensor, values: tensor, strides: tensor, table: tensor, block: tensor, kv_head: tensor, oldest: tensor,
    DIM: constexpr, VALUE_DIM: constexpr, BLOCK_DIM: constexpr, BLOCK_VALUE_DIM: constexpr, BLOCK_KEYS: constexpr,
    PER_PIECE: constexpr, ALIGN: constexpr, WINDOW: constexpr,
) -> tensor:  # fmt: skip
    """Load keys and values of one block of the prefix, where the table says; and who sees them, [M, N] or [1, N]."""
    entry = table + block // PER_PIECE * 4
    key_at = tl.multiple_of(tl.load(entry), ALIGN) + kv_head * strides[1]
    value_at = tl.multiple_of(tl.load(entry + 1), ALIGN) + kv_head * strides[3]
    n = block % PER_PIECE * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    there = n < tl.load(entry + 3)
    k = _tile(keys + key_at, n * strides[0], there, DIM, BLOCK_DIM)
    v = _tile(values + value_at, n * strides[2], there, VALUE_DIM, BLOCK_VALUE_DIM)
    seen = there[None, :]
    if WINDOW:
        seen = seen & ((n + tl.load(entry + 2))[None, :] >= oldest[:, None])
    return k, v, seen


# Sizes that change from round to round: specialised on them, the kernel would be compiled again in mid-serving.
@triton.jit(do_not_specialize=["rows", "prefix_blocks", "tree_blocks", "split_blocks", "num_words", "window", "heads"])
def part_kernel(
    query: tensor, out: tensor, lse: tensor, keys: tensor, values: tensor, tree_keys: tensor, tree_values: tensor,
    table: tensor, words: tensor, positions: tensor, sinks: tensor,
    query_strides: tensor, prefix_strides: tensor, tree_strides: tensor,
    rows: tensor, heads: tensor, prefix_blocks: tensor, tree_blocks: tensor, split_blocks: tensor,
    num_words: tensor, window: tensor, scale: tensor, softcap: tensor,
    GROUP: constexpr, DIM: constexpr, VALUE_DIM: constexpr, BLOCK_DIM: constexpr,
    BLOCK_VALUE_DIM: constexpr, BLOCK_ROWS: constexpr, BLOCK_KEYS: constexpr, PER_PIECE: constexpr,
    TREE_STAGES: constexpr, ALIGN: constexpr,
    CAUSAL: constexpr, WINDOW: constexpr, SOFTCAP: constexpr, SINKS: constexpr, UPCAST: constexpr,
) -> None:  # fmt: skip
    """Write out [split, T, Hq, DV] and lse [split, T, Hq] for one tile of rows, key head and stretch of blocks."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    folded = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t, head = folded // GROUP, kv_head * GROUP + folded % GROUP
    valid = t < rows
    q = _tile(query, t * query_strides[0] + head * query_strides[1], valid, DIM, BLOCK_DIM)
    oldest = t
    if WINDOW:
        oldest = tl.load(positions + t, mask=valid, other=0) - (window - 1)
    state = _nothing(BLOCK_ROWS, BLOCK_VALUE_DIM)
    first = split * split_blocks
    last = first + split_blocks
    for block in tl.range(first, tl.minimum(last, prefix_blocks)):
        k, v, seen = _cached_block(
            keys, values, prefix_strides, table, block, kv_head, oldest,
            DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, BLOCK_KEYS, PER_PIECE, ALIGN, WINDOW,
        )  # fmt: skip
        state = _absorb(state, q, k, v, seen, scale, softcap, SOFTCAP, UPCAST)
    end = tree_blocks
    if CAUSAL:
        end = tl.minimum(end, ((tl.program_id(0) + 1) * BLOCK_ROWS - 1) // GROUP // BLOCK_KEYS + 1)
    for block in tl.range(
        tl.maximum(first - prefix_blocks, 0), tl.minimum(last - prefix_blocks, end), num_stages=TREE_STAGES
    ):
        n = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        k = _tile(tree_keys + kv_head * tree_strides[1], n * tree_strides[0], n < rows, DIM, BLOCK_DIM)
        v = _tile(tree_values + kv_head * tree_strides[3], n * tree_strides[2], n < rows, VALUE_DIM, BLOCK_VALUE_DIM)
        seen = _tree_seen(words, num_words, t, n, rows, oldest, positions, CAUSAL, WINDOW)
        state = _absorb(state, q, k, v, seen, scale, softcap, SOFTCAP, UPCAST)
    sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) if SINKS else tl.zeros([BLOCK_ROWS], tl.float32)
    target = (split * rows + t) * heads + head
    _finish(out, lse, target, valid, state, sink, VALUE_DIM, BLOCK_VALUE_DIM, SINKS)


@triton.jit
def _finish(
    out: tensor, lse: tensor, target: tensor, valid: tensor, state: tensor, sink: tensor,
    VALUE_DIM: constexpr, BLOCK_VALUE_DIM: constexpr, SINKS: constexpr,
) -> None:  # fmt: skip
    """Normalise the state and write it to rows `target` of out and lse; a row that saw nothing gives 0 and -inf."""
    sums, mass, top = state
    if SINKS:
        new_top = tl.maximum(top, sink * LOG2E)
        decay = tl.exp2(top - new_top)
        sums, mass = sums * decay[:, None], mass * decay + tl.exp2(sink * LOG2E - new_top)
        top = new_top
    level = tl.where(top == float("-inf"), 0.0, top)
    result = sums / tl.where(mass == 0.0, 1.0, mass)[:, None]
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    pointers = out + target.to(tl.int64)[:, None] * VALUE_DIM + dims[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=valid[:, None] & (dims < VALUE_DIM)[None, :])
    log_mass = tl.where(mass == 0.0, float("-inf"), level + tl.log2(tl.where(mass == 0.0, 1.0, mass)))
    tl.store(lse + target, log_mass * LN2, mask=valid)


@triton.jit(do_not_specialize=["splits", "cells", "heads"])
def merge_kernel(
    parts: tensor, part_lse: tensor, out: tensor, lse: tensor, sinks: tensor,
    splits: tensor, cells: tensor, heads: tensor,
    VALUE_DIM: constexpr, BLOCK_VALUE_DIM: constexpr, BLOCK_CELLS: constexpr, BLOCK_SPLITS: constexpr,
    SINKS: constexpr,
) -> None:  # fmt: skip
    """Merge the splits of some cells (row, head): parts [splits, cells, DV] fp32, part_lse [splits, cells]."""
    cell = tl.program_id(0) * BLOCK_CELLS + tl.arange(0, BLOCK_CELLS)
    valid = cell < cells
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    sums, mass, top = _nothing(BLOCK_CELLS, BLOCK_VALUE_DIM)
    for first in tl.range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        there = (split < splits)[:, None] & valid[None, :]
        at = split[:, None].to(tl.int64) * cells + cell[None, :]
        logs = tl.load(part_lse + at, mask=there, other=float("-inf")) * LOG2E
        inside = there[:, :, None] & (dims < VALUE_DIM)[None, None, :]
        each = tl.load(parts + at[:, :, None] * VALUE_DIM + dims[None, None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(logs, 0))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logs - level[None, :])
        decay = tl.exp2(top - level)
        mass = mass * decay + tl.sum(weights, 0)
        sums = sums * decay[:, None] + tl.sum(weights[:, :, None] * each, 0)
        top = new_top
    sink = tl.load(sinks + cell % heads).to(tl.float32) if SINKS else tl.zeros([BLOCK_CELLS], tl.float32)
    _finish(out, lse, cell, valid, (sums, mass, top), sink, VALUE_DIM, BLOCK_VALUE_DIM, SINKS)
