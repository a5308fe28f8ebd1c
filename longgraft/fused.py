"""Finds the norms and gated MLPs of a model that one native call can compute in place of a chain of torch's.

Knows no architecture and no class by name. The one idea: what looks like an RMS norm or a gated MLP is tried on
random input beside the module's own forward, once for each kind of module; what does not agree is left alone.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longgraft.exchange import Forward, Planned, is_watched
from longgraft.kernels import rows_linear
from longgraft.kernels.rowwise import CURVES, Curve, Style, gated, norm, takes

_SPREADS = (1e-4, 1e-2, 0.3, 1.0, 4.0, 30.0, 1e3)  # of test rows: where eps counts, where activations saturate or clip


def fused(model: nn.Module, gates: bool = False) -> list[Planned]:
    """Return the modules of `model` that can be computed in one call, and what makes the forward of each.

    Modules with hooks or a forward of their own are left out, as is everything where there is no native module or
    torch computes on threads we cannot have. `gates`: gated MLPs as well; off, since measured with silu in bf16 their
    kernel takes 1.0 to 1.4 times torch's time, which one call less did not make up for.
    Runs each kind of module once on a few random rows.
    """
    if not rows_linear.is_available() or (rows_linear.THREADS == "none" and torch.get_num_threads() > 1):
        return []
    known: dict[Hashable, Callable[[nn.Module], Forward] | None] = {}
    planned: list[Planned] = []
    for module in model.modules():
        look = _look_at(module)
        if look is None or (look is _mlp_of and not gates) or _is_watched(module):
            continue
        kind = (look, _kind(module))
        if kind not in known:
            known[kind] = _verified(look, module)
        make = known[kind]
        if make is not None:
            planned.append((module, functools.partial(_unwatched, make, module)))
    return planned


def _unwatched(make: Callable[[nn.Module], Forward], module: nn.Module) -> Forward | None:
    """Make the forward, unless hooks came since the module was found."""
    return None if _is_watched(module) else make(module)


def _is_watched(module: nn.Module) -> bool:
    """Say whether somebody watches the module or a part of it that a fused forward does not call."""
    unasked = (part for part in module._modules.values() if part is not None and _sizes(part) is None)
    return is_watched(module) or any(map(is_watched, unasked))


Look = Callable[[nn.Module], Callable[[nn.Module], Forward] | None]


def _look_at(module: nn.Module) -> Look | None:
    """Return what may verify the module, judged by what it is made of."""
    parts = module._modules
    if not parts and list(module._parameters) == ["weight"] and not module._buffers:
        weight = module._parameters["weight"]
        return _norm_of if weight is not None and weight.dim() == 1 and _eps(module) is not None else None
    if len(parts) in (3, 4) and not module._parameters and not module._buffers:
        return _mlp_of
    return None


def _verified(look: Look, module: nn.Module) -> Callable[[nn.Module], Forward] | None:
    """Try the module on random rows; whatever it does not bear means that it is not what it looks like."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            return look(module)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
            return None


def _kind(module: nn.Module) -> Hashable:
    """Return what modules of one kind share: class, settings, shapes, parts; not the values of weights."""
    settings = tuple((name, _setting(x)) for name, x in vars(module).items() if not name.startswith("_"))
    tensors = tuple((name, tuple(x.shape), x.dtype, x.device) for name, x in module.named_parameters(recurse=False))
    parts = tuple((name, _kind(part)) for name, part in module._modules.items() if part is not None)
    return type(module), settings, tensors, parts


def _setting(value: Any) -> Hashable:
    if isinstance(value, functools.partial):
        return value.func, tuple(map(_setting, value.args)), tuple((k, _setting(v)) for k, v in value.keywords.items())
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


# ---- norms


def _eps(module: nn.Module) -> float | None:
    """Return the one small positive number a module holds, or None."""
    found = [x for name, x in vars(module).items() if isinstance(x, float) and not name.startswith("_")]
    return found[0] if len(found) == 1 and 0.0 < found[0] < 0.1 else None


def _norm_of(module: nn.Module) -> Callable[[nn.Module], Forward] | None:
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


# ---- gated MLPs


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of an MLP's parts; `up` None: `gate` gives both, the gate's half first."""

    gate: str
    up: str | None
    down: str
    active: str


def _mlp_of(module: nn.Module) -> Callable[[nn.Module], Forward] | None:
    """Find which part is which by trying: equal to the last bit, since the same calls are made on the same rows."""
    sizes = {name: _sizes(part) for name, part in module._modules.items()}
    linear = [name for name, size in sizes.items() if size is not None]
    others = [name for name, size in sizes.items() if size is None]
    active = module._modules[others[0]] if len(others) == 1 else None
    if active is None or module.training or next(active.parameters(), None) is not None:
        return None
    tensor = next(module.parameters(), None)
    dtype = tensor.dtype if tensor is not None else getattr(module._modules[linear[0]], "kind", None)
    curve = _curve(active, dtype) if dtype in rows_linear.DTYPES else None
    orders = _orders(sizes, linear, others[0])
    if curve is None or not isinstance(dtype, torch.dtype) or not orders:
        return None
    rows = _rows(sizes[orders[0].down][1], dtype)  # type: ignore[index]
    own = type(module).forward(module, rows)
    for parts in orders:
        if _same(_MlpForward(module, parts, None)(rows), own):
            return functools.partial(_MlpForward, parts=parts, curve=curve)
    return None


def _sizes(part: nn.Module | None) -> tuple[int, int] | None:
    """Return inputs and outputs of what says it is a linear layer, adapters and 8-bit ones included."""
    found = getattr(part, "in_features", None), getattr(part, "out_features", None)
    return found if isinstance(found[0], int) and isinstance(found[1], int) else None  # type: ignore[return-value]


def _orders(sizes: dict[str, Any], linear: list[str], active: str) -> list[Parts]:
    """Return the orders in which sizes would fit."""
    found = []
    for gate, *up, down in itertools.permutations(linear):
        (inputs, between), (taken, outputs) = sizes[gate], sizes[down]
        fits = sizes[up[0]] == (inputs, between) and taken == between if up else 2 * taken == between
        if len(linear) in (2, 3) and fits and inputs == outputs:
            found.append(Parts(gate, up[0] if up else None, down, active))
    return found


def _curve(active: nn.Module, dtype: torch.dtype) -> Curve | None:
    """Return the curve that an activation's own forward draws, in fp32 and in the model's dtype, or None."""
    grid = torch.cat([torch.linspace(-12.0, 12.0, 1201), torch.tensor([-1e3, -60.0, 60.0, 1e3, 0.0])])
    for curve in CURVES:
        if all(_draws(active, grid.to(kind), curve) for kind in (torch.float32, dtype)):
            return curve
    return None


def _draws(active: nn.Module, x: Tensor, curve: Curve) -> bool:
    ours, own = gated(x, torch.ones_like(x), curve).double(), active(x).double()
    unit = torch.finfo(x.dtype).eps
    # The usual way to gelu loses all digits of what is far below zero: there an absolute error counts.
    return torch.allclose(ours, own, rtol=(1 if x.dtype.itemsize < 4 else 16) * unit, atol=4e-6)


def _same(ours: Any, own: Any) -> bool:
    both = isinstance(ours, Tensor) and isinstance(own, Tensor) and ours.dtype is own.dtype
    return both and torch.equal(ours.nan_to_num(), own.nan_to_num())


class _MlpForward(Forward):
    """down(activation(gate(x)) * up(x)), what lies between the layers in one call; `curve` None: in torch."""

    __slots__ = ("curve", "parts")

    def __init__(self, layer: nn.Module, parts: Parts, curve: Curve | None) -> None:
        super().__init__(layer)
        self.parts, self.curve = parts, curve

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        names, modules = self.parts, self.layer._modules
        active: Any = modules[names.active]
        if len(inputs) != 1 or options or self.layer.training or is_watched(active):
            return self.own(*inputs, **options)
        gate: Any = modules[names.gate](inputs[0])  # type: ignore[misc]
        if names.up is None:
            gate, up = gate.chunk(2, dim=-1)
        else:
            up = modules[names.up](inputs[0])  # type: ignore[misc]
        together = self.curve is not None and takes(gate, up)
        between = gated(gate, up, self.curve) if together and self.curve else active(gate) * up
        return modules[names.down](between)  # type: ignore[misc]
