"""What a call of the Triton backend needs besides its tensors, made once for all layers of a forward.

Knows torch only, no Triton. The one idea: cached rows lie where they lie, in runs of one pool or anywhere; a table
of pieces of at most 256 rows says where, in elements from the first run, so that one launch reads them all in place
and the same table serves every layer whose pool is laid out alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from longgraft.kernels.parts import rows_between
from longgraft.kernels.spec import Run, TreeInput

PIECE_KEYS = 256
"""Keys a table entry stands for, at most: a chunk of the pool."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call needs besides K, V and queries, on their device; the same for all layers of one shape.

    `table [pieces, 4]` int64: where a piece's keys and values start, in elements from the first run's, its first
    position, its keys (at most 256); all its offsets are multiples of `align`. `blocks`: key blocks of the prefix.
    `words [T, W]` int32: bit j % 32 of word j // 32 says that the row sees tree row j; None: a causal chain.
    `positions [T]` int32, None without a window.
    """

    table: Tensor
    align: int
    blocks: int
    words: Tensor | None
    positions: Tensor | None


def make_plan(inputs: TreeInput) -> Plan:
    """Make the plan of a call: small copies to the device, and one synchronisation if positions are on it."""
    first, positions, device = 0, None, inputs.query.device
    if inputs.spec.window is not None:
        listed = inputs.position_list()
        first = max(0, min(listed) - (inputs.spec.window - 1))
        positions = torch.tensor(listed, dtype=torch.int32, device=device)
    runs = uniform(inputs.prefix)
    table, align = piece_table(runs, first)
    size = block_keys(inputs)
    blocks = 0
    if len(table):
        blocks = (len(table) - 1) * (PIECE_KEYS // size) + blocks_in(int(table[-1, 3]), size)
    mask = inputs.mask if inputs.tree is not None else None
    return Plan(table.to(device), align, blocks, None if mask is None else ancestor_words(mask), positions)


def bounded_plan(inputs: TreeInput, rows: Tensor, length: Tensor, step: int) -> Plan:
    """Make the plan of a call whose prefix `rows [C]` lie in the one run of `inputs`; the first `length [1]` count.

    `step`: so many of `rows`, from each multiple of it on, are neighbours; at most `PIECE_KEYS`. Nothing waits.
    """
    keys, values = inputs.prefix[0]
    starts = rows[::step]
    first = torch.arange(len(starts), device=rows.device) * step
    there = (length - first).clamp_(0, step)
    table = torch.stack([starts * keys.stride(0), starts * values.stride(0), first, there], dim=1)
    assert inputs.mask is not None and isinstance(inputs.positions, Tensor)
    # A run may begin at any row of the pool.
    align = gcd(16, keys.stride(0), values.stride(0))
    blocks = len(starts) * (PIECE_KEYS // block_keys(inputs))
    positions = None if inputs.spec.window is None else inputs.positions.to(torch.int32)
    return Plan(table, align, blocks, ancestor_words(inputs.mask), positions)


def uniform(prefix: Sequence[Run]) -> list[Run]:
    """Return the runs that are not empty in one layout: as they are if all have the same strides, else copied."""
    prefix = [run for run in prefix if run[0].shape[0]]
    if not prefix:
        return []
    strides = [tuple(x.stride() for x in run) for run in prefix]
    if len(set(strides)) == 1 and all(stride[-1] == 1 for stride in strides[0]):
        return prefix
    return [(torch.cat([keys for keys, _ in prefix]), torch.cat([values for _, values in prefix]))]


def piece_table(runs: Sequence[Run], first: int) -> tuple[Tensor, int]:
    """Return the table (see `Plan`) of the runs' rows from position `first` on, and the alignment of its offsets."""
    pieces: list[Tensor] = []
    size = PIECE_KEYS
    total = sum(keys.shape[0] for keys, _ in runs)
    for position, (keys, values) in rows_between(runs, first, total):
        starts = torch.arange(0, keys.shape[0], size)
        offsets = [_offset(x, base) + starts * x.stride(0) for x, base in zip((keys, values), runs[0])]
        pieces.append(torch.stack([*offsets, starts + position, (keys.shape[0] - starts).clamp_max(size)], dim=1))
    table = torch.cat(pieces) if pieces else torch.zeros(0, 4, dtype=torch.int64)
    return table, gcd(16, *(abs(offset) for offset in table[:, :2].flatten().tolist()))


def _offset(rows: Tensor, base: Tensor) -> int:
    """Elements between two tensors, of one allocation or of two."""
    return (rows.data_ptr() - base.data_ptr()) // rows.element_size()


def ancestor_words(mask: Tensor) -> Tensor:
    """Return mask [T, T] (bool, True = visible) as int32 words [T, ceil(T / 32)], lowest bit first."""
    rows = mask.shape[0]
    padded = mask.new_zeros(rows, blocks_in(rows, 32) * 32)
    padded[:, :rows] = mask
    eight = torch.arange(8, dtype=torch.uint8, device=mask.device)  # made there: no copy from the host to wait for
    bits = torch.ones_like(eight) << eight
    return (padded.unflatten(1, (-1, 8)) * bits).sum(dim=-1, dtype=torch.uint8).view(torch.int32)


def strides_of(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """Row and head stride of keys, then of values."""
    return (*keys.stride()[:2], *values.stride()[:2])


def kind_of(inputs: TreeInput) -> tuple[object, ...]:
    """What two layers of one forward must share to share a plan."""
    runs = uniform(inputs.prefix)
    places = [(len(keys), _offset(keys, runs[0][0]), _offset(values, runs[0][1])) for keys, values in runs]
    strides = tuple(strides_of(*run) for run in runs[:1])
    return (
        "triton plan",
        inputs.spec.window,
        len(inputs.query),
        inputs.prefix_len,
        block_keys(inputs),
        strides,
        *places,
    )


def block_keys(inputs: TreeInput) -> int:
    """64 keys of 128 16-bit numbers, fewer of larger ones: tiles of K and V must fit beside one another."""
    size = next_power(max(inputs.query.shape[2], inputs.value_dim)) * inputs.query.element_size()
    return min(64, max(16, 2**14 // size))


def blocks_in(keys: int, size: int) -> int:
    """Return how many blocks of `size` hold so many keys."""
    return -(-keys // size)


def next_power(number: int) -> int:
    """Return the smallest power of two that is not below `number`, at least 1."""
    return 1 << max(0, number - 1).bit_length()
