"""Linear layers whose rows do not depend on one another: y = x W^T + b on the CPU, native code.

Knows no module and no model. The one idea: the order in which the products of one output element are added is
a function of the number of products alone, so a row's result is bitwise the same whether it is computed alone,
among 16 rows of a tree or among 512 rows of a prompt. 16-bit weights are read as they are and widened in
registers, sums are fp32, rounded once.

Letters: K in_features, N out_features; x [..., K], weight [N, K], bias [N], all of one dtype.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear as torch_linear

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `Dtype` of csrc/order.hpp counts


def _load() -> ModuleType | None:
    try:
        return importlib.import_module("longgraft.kernels._native")
    except ImportError:
        return None


_native = _load()
KERNEL: str | None = _native.best_kernel() if _native is not None else None
"""Instruction set in use: "avx512", "avx2", "plain" (right but slow: for tests), or None when not built."""
THREADS: str | None = _native.team_runtime() if _native is not None else None
"""OpenMP runtime whose threads are used (torch's own), "none" for the calling thread alone."""


def is_available() -> bool:
    """Say whether the native module was built and this processor has a fast kernel for it."""
    return KERNEL in ("avx512", "avx2")


def multiplies(dtype: torch.dtype) -> bool:
    """Say whether this processor has its own instructions for products of `dtype`, as torch would use."""
    return _native is None or dtype not in DTYPES or bool(_native.multiplies(DTYPES[dtype]))


def takes(weight: Tensor, bias: Tensor | None) -> bool:
    """Say whether the native code can compute with these parameters: plain CPU tensors of one known dtype."""
    if not _is_plain(weight) or weight.dtype not in DTYPES or weight.dim() != 2:
        return False
    row, column = weight.stride()
    outputs, inputs = weight.shape
    return (
        column == 1
        and row >= inputs > 0
        and outputs > 0
        and (bias is None or (_is_plain(bias) and bias.dtype == weight.dtype and bias.is_contiguous()))
    )


def rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, kernel: str | None = None) -> Tensor:
    """Return x [..., K] times weight [N, K] transposed, plus bias [N], as [..., N]; no gradient.

    Uses at most `torch.get_num_threads()` threads of torch's own pool; neither that number nor the number of
    rows changes a bit of the result. What the native code cannot take (other dtypes or devices, gradients,
    autocast, tensor subclasses) goes to torch's linear. `kernel` names the instruction set, for tests.
    """
    chosen = kernel or (KERNEL if is_available() else None)
    if chosen is None or not takes(weight, bias) or not _is_ready(x, weight, bias):
        return torch_linear(x, weight, bias)
    outputs, inputs = weight.shape
    *rows, width = x.shape
    if width != inputs:
        return torch_linear(x, weight, bias)  # raises as it always does
    x = x.contiguous()
    y = x.new_empty((*rows, outputs))
    assert _native is not None
    _native.linear(
        chosen,
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // inputs,
        inputs,
        outputs,
        weight.stride(0),
        DTYPES[weight.dtype],
        torch.get_num_threads(),
    )
    return y


def _is_plain(tensor: Tensor) -> bool:
    """Subclasses (quantized, distributed, fake) keep their numbers elsewhere than `data_ptr` says."""
    return type(tensor) in (Tensor, Parameter) and tensor.is_cpu and tensor.layout is torch.strided


def _is_ready(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if not _is_plain(x) or x.dtype is not weight.dtype or x.dim() == 0 or torch.is_autocast_enabled("cpu"):
        return False
    return not torch.is_grad_enabled() or not (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
