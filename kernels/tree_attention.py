"""Attention of a token tree over a cached prefix: the one public function of `longgraft.kernels`.

Knows no model and no cache: tensors in, one tensor out. The idea: softmax over [prefix, tree] splits exactly
into partial results merged by their log-sum-exp. Every row sees the whole prefix, so that part needs no mask,
the query heads that share a key head become rows of one product, and the cached keys are read once, in place.
Only the rows x rows tree part has a mask.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from longgraft.kernels import cpu, native, reference
from longgraft.kernels.spec import AttentionSpec, Run, TreeInput

__all__ = ["BACKENDS", "AttentionSpec", "Run", "tree_attention"]

_MODULES: dict[str, ModuleType] = {"cpu": cpu, "native": native, "reference": reference}
# Imported when named: they need other packages, and `auto` takes nothing that has not run on a GPU.
_ON_REQUEST = ("triton", "flash")
BACKENDS = ("auto", *_MODULES, *_ON_REQUEST)


def tree_attention(
    query: Tensor,
    prefix: Sequence[Run],
    tree_keys: Tensor | None,
    tree_values: Tensor | None,
    spec: AttentionSpec,
    mask: Tensor | None,
    positions: Tensor | Sequence[int],
    backend: str = "auto",
    memo: dict[object, Any] | None = None,
) -> Tensor:
    """Attend from `query [T, Hq, D]` to the prefix and to the rows' own tree; return [T, Hq, Dv].

    `prefix`: runs of cached rows (K [n, Hk, D], V [n, Hk, Dv]) that cover positions 0 .. P-1 in order; they
    may be strided views and are never copied whole. `tree_keys [T, Hk, D]`, `tree_values [T, Hk, Dv]`; both
    None for a single row whose own key is already the prefix's last (plain decoding: nothing to merge).
    `mask [T, T]` (bool, True = visible) is the ancestor mask, None a causal chain. `positions [T]` matter
    with `spec.window` only: the row at position p sees positions above p - window, and prefix rows below
    every row's window are not read. A row that sees no key gives 0.

    `backend`: `native` (a row's bits do not depend on the other rows), `cpu`, `reference` (dense, copies the
    prefix), or `auto`: the first of these that takes the device and dtype, `native` only where it pays. `triton` and
    `flash` (CUDA, optional packages) have never run on a GPU: they are taken only by name, and compare themselves
    with `reference` before their first use on a device. What a row gets never depends, beyond rounding, on the
    other rows. `memo`: a dict that calls for other layers, same rows and same cache, share (see `TreeInput`).
    Raises ValueError for an unknown backend, one that cannot take these tensors, or shapes that do not fit together.
    """
    if (tree_keys is None) != (tree_values is None):
        raise ValueError("tree_keys and tree_values: expected both or neither")
    tree = None if tree_keys is None or tree_values is None else (tree_keys, tree_values)
    inputs = TreeInput(query, prefix, tree, spec, mask, positions, memo)
    return _choose(inputs, backend).attend(inputs)


def _choose(inputs: TreeInput, backend: str) -> ModuleType:
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is unknown: expected one of {', '.join(BACKENDS)}")
    names = [backend]
    if backend == "auto":
        names = ["native", "cpu", "reference"] if native.pays(inputs.query) else ["cpu", "reference"]
    reasons = []
    for name in names:
        module, reason = _module(name)
        reason = reason or module.why_not(inputs)
        if not reason:
            return module
        reasons.append(f"{name}: {reason}")
    raise ValueError(f"attention backend {backend!r} cannot take these tensors ({'; '.join(reasons)})")


def _module(name: str) -> tuple[ModuleType, str]:
    """Return a backend's module, or any module and why there is none."""
    if name in _MODULES:
        return _MODULES[name], ""
    try:
        return import_module(f"longgraft.kernels.{name}"), ""
    except ImportError as error:
        return reference, f"{error.name or name} cannot be imported: pip install 'longgraft[gpu]'"
