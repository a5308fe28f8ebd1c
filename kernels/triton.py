"""Tree attention on CUDA by our own Triton kernels: split-KV over a table of cached pieces, tree by ancestor bits.

Knows tensors only; `triton_kernels.py` holds the kernels. The one idea: what does not change from layer to layer,
where the cached rows lie, who is whose ancestor, which positions, is a `Plan`, made once and used by every layer
of that shape; a call is then one launch for partial results and, if the keys were split, one for their merge. Which
rows a program computes depends on sizes alone, never on what the tensors hold.

**This has never run on a GPU**: it runs in Triton's interpreter and compiles for sm_80, sm_90 and sm_100 in the
tests. So `auto` does not take it, and `why_not` compares it with `reference` before its first use on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction, cdiv, next_power_of_2

from longgraft.kernels.first_use import fault
from longgraft.kernels.parts import Part, rows_between
from longgraft.kernels.spec import Run, TreeInput
from longgraft.kernels.triton_kernels import LOG2E, merge_kernel, part_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_DIM = 256
INTERPRETED = not isinstance(part_kernel, JITFunction)
"""Whether TRITON_INTERPRET was set when triton was first imported: then kernels run on the CPU, slowly, for tests."""

PIECE_KEYS = 256
"""Keys a table entry stands for, at most: a chunk of the pool."""
# A split of fewer keys than a few blocks costs more in its merge than it saves.
_LEAST_BLOCKS = 4
_MERGED_AT_ONCE = 16
# Programs to spread the keys over: two a multiprocessor keep one computing while the other waits for memory.
_PROGRAMS_PER_PROCESSOR = 2
_INTERPRETED_PROGRAMS, _INTERPRETED_CELLS = 8, 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call needs besides K, V and queries, on their device; the same for all layers of one shape.

    `table [pieces, 4]` int64: where a piece's keys and values start, in elements from the first run's, its first
    position, its keys (at most 256); all its offsets are multiples of `align`. `blocks`: key blocks of the prefix.
    `words [T, W]` int32: bit j % 32 of word j // 32 says that the row sees tree row j; None: a causal chain.
    `positions [T]` int32, None without a window. `kind`: which layers it serves.
    """

    table: Tensor
    align: int
    blocks: int
    words: Tensor | None
    positions: Tensor | None
    kind: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a call is cut: rows and keys a program takes at a time, keys' blocks a split, splits."""

    block_rows: int
    block_keys: int
    split_blocks: int
    splits: int
    warps: int
    stages: int


def why_not(inputs: TreeInput) -> str:
    """Return why this backend cannot take the call, or an empty string. The first call on a device checks it."""
    query, dims = inputs.query, (inputs.query.shape[2], inputs.value_dim)
    if query.device.type != ("cpu" if INTERPRETED else "cuda"):
        wanted = "the CPU, since TRITON_INTERPRET is set" if INTERPRETED else "a CUDA device"
        return f"tensors are on {query.device}, it needs {wanted}"
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype} is not one of {', '.join(str(d) for d in DTYPES)}"
    if max(dims) > MOST_DIM:
        return f"head sizes are {dims[0]} and {dims[1]}, it takes up to {MOST_DIM}"
    if torch.is_grad_enabled() and query.requires_grad:
        return "it has no gradients"
    return fault(attend, query.device, query.dtype, dims)


def attend(inputs: TreeInput) -> Tensor:
    """Return attention [T, Hq, Dv] in the query's dtype; rows that see no key give 0."""
    return attend_planned(inputs, plan(inputs))


def attend_planned(inputs: TreeInput, plan: Plan) -> Tensor:
    """Return the same by a plan made for this layer or for another whose pools are laid out alike.

    No synchronisation, and launches that depend on shapes alone. ValueError for a plan of another kind of layer.
    """
    if plan.kind != _kind(inputs):
        raise ValueError(
            f"plan was made for {plan.kind}, expected one for {_kind(inputs)}: window, rows, keys, strides"
        )
    return _launch(inputs, plan, inputs.query.dtype)[0]


def partial(inputs: TreeInput) -> Part:
    """Return attention over these keys as one part for `merge`, in fp32; sinks do not enter."""
    bare = replace(inputs, spec=replace(inputs.spec, sinks=None))
    out, lse = _launch(bare, plan(bare), torch.float32)
    return out.transpose(0, 1), lse.transpose(0, 1)


def plan(inputs: TreeInput) -> Plan:
    """Make the plan of a call: small copies to the device, and one synchronisation if positions are on it."""
    first, positions, device = 0, None, inputs.query.device
    if inputs.spec.window is not None:
        listed = inputs.position_list()
        first = max(0, min(listed) - (inputs.spec.window - 1))
        positions = torch.tensor(listed, dtype=torch.int32, device=device)
    runs = uniform(inputs.prefix)
    table, align = piece_table(runs, first)
    block_keys = _block_keys(inputs)
    blocks = 0
    if len(table):
        blocks = (len(table) - 1) * (PIECE_KEYS // block_keys) + cdiv(int(table[-1, 3]), block_keys)
    mask = inputs.mask if inputs.tree is not None else None
    return Plan(
        table.to(device), align, blocks, None if mask is None else ancestor_words(mask), positions, _kind(inputs)
    )


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
    padded = mask.new_zeros(rows, cdiv(rows, 32) * 32)
    padded[:, :rows] = mask
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (padded.unflatten(1, (-1, 8)) * bits).sum(dim=-1, dtype=torch.uint8).view(torch.int32)


def tiles(inputs: TreeInput, blocks: int, programs: int) -> Tiles:
    """Choose tiles for `blocks` key blocks, to keep about `programs` programs busy.

    Sizes, warps and stages are those that compile without spills (16-bit) or with few (fp32, which has no tensor
    cores at full precision); the tests compile them.
    """
    query, wide = inputs.query, max(inputs.query.shape[2], inputs.value_dim) > 128
    small = query.dtype != torch.float32
    folded = query.shape[0] * query.shape[1] // inputs.kv_heads
    block_rows = min(64 if small or INTERPRETED else 16, max(16, next_power_of_2(folded)))
    wanted = max(1, programs // (cdiv(folded, block_rows) * inputs.kv_heads))
    split_blocks = max(_LEAST_BLOCKS, cdiv(blocks, wanted))
    warps, stages = (4, 3) if small and not wide else (8, 2)
    if inputs.spec.window is not None or inputs.spec.softcap is not None:
        warps = 8
    return Tiles(block_rows, _block_keys(inputs), split_blocks, cdiv(blocks, split_blocks), warps, stages)


def _block_keys(inputs: TreeInput) -> int:
    """64 keys of 128 16-bit numbers, fewer of larger ones: tiles of K and V must fit beside one another."""
    size = next_power_of_2(max(inputs.query.shape[2], inputs.value_dim)) * inputs.query.element_size()
    return min(64, max(16, 2**14 // size))


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _launch(inputs: TreeInput, plan: Plan, dtype: torch.dtype) -> Part:
    """Return out [T, Hq, Dv] in `dtype` and lse [T, Hq]."""
    query = inputs.query if inputs.query.stride(-1) == 1 else inputs.query.contiguous()
    rows, heads, _ = query.shape
    tree_blocks = 0 if inputs.tree is None else cdiv(rows, _block_keys(inputs))
    cut = tiles(inputs, plan.blocks + tree_blocks, _programs(query.device))
    out, lse = query.new_empty(rows, heads, inputs.value_dim, dtype=dtype), _fp32(query, rows, heads)
    if cut.splits == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    whole = cut.splits == 1
    parts = out if whole else _fp32(query, cut.splits, *out.shape)
    part_lse = lse if whole else _fp32(query, cut.splits, rows, heads)
    arguments = part_arguments(inputs, plan, cut, (query, parts, part_lse))
    grid = (cdiv(rows * arguments["GROUP"], cut.block_rows), inputs.kv_heads, cut.splits)
    with torch.cuda.device_of(query):
        part_kernel[grid](**arguments, num_warps=cut.warps, num_stages=cut.stages)
        if not whole:
            arguments = merge_arguments((parts, part_lse, out, lse), inputs.spec.sinks)
            merge_kernel[(cdiv(rows * heads, arguments["BLOCK_CELLS"]),)](**arguments, num_warps=2)
    return out, lse


def merge_arguments(tensors: tuple[Tensor, Tensor, Tensor, Tensor], sinks: Tensor | None) -> dict[str, Any]:
    """Return what `merge_kernel` is called with; `tensors`: parts, their lse, out, lse."""
    parts, part_lse, out, lse = tensors
    return dict(  # noqa: C408
        parts=parts, part_lse=part_lse, out=out, lse=lse, sinks=None if sinks is None else sinks.contiguous(),
        splits=len(parts), cells=lse.numel(), heads=lse.shape[1], VALUE_DIM=out.shape[2],
        BLOCK_VALUE_DIM=padded(out.shape[2]), BLOCK_CELLS=_INTERPRETED_CELLS if INTERPRETED else 1,
        BLOCK_SPLITS=_MERGED_AT_ONCE, SINKS=sinks is not None,
    )  # fmt: skip


def _fp32(query: Tensor, *shape: int) -> Tensor:
    return query.new_empty(shape, dtype=torch.float32)


def part_arguments(inputs: TreeInput, plan: Plan, cut: Tiles, tensors: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Return what `part_kernel` is called with; `tensors`: query, out, lse. With one split it applies the sinks."""
    query, out, lse = tensors
    rows, heads, dim = query.shape
    spec, group = inputs.spec, heads // inputs.kv_heads
    tree = None if inputs.tree is None else uniform([inputs.tree])[0]
    keys, values = uniform(inputs.prefix)[0] if plan.blocks or tree is None else tree
    tree_keys, tree_values = tree or (keys, values)
    sinks = spec.sinks.contiguous() if spec.sinks is not None and cut.splits == 1 else None
    scale = spec.scale / spec.softcap if spec.softcap is not None else spec.scale * LOG2E.value
    return dict(  # noqa: C408
        query=query, out=out, lse=lse, keys=keys, values=values, tree_keys=tree_keys, tree_values=tree_values,
        table=plan.table, words=plan.words, positions=plan.positions, sinks=sinks,
        query_strides=query.stride()[:2], prefix_strides=_strides(keys, values),
        tree_strides=_strides(tree_keys, tree_values), rows=rows, heads=heads, prefix_blocks=plan.blocks,
        tree_blocks=0 if tree is None else cdiv(rows, cut.block_keys), split_blocks=cut.split_blocks,
        num_words=0 if plan.words is None else plan.words.shape[1], window=spec.window or 0,
        scale=scale, softcap=(spec.softcap or 0.0) * LOG2E.value,
        GROUP=group, DIM=dim, VALUE_DIM=inputs.value_dim, BLOCK_DIM=padded(dim),
        BLOCK_VALUE_DIM=padded(inputs.value_dim), BLOCK_ROWS=cut.block_rows, BLOCK_KEYS=cut.block_keys,
        PER_PIECE=PIECE_KEYS // cut.block_keys, TREE_STAGES=cut.stages if plan.words is None else 1,
        ALIGN=plan.align, CAUSAL=plan.words is None, WINDOW=spec.window is not None,
        SOFTCAP=spec.softcap is not None, SINKS=sinks is not None, UPCAST=INTERPRETED,
    )  # fmt: skip


def padded(size: int) -> int:
    """Return the size of a tile that holds `size` numbers: a power of two that a tensor core takes."""
    return max(16, next_power_of_2(size))


def _strides(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """Row and head stride of keys, then of values."""
    return (*keys.stride()[:2], *values.stride()[:2])


def _kind(inputs: TreeInput) -> tuple[object, ...]:
    """What two layers must share to share a plan."""
    prefix = uniform(inputs.prefix)[:1]
    strides = [_strides(*run) for run in prefix]
    return (inputs.spec.window, len(inputs.query), inputs.prefix_len, _block_keys(inputs), strides)
