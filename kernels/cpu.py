"""Tree attention on the CPU: torch's flash kernel once per run of cached rows, merged by log-sum-exp.

Knows tensors only. A part (`parts.py`) is one run of the prefix or the rows x rows tree. Without a mask the G
query heads of a key head are folded into rows, so keys and values are read once and not G times.

The kernel's traps, each met here: zero keys kill the process; a row with nothing visible says lse 0, not
-inf; bool masks, mixed dtypes and Dv != D are refused; a last dimension that is not contiguous gives NaN in
silence; `is_causal` is aligned to the top left. Softcap and Dv != D take plain matrix products, in blocks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longgraft.kernels.parts import Part, additive, grouped, matmul, merge, rows_between
from longgraft.kernels.spec import AttentionSpec, Run, TreeInput

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Parts that wait for their merge, so that a cache in many fragments does not pile up partial results.
_MOST_HELD = 16
# From 24 to 191 rows in fp32 the flash kernel gains nothing from a second thread, or loses; matrix products are
# 1.3 to 2.2 times as fast (Ice Lake, 2 threads; 512 to 32K keys; heads 2x6x128, 2x7x64, 8x4x128). On one thread
# they are equal; with fewer or more rows, short runs and in bf16 the flash kernel is as fast or faster.
_MATMUL_ROWS = range(24, 192)
_MATMUL_KEYS = 512
# The flash kernel gives one thread to each (key head, tile of 32 rows); where that leaves more than half of
# the threads idle, a long run is cut into lanes that run side by side.
_TILE_ROWS = 32
_LANE_KEYS = 1024


def why_not(inputs: TreeInput) -> str:
    """Return why this backend cannot take the call, or an empty string."""
    if inputs.query.device.type != "cpu":
        return f"tensors are on {inputs.query.device}, it needs the CPU"
    if inputs.query.dtype not in _DTYPES:
        return f"dtype {inputs.query.dtype} is not one of {', '.join(str(d) for d in _DTYPES)}"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return "this torch lacks aten::_scaled_dot_product_flash_attention_for_cpu"
    return ""


def attend(inputs: TreeInput) -> Tensor:
    """Return attention [T, Hq, Dv] in the query's dtype; rows that see no key give 0."""
    held: list[Part] = []
    for part in _parts(inputs):
        held.append(part)
        if len(held) == _MOST_HELD:
            held = [merge(held)]
    if not held:
        rows, heads, _ = inputs.query.shape
        return inputs.query.new_zeros(rows, heads, inputs.value_dim)
    out, _ = merge(held, inputs.spec.sinks)
    return out.transpose(0, 1).to(inputs.query.dtype)


def _parts(inputs: TreeInput) -> Iterator[Part]:
    """Yield the partial results of the prefix, then of the tree."""
    spec, query = inputs.spec, grouped(inputs.query, inputs.kv_heads)
    first, inner, oldest = 0, 0, None
    if spec.window is not None:
        oldest = torch.tensor(inputs.position_list()) - (spec.window - 1)
        first, inner = max(0, int(oldest.min())), max(0, int(oldest.max()))
    for start, run in rows_between(inputs.prefix, first, inner):
        keys_at = torch.arange(start, start + run[0].shape[0])
        assert oldest is not None
        yield from _attend_run(query, run, spec, keys_at >= oldest[:, None])
    for _, run in rows_between(inputs.prefix, inner, inputs.prefix_len):
        yield from _attend_run(query, run, spec, None)
    if inputs.tree is not None:
        yield from _attend_tree(query, inputs.tree, inputs, oldest)


def _attend_tree(query: Tensor, tree: Run, inputs: TreeInput, oldest: Tensor | None) -> Iterator[Part]:
    """Yield the part of the rows' own keys; `oldest [T]`: first position in each row's window."""
    mask, lower = inputs.mask, torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril_()
    if oldest is not None:
        inside = torch.tensor(inputs.position_list()) >= oldest[:, None]
        if not inside.all():
            mask = (lower if mask is None else mask) & inside
    if mask is None and _flash_takes(query, tree, inputs.spec):
        yield from _flash(query, tree, inputs.spec.scale, causal=True)
    else:
        yield from _attend_run(query, tree, inputs.spec, lower if mask is None else mask)


def _flash_takes(query: Tensor, run: Run, spec: AttentionSpec) -> bool:
    return spec.softcap is None and run[1].shape[-1] == query.shape[-1]


def _attend_run(query: Tensor, run: Run, spec: AttentionSpec, mask: Tensor | None) -> Iterator[Part]:
    """Yield the partial results of one run; `mask [T, n]` or None = every row sees every key.

    The number of rows chooses the way in fp32 only, never in float64, where tests ask for equal tokens.
    """
    if not _flash_takes(query, run, spec) or (mask is None and _matmul_wins(query, run[0].shape[0])):
        yield from matmul(query, run, spec, mask)
    elif mask is not None:
        yield from _flash(query, run, spec.scale, mask=mask)
    else:
        yield from _flash_folded(query, run, spec.scale)


def _matmul_wins(query: Tensor, keys: int) -> bool:
    rows = query.shape[1] * query.shape[2]
    fits = rows in _MATMUL_ROWS and keys >= _MATMUL_KEYS
    return fits and query.dtype == torch.float32 and torch.get_num_threads() > 1


def _flash(
    query: Tensor, run: Run, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> Iterator[Part]:
    """Yield the part of one run whose keys some rows may not see: one kernel call, heads not folded."""
    added = None if mask is None else additive(mask, query.dtype)
    out, lse = _kernel(query.flatten(0, 1)[None], run[0][None], run[1][None], scale, added, causal)
    out, lse = out[0], lse[0]
    yield out, lse if mask is None else lse.masked_fill(~mask.any(dim=1), float("-inf"))


def _flash_folded(query: Tensor, run: Run, scale: float) -> Iterator[Part]:
    """Yield the part of one run that every row sees: the heads that share keys are rows of one product."""
    kv_heads, group, rows, _ = query.shape
    units = kv_heads * -(-group * rows // _TILE_ROWS)
    lanes = min(torch.get_num_threads() // units, run[0].shape[0] // _LANE_KEYS)
    if lanes > 1:
        yield from _flash_lanes(query, run, scale, lanes)
    else:
        out, lse = _kernel(query.flatten(1, 2)[None], run[0][None], run[1][None], scale, None, False)
        yield out.reshape(kv_heads * group, rows, -1), lse.reshape(kv_heads * group, rows)


def _flash_lanes(query: Tensor, run: Run, scale: float, lanes: int) -> Iterator[Part]:
    """Yield the same in `lanes` parts of equal length, side by side, and one for the keys left over."""
    kv_heads, group, rows, _ = query.shape
    even = run[0].shape[0] // lanes * lanes
    keys, values = (x[:even].unflatten(0, (lanes, -1)) for x in run)
    folded = query.flatten(1, 2).expand(lanes, -1, -1, -1)
    out, lse = _kernel(folded, keys, values, scale, None, False)
    shape = (lanes, kv_heads * group, rows)
    yield from zip(out.reshape(*shape, -1), lse.reshape(shape))
    if even < run[0].shape[0]:
        yield from _flash(query, (run[0][even:], run[1][even:]), scale)


def _kernel(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, added: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Call torch's kernel: query [B, H, rows, D], keys and values [B, n, Hk, D] -> out as query, lse."""
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys.transpose(1, 2), values.transpose(1, 2), 0.0, causal, attn_mask=added, scale=scale
    )
    return out, lse
