"""Tree attention on CUDA with a flash-attention library for the cached prefix, and our own for what it cannot mask.

Knows tensors only; `flash_calls.py` holds the libraries. The one idea: keys that every row sees, in full pages of
256, need no mask and go to the library as a block table over the pool itself; what is left, a window's left edge,
the last unfilled page and the tree, is a few hundred keys, by our Triton kernels or by matrix products. All of it
is merged by log-sum-exp. Query heads that share keys are folded into rows, so the library reads keys once.

**This has never run on a GPU**, only with stand-ins for the libraries: so `auto` does not take it, and `why_not`
compares it with `reference` before its first use on a device. Runs that do not lie in pages of one pool are right
but slow: the whole call is then left to our own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from longgraft.kernels.first_use import fault
from longgraft.kernels.flash_calls import PAGE, Pages, Provider, provider
from longgraft.kernels.parts import Part, grouped, matmul, merge, rows_between
from longgraft.kernels.reference import visible
from longgraft.kernels.spec import Run, TreeInput

DTYPES = (torch.bfloat16, torch.float16)
MOST_DIM = 256


def why_not(inputs: TreeInput) -> str:
    """Return why this backend cannot take the call, or an empty string. The first call on a device checks it."""
    query, dim = inputs.query, inputs.query.shape[2]
    if query.device.type != "cuda":
        return f"tensors are on {query.device}, it needs a CUDA device"
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype} is not one of {', '.join(str(d) for d in DTYPES)}"
    if dim != inputs.value_dim or dim % 8 or dim > MOST_DIM:
        return f"head sizes are {dim} and {inputs.value_dim}, it needs one, a multiple of 8 up to {MOST_DIM}"
    if torch.is_grad_enabled() and query.requires_grad:
        return "it has no gradients"
    found = provider(torch.cuda.get_device_capability(query.device))
    if isinstance(found, str):
        return f"{found}: pip install 'longgraft[flash]'"
    if inputs.spec.softcap is not None and not found.softcap:
        return f"{found.name} has no softcap"
    return fault(attend, query.device, query.dtype, (dim, dim))


def attend(inputs: TreeInput) -> Tensor:
    """Return attention [T, Hq, Dv] in the query's dtype; rows that see no key give 0."""
    found = list(_parts(inputs))
    if not found:
        return inputs.query.new_zeros(*inputs.query.shape[:2], inputs.value_dim)
    out, _ = merge([(part.float(), lse) for part, lse in found], inputs.spec.sinks)
    return out.transpose(0, 1).to(inputs.query.dtype)


def _parts(inputs: TreeInput) -> Iterator[Part]:
    """Yield the parts of a window's edge, of the full pages that all rows see, of the rest and the tree."""
    inner, window = 0, inputs.spec.window
    positions = inputs.position_list() if window is not None else []
    if window is not None:
        inner = max(0, max(positions) - (window - 1))
    begin, end = -(-inner // PAGE) * PAGE, inputs.prefix_len // PAGE * PAGE
    pages = in_pages(inputs.prefix, begin, end)
    capability = torch.cuda.get_device_capability(inputs.query.device) if inputs.query.is_cuda else (9, 0)
    found = provider(capability)
    if pages is None or isinstance(found, str):
        yield from _own(inputs)
        return
    if begin:
        assert window is not None
        first = max(0, min(positions) - (window - 1))
        yield from _edge(inputs, positions, (first, begin))
    yield from _by_provider(found, inputs, pages)
    tail = [run for _, run in rows_between(inputs.prefix, end, inputs.prefix_len)]
    if tail or inputs.tree is not None:
        shifted = [position - end for position in positions] if window is not None else inputs.positions
        yield from _own(replace(inputs, prefix=tail, positions=shifted))


def in_pages(prefix: Sequence[Run], begin: int, end: int) -> Pages | None:
    """Return positions begin .. end-1, multiples of 256, as pages of the pool the runs lie in.

    None if there are no such positions, or the runs do not lie in whole pages of one pool.
    """
    runs = [run for run in prefix if run[0].shape[0]]
    if begin >= end or any(run[0].shape[0] % PAGE for run in runs[:-1]):
        return None
    places = [_places([run[side] for run in runs]) for side in (0, 1)]
    if places[0] is None or places[0] != places[1]:
        return None
    numbers, lowest = places[0]
    listed = [number + i for number, run in zip(numbers, runs) for i in range(run[0].shape[0] // PAGE)]
    chosen = listed[begin // PAGE : end // PAGE]
    keys, values = (_view(run, max(listed) + 1) for run in runs[lowest])
    return Pages(keys, values, torch.tensor([chosen], dtype=torch.int32, device=keys.device))


def _places(rows: Sequence[Tensor]) -> tuple[list[int], int] | None:
    """Return each run's first page, counted from the lowest run's, and which run that is; None if not in pages."""
    first = rows[0]
    page_bytes = PAGE * first.stride(0) * first.element_size()
    for run in rows:
        alike = run.stride() == first.stride() and run.stride(-1) == 1
        if not alike or run.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    lowest = min(range(len(rows)), key=lambda i: rows[i].data_ptr())
    offsets = [run.data_ptr() - rows[lowest].data_ptr() for run in rows]
    if any(offset % page_bytes for offset in offsets):
        return None
    return [offset // page_bytes for offset in offsets], lowest


def _view(lowest: Tensor, pages: int) -> Tensor:
    """Return the pool from its lowest run on as [pages, 256, Hk, D]; the last page named ends inside the storage."""
    row, head, one = lowest.stride()
    return lowest.as_strided((pages, PAGE, *lowest.shape[1:]), (PAGE * row, row, head, one))


def _by_provider(found: Provider, inputs: TreeInput, pages: Pages) -> Iterator[Part]:
    """Yield the parts of pages that every row sees: heads that share keys are rows, [Hk, G * T, ..]."""
    rows, heads, _ = inputs.query.shape
    folded = grouped(inputs.query, inputs.kv_heads).flatten(1, 2).transpose(0, 1).contiguous()
    for out, lse in found.call(folded, pages, inputs.spec):
        yield out.reshape(heads, rows, -1), lse.reshape(heads, rows)


def _edge(inputs: TreeInput, positions: list[int], span: tuple[int, int]) -> Iterator[Part]:
    """Yield the parts of prefix positions that lie in some rows' windows only, or in an unfilled first page."""
    query = grouped(inputs.query, inputs.kv_heads)
    oldest = torch.tensor(positions, device=query.device) - (inputs.spec.window or 0) + 1
    for start, run in rows_between(inputs.prefix, *span):
        keys_at = torch.arange(start, start + run[0].shape[0], device=query.device)
        yield from matmul(query, run, inputs.spec, keys_at >= oldest[:, None])


def _own(inputs: TreeInput) -> Iterator[Part]:
    """Yield the parts of these keys by our own means: Triton where it can, else matrix products on a copy."""
    try:
        triton = import_module("longgraft.kernels.triton")
    except ImportError:
        triton = None
    if triton is not None and not triton.why_not(inputs):
        yield triton.partial(inputs)
        return
    runs = [*inputs.prefix] if inputs.tree is None else [*inputs.prefix, inputs.tree]
    keys, values = (torch.cat(side) for side in zip(*runs))
    seen = visible(inputs).expand(len(inputs.query), -1)
    yield from matmul(grouped(inputs.query, inputs.kv_heads), (keys, values), inputs.spec, seen)
