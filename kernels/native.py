"""Tree attention in native code whose result for a row does not depend, by a bit, on what surrounds it.

Knows tensors only. The one idea: a row's keys are walked in order of position, in blocks on a fixed grid, with
one fixed order of arithmetic per block; so a token gets the same bits whether it is decoded alone or verified
among others in a tree, wherever the cached prefix ends and however it is cut into runs, on any number of
threads. K and V are read in place and widened in registers, sums are fp32, rounded once. csrc/attention.hpp
says what is fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longgraft.kernels import rows_linear
from longgraft.kernels.rows_linear import DTYPES
from longgraft.kernels.spec import Run, TreeInput

# Verified trees have fewer rows than this, prompt chunks more: all decoding takes one backend, so that its bits agree.
DECODE_ROWS = 128


def pays(query: Tensor) -> bool:
    """Say whether `auto` should take this backend for `query [T, Hq, D]`: by dtype and machine, not by tree size.

    Measured with AVX-512 and without instructions for 16-bit products: 1.0 to 2.5 times as fast a round as the `cpu`
    backend from 1 to 64 rows, 128 to 8K keys (eval/LOG.md). Large prompt chunks stay with `cpu`.
    """
    if query.shape[0] > DECODE_ROWS or not query.is_cpu or rows_linear.KERNEL != "avx512":
        return False
    return query.dtype is torch.float32 or (query.dtype in DTYPES and not rows_linear.multiplies(query.dtype))


def why_not(inputs: TreeInput) -> str:
    """Return why this backend cannot take the call, or an empty string."""
    query = inputs.query
    if not query.is_cpu:
        return f"tensors are on {query.device}, it needs the CPU"
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype} is not one of {', '.join(str(d) for d in DTYPES)}"
    if not rows_linear.is_available():
        return "its native module is not built, or has no kernel for this processor"
    if torch.is_grad_enabled() and query.requires_grad:
        return "it has no gradients"
    return ""


def attend(inputs: TreeInput, kernel: str | None = None) -> Tensor:
    """Return attention [T, Hq, Dv] in the query's dtype; rows that see no key give 0.

    `kernel` names the instruction set, for tests.
    """
    query, spec, mask = _dense(inputs.query), inputs.spec, inputs.mask
    rows, heads, size = query.shape
    out = query.new_empty(rows, heads, inputs.value_dim)
    prefix = [(_dense(keys), _dense(values)) for keys, values in inputs.prefix]
    tree = None if inputs.tree is None else (_dense(inputs.tree[0]), _dense(inputs.tree[1]))
    sinks = None if spec.sinks is None else _sinks(spec.sinks)
    assert rows_linear._native is not None
    rows_linear._native.attend(
        kernel or rows_linear.KERNEL,
        torch.get_num_threads(),
        DTYPES[query.dtype],
        (rows, heads, inputs.kv_heads, size, out.shape[2], spec.window or 0),
        (query.data_ptr(), query.stride(0), query.stride(1)),
        out.data_ptr(),
        [_numbers(run) for run in prefix],
        (0,) * 7 if tree is None else _numbers(tree),
        (0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride()),
        inputs.position_list() if spec.window is not None else [],
        (0, 0) if sinks is None else (sinks.data_ptr(), DTYPES[sinks.dtype]),
        spec.scale,
        spec.softcap or 0.0,
    )
    return out


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _sinks(sinks: Tensor) -> Tensor:
    return sinks.contiguous() if sinks.dtype in DTYPES else sinks.float()


def _numbers(run: Run) -> tuple[int, ...]:
    keys, values = run
    return (
        keys.data_ptr(),
        values.data_ptr(),
        keys.shape[0],
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
    )
