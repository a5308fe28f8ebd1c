"""Tree attention on CUDA by our own Triton kernels: split-KV over a table of cached pieces, tree by ancestor bits.

Knows tensors only; `triton_kernels.py` holds the kernels. The one idea: what does not change from layer to layer,
where the cached rows lie, who is whose ancestor, which positions, is a `Plan`, made once and used by every layer
of that shape; a call is then one launch for partial results and, if the keys were split, one for their merge. Which
rows a program computes depends on sizes alone, never on what the tensors hold.

**This has never run on a GPU**: it runs in Triton's interpreter and compiles for sm_80, sm_90 and sm_100 in the
tests. So `auto` does not take it, and `why_not` compares it with `reference` before its first use on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction

from longgraft.kernels.first_use import fault
from longgraft.kernels.parts import Part
from longgraft.kernels.spec import TreeInput
from longgraft.kernels.triton_kernels import LOG2E, merge_kernel, part_kernel
from longgraft.kernels.triton_plan import (
    PIECE_KEYS,
    Plan,
    block_keys,
    blocks_in,
    kind_of,
    make_plan,
    next_power,
    strides_of,
    uniform,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_DIM = 256
INTERPRETED = not isinstance(part_kernel, JITFunction)
"""Whether TRITON_INTERPRET was set when triton was first imported: then kernels run on the CPU, slowly, for tests."""

# Fusion is said, not left to a default that Triton warns about and is going to change.
MERGE_OPTIONS = {"num_warps": 2, "enable_fp_fusion": True}
# A split of fewer keys than a few blocks costs more in its merge than it saves.
_LEAST_BLOCKS = 4
_MERGED_AT_ONCE = 16
# Programs to spread the keys over: two a multiprocessor keep one computing while the other waits for memory.
_PROGRAMS_PER_PROCESSOR = 2
_INTERPRETED_PROGRAMS, _INTERPRETED_CELLS = 8, 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a call is cut: rows and keys a program takes at a time, keys' blocks a split, splits, launch options."""

    block_rows: int
    block_keys: int
    split_blocks: int
    splits: int
    options: dict[str, int | bool]


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
    kind = kind_of(inputs)
    made = None if inputs.memo is None else inputs.memo.get(kind)
    if made is None:
        made = make_plan(inputs)
        if inputs.memo is not None:
            inputs.memo[kind] = made
    return attend_planned(inputs, made)


def attend_planned(inputs: TreeInput, plan: Plan) -> Tensor:
    """Return the same by a plan made for this kind of layer (`kind_of`), which nobody checks.

    No synchronisation, and launches that depend on shapes alone.
    """
    return _launch(inputs, plan, inputs.query.dtype)[0]


def partial(inputs: TreeInput) -> Part:
    """Return attention over these keys as one part for `merge`, in fp32; sinks do not enter."""
    bare = replace(inputs, spec=replace(inputs.spec, sinks=None))
    out, lse = _launch(bare, make_plan(bare), torch.float32)
    return out.transpose(0, 1), lse.transpose(0, 1)


def tiles(inputs: TreeInput, blocks: int, programs: int) -> Tiles:
    """Choose tiles for `blocks` key blocks, to keep about `programs` programs busy.

    Sizes, warps and stages are those that compile without spills (16-bit) or with few (fp32, which has no tensor
    cores at full precision); the tests compile them.
    """
    query, wide = inputs.query, max(inputs.query.shape[2], inputs.value_dim) > 128
    small = query.dtype != torch.float32
    folded = query.shape[0] * query.shape[1] // inputs.kv_heads
    block_rows = min(64 if small or INTERPRETED else 16, max(16, next_power(folded)))
    wanted = max(1, programs // (blocks_in(folded, block_rows) * inputs.kv_heads))
    split_blocks = max(_LEAST_BLOCKS, blocks_in(blocks, wanted))
    stages = 3 if small and not wide else 2
    warps = 8 if wide or not small or (block_rows == 64 and max(query.shape[2], inputs.value_dim) > 64) else 4
    options: dict[str, int | bool] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return Tiles(block_rows, block_keys(inputs), split_blocks, blocks_in(blocks, split_blocks), options)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _launch(inputs: TreeInput, plan: Plan, dtype: torch.dtype) -> Part:
    """Return out [T, Hq, Dv] in `dtype` and lse [T, Hq]."""
    query = inputs.query if inputs.query.stride(-1) == 1 else inputs.query.contiguous()
    rows, heads, _ = query.shape
    tree_blocks = 0 if inputs.tree is None else blocks_in(rows, block_keys(inputs))
    cut = tiles(inputs, plan.blocks + tree_blocks, _programs(query.device))
    out, lse = query.new_empty(rows, heads, inputs.value_dim, dtype=dtype), _fp32(query, rows, heads)
    if cut.splits == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    whole = cut.splits == 1
    parts = out if whole else _fp32(query, cut.splits, *out.shape)
    part_lse = lse if whole else _fp32(query, cut.splits, rows, heads)
    arguments = part_arguments(inputs, plan, cut, (query, parts, part_lse))
    grid = (blocks_in(rows * arguments["GROUP"], cut.block_rows), inputs.kv_heads, cut.splits)
    with torch.cuda.device_of(query):
        part_kernel[grid](**arguments, **cut.options)
        if not whole:
            arguments = merge_arguments((parts, part_lse, out, lse), inputs.spec.sinks)
            merge_kernel[(blocks_in(rows * heads, arguments["BLOCK_CELLS"]),)](**arguments, **MERGE_OPTIONS)
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
        query_strides=query.stride()[:2], prefix_strides=strides_of(keys, values),
        tree_strides=strides_of(tree_keys, tree_values), rows=rows, heads=heads, prefix_blocks=plan.blocks,
        tree_blocks=0 if tree is None else blocks_in(rows, cut.block_keys), split_blocks=cut.split_blocks,
        num_words=0 if plan.words is None else plan.words.shape[1], window=spec.window or 0,
        scale=scale, softcap=(spec.softcap or 0.0) * LOG2E.value,
        GROUP=group, DIM=dim, VALUE_DIM=inputs.value_dim, BLOCK_DIM=padded(dim),
        BLOCK_VALUE_DIM=padded(inputs.value_dim), BLOCK_ROWS=cut.block_rows, BLOCK_KEYS=cut.block_keys,
        PER_PIECE=PIECE_KEYS // cut.block_keys, TREE_STAGES=cut.options["num_stages"] if plan.words is None else 1,
        ALIGN=plan.align, CAUSAL=plan.words is None, WINDOW=spec.window is not None,
        SOFTCAP=spec.softcap is not None, SINKS=sinks is not None, UPCAST=INTERPRETED,
    )  # fmt: skip


def padded(size: int) -> int:
    """Return the size of a tile that holds `size` numbers: a power of two that a tensor core takes."""
    return max(16, next_power(size))
