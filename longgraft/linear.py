"""Linear layers and norms of a model, computed by our kernels for as long as a context lasts.

Knows no architecture: every exact `torch.nn.Linear` is a matrix and nothing more. The one idea: verification
sends a few rows through every layer, which torch does slowly where the processor has no instructions for the
weights' dtype; inside `wide` each such layer's `forward` is our kernel, outside the model is untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longgraft.exchange import Exchange, Forward, Planned
from longgraft.kernels import rows_linear as kernel
from longgraft.norms import norms


def output_rows(layer: Any) -> int:
    """Return how many outputs a linear layer has, without making its weight where that is kept in another form."""
    return int(getattr(layer, "out_features", None) or layer.weight.shape[0])


class _RowsForward(Forward):
    """A linear layer on our kernel."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        parameters = self.layer._parameters  # `layer.weight` costs ten times as much
        weight = parameters["weight"]
        assert weight is not None
        return kernel.rows_linear(input, weight, parameters["bias"])


class Wide(Exchange):
    """A context in which the fitting modules of one model run on our kernels; made by `wide`.

    `layers` are the linear layers concerned, `between` the norms; `name` says for stats what computes the layers. May
    be entered repeatedly and nested; the modules get their own `forward` back when the last context on them closes,
    however it closes.
    """

    def __init__(self, layers: list[nn.Linear], between: Sequence[Planned] = ()) -> None:
        super().__init__([*((layer, partial(_RowsForward, layer)) for layer in layers), *between])
        self.layers = layers
        self.between = [module for module, _ in between]

    @property
    def name(self) -> str:
        """Instruction set of our kernel, or "torch" if no linear layer uses it."""
        return str(kernel.KERNEL) if self.layers else "torch"


def wide(model: nn.Module, always: bool = False) -> Wide:
    """Return a context within which `model`'s linear layers run on our kernel where that is faster, and its norms
    in one call each.

    Concerned are exact `torch.nn.Linear`s with contiguous CPU weights in fp32, bf16 or fp16 (adapters' base
    layers included) of a dtype that `pays`. Calls that need gradients, autocast or other input dtypes still go
    to torch. `always` takes every dtype, for results that do not depend on the number of rows. Without a native
    module the context does nothing.
    """
    dtypes = {dtype for dtype in kernel.DTYPES if pays(dtype, always)}
    layers = [layer for layer in model.modules() if _fits(layer, dtypes)]
    return Wide(layers, norms(model))  # type: ignore[arg-type]


def pays(dtype: torch.dtype, always: bool = False) -> bool:
    """Say whether our kernel is used for weights of `dtype` on this machine.

    Measured, against torch on 2 cores without bf16 instructions: 16-bit dtypes 1.2 to 1.9 times as fast for one
    row, 2.4 to 8 times from 4 rows on; fp32 with AVX-512 1.3 to 2.7 times for 4 to 16 rows, 0.9 to 1.1 times for
    1 and 2, 0.7 to 1.2 times from 256 on.
    """
    if not kernel.is_available() or dtype not in kernel.DTYPES:
        return False
    if always:
        return True
    if kernel.THREADS == "none" and torch.get_num_threads() > 1:
        return False  # ours would run on one thread, torch's on all
    return kernel.KERNEL == "avx512" if dtype is torch.float32 else not kernel.multiplies(dtype)


def _fits(layer: nn.Module, dtypes: set[torch.dtype]) -> bool:
    return type(layer) is nn.Linear and layer.weight.dtype in dtypes and kernel.takes(layer.weight, layer.bias)
