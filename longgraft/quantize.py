"""Gives a loaded model 8-bit or 4-bit weights in its linear layers, one after the other, in place.

Knows no architecture: every exact `torch.nn.Linear` is a matrix and nothing more. The one idea: where a decoding step
is bound by reading the weights, half the bytes are half the time; and since each row of activations is rounded by
itself (`kernels/packed_linear.py`), rows stay independent of one another: the quantised model is another model, but
decoding it with a tree gives what decoding it alone gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longgraft.config import BITS, GraftError
from longgraft.kernels.packed_linear import MOST
from longgraft.quantized_linear import QuantizedLinear, dequantized, pack

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was packed: bytes of weights before and after in the `layers` concerned, and the names of those `left`."""

    layers: int
    left: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def quantized(model: Model, keep: Collection[str] = (), bits: int = 8) -> Model:
    """Replace the linear layers of `model` by packed ones, in place, and return it; see `quantize`."""
    quantize(model, keep, bits)
    return model


@torch.no_grad()
def quantize(model: nn.Module, keep: Collection[str] = (), bits: int = 8) -> Quantized:
    """Replace the linear layers of `model` by ones of 8 or 4 `bits`, in place; the output layer always gets 8.

    Each original weight is dropped before the next layer's turn, so memory goes down as it runs. Embeddings stay; an
    output layer that shares their weight gets a packed copy and the two are no longer tied. Left alone: subclasses of
    `nn.Linear` (adapters), layers with hooks, parametrisations or a forward of their own, empty ones,
    those whose full name or last part of it is in `keep`, and what is no linear layer (grouped experts).
    Raises `GraftError` for a model that is not on the CPU, has no linear layers, or whose weights are not finite;
    then nothing has been changed.
    """
    if bits not in BITS.values():
        raise GraftError(f"bits {bits!r}: expected 8 or 4")
    names, left = _chosen(model, keep)
    _require(model, names, bits)
    made: dict[int, QuantizedLinear] = {}  # one layer under two names stays one layer
    before = after = 0
    embeddings = _embeddings(model)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if id(layer) not in made:
            made[id(layer)] = new = _made(layer, width_of(model, layer, bits))
            before, after = before + layer.weight.nbytes, after + new.packed.nbytes
            if layer.weight is embeddings:
                _untie(model)
        model.set_submodule(name, made[id(layer)])
        del layer
    return Quantized(len(made), left, before, after)


def unquantized(model: Model) -> Model:
    """Replace every packed layer of `model` by a `torch.nn.Linear` with the weight it stands for, in place.

    The reference for tests: what differs then is the rounding of activations alone.
    """
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, QuantizedLinear):
            model.set_submodule(name, _plain(layer))
    return model


@torch.no_grad()
def _plain(layer: QuantizedLinear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta", dtype=layer.kind)
    plain.weight = nn.Parameter(dequantized(layer.packed).to(layer.kind), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.to(layer.kind), requires_grad=False)
    return plain.eval()


def _fits(layer: nn.Linear) -> bool:
    """Say whether the layer is torch's own and computes nothing but its matrix."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and not any(hooks)
        and layer.weight.is_floating_point()
        and layer.weight.numel() > 0
    )


def _chosen(model: nn.Module, keep: Collection[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the linear layers to replace and of those to leave; no layer is held on to."""
    names: list[str] = []
    left: list[str] = []
    for name, layer in model.named_modules(remove_duplicate=False):
        if name and isinstance(layer, nn.Linear):
            stays = name in keep or name.rpartition(".")[2] in keep or not _fits(layer)
            (left if stays else names).append(name)
    return names, tuple(left)


def _require(model: nn.Module, names: list[str], bits: int) -> None:
    """Raise before anything is changed."""
    others = {tensor.device.type for tensor in model.parameters()} - {"cpu"}
    if others:
        found = ", ".join(sorted(others))
        raise GraftError(f"{type(model).__name__} is on {found}: {bits}-bit weights need the whole model on the CPU")
    if not names:
        raise GraftError(f"{type(model).__name__}: no torch.nn.Linear to quantise, or all are kept")
    for name in names:
        for part, tensor in model.get_submodule(name).named_parameters():
            require_finite(f"{name}.{part}", tensor)


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise a `GraftError` that names the tensor if it has values that are not finite, or of 2^100 and more."""
    ends = torch.stack(torch.aminmax(tensor.detach())).float()
    if not bool(ends.isfinite().all()):
        raise GraftError(f"{name}: infinite or undefined values; expected finite weights to quantise")
    if not bool((ends.abs() < MOST).all()):
        raise GraftError(f"{name}: magnitudes of 2^100 and more; expected sensible weights to quantise")


def replaceable(model: nn.Module) -> list[str]:
    """Return the names of the layers that `quantize` would replace; a layer with two names is there twice."""
    return _chosen(model, ())[0]


def width_of(model: Any, layer: nn.Module, bits: int) -> int:
    """Return the bits that a layer gets in a model of `bits`: 8 for its output layer, where errors cost most."""
    return 8 if layer is getattr(model, "get_output_embeddings", lambda: None)() else bits


def _made(layer: nn.Linear, bits: int) -> QuantizedLinear:
    return QuantizedLinear(pack(layer.weight, bits), layer.bias, layer.weight.dtype).train(layer.training)


def _embeddings(model: Any) -> Tensor | None:
    """Return the weight of the input embeddings, if the model says which they are."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embeddings, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def _untie(model: Any) -> None:
    """Say that output and input embeddings are two from now on, or whatever ties weights again finds none to tie."""
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
