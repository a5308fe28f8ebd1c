"""Finds the RMS norms of a model that one native call can compute in place of a chain of torch's.

Knows no architecture and no class by name. The one idea: what looks like an RMS norm is tried on random input beside
the module's own forward, once for each kind of module; what does not agree is left alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from longgraft.exchange import Forward, Planned, is_watched
from longgraft.kernels import rows_linear
from longgraft.kernels.rms_norm import Style, norm, takes

Make = Callable[[nn.Module], Forward]

_SPREADS = (1e-4, 1e-2, 0.3, 1.0, 4.0, 30.0, 1e3)  # of test rows: where eps counts, where it does not


def norms(model: nn.Module) -> list[Planned]:
    """Return the RMS norms of `model` that can be computed in one call, and what makes the forward of each.

    Modules with hooks or a forward of their own are left out, as is everything where there is no native module or
    torch computes on threads we cannot have. Runs each kind of module once on a few random rows.
    """
    if not rows_linear.is_available() or (rows_linear.THREADS == "none" and torch.get_num_threads() > 1):
        return []
    known: dict[Hashable, Make | None] = {}
    planned: list[Planned] = []
    for module in model.modules():
        if not _looks_right(module) or is_watched(module):
            continue
        kind = _kind(module)
        if kind not in known:
            known[kind] = _verified(module)
        make = known[kind]
        if make is not None:
            planned.append((module, functools.partial(_unwatched, make, module)))
    return planned


def _unwatched(make: Make, module: nn.Module) -> Forward | None:
    """Make the forward, unless hooks came since the module was found."""
    return None if is_watched(module) else make(module)


def _looks_right(module: nn.Module) -> bool:
    """Say whether a module holds one vector of weights and one small number, and nothing else."""
    if module._modules or module._buffers or list(module._parameters) != ["weight"]:
        return False
    weight = module._parameters["weight"]
    return weight is not None and weight.dim() == 1 and _eps(module) is not None


def _verified(module: nn.Module) -> Make | None:
    """Try the module on random rows; whatever it does not bear means that it is not what it looks like."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            return _norm_of(module)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
            return None


def _kind(module: nn.Module) -> Hashable:
    """Return what modules of one kind share: class, settings, shape; not the values of weights."""
    settings = tuple((name, _setting(x)) for name, x in vars(module).items() if not name.startswith("_"))
    tensors = tuple((tuple(x.shape), x.dtype, x.device) for x in module.parameters())
    return type(module), settings, tensors


def _setting(value: Any) -> Hashable:
    return value if isinstance(value, (int, float, str, type(None), torch.dtype)) else id(value)


def _rows(width: int, dtype: torch.dtype) -> Tensor:
    """Return random rows of very different spread. [1, rows, width]"""
    return (torch.randn(1, len(_SPREADS), width) * torch.tensor(_SPREADS)[:, None]).to(dtype)


def _agree(ours: Tensor, own: Tensor) -> float | None:
    """Return the share of elements that differ; None where one differs by more than rounding."""
    if ours.shape != own.shape or ours.dtype is not own.dtype:
        return None
    unit = torch.finfo(own.dtype).eps
    a, b = ours.double(), own.double()
    close = torch.isclose(a, b, rtol=unit if own.dtype.itemsize < 4 else 16 * unit, atol=unit * 1e-3, equal_nan=True)
    return float((a != b).double().mean()) if bool(close.all()) else None


def _eps(module: nn.Module) -> float | None:
    """Return the one small positive number a module holds, or None."""
    found = [x for name, x in vars(module).items() if isinstance(x, float) and not name.startswith("_")]
    return found[0] if len(found) == 1 and 0.0 < found[0] < 0.1 else None


def _norm_of(module: nn.Module) -> Make | None:
    weight, eps = module._parameters["weight"], _eps(module)
    assert weight is not None and eps is not None
    if not takes(weight):
        return None
    other = copy.copy(module)  # with a weight of our own: in the model it may be all ones
    drawn = nn.Parameter(torch.rand(weight.shape).mul(2).sub(0.5).to(weight.dtype), requires_grad=False)
    other._parameters = {"weight": drawn}
    rows = _rows(len(weight), weight.dtype)
    own = type(module).forward(other, rows)
    shares = {style: _agree(norm(rows, drawn, eps, style), own) for style in Style}
    right = {style: share for style, share in shares.items() if share is not None}
    if not right:
        return None
    style = min(right, key=lambda style: right[style])
    # In fp32 sums differ in the last bits; in 16 bits they seldom do, and a style that rounds elsewhere often does.
    if weight.dtype is not torch.float32 and right[style] > 0.02:
        return None
    return lambda layer: _NormForward(layer, eps, style)


class _NormForward(Forward):
    """An RMS norm in one call."""

    __slots__ = ("eps", "style")

    def __init__(self, layer: nn.Module, eps: float, style: Style) -> None:
        super().__init__(layer)
        self.eps, self.style = eps, style

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        weight = self.layer._parameters["weight"]
        if len(inputs) == 1 and not options and weight is not None and takes(inputs[0], weight):
            return norm(inputs[0], weight, self.eps, self.style)
        return self.own(*inputs, **options)
