"""Gives a loaded model 8-bit weights in its linear layers, one after the other, in place.

Knows no architecture: every exact `torch.nn.Linear` is a matrix and nothing more. The one idea: where a decoding step
is bound by reading the weights, half the bytes are half the time; and since each row of activations is rounded by
itself (`kernels/int8_linear.py`), rows stay independent of one another: the quantised model is another model, but
decoding it with a tree gives what decoding it alone gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longgraft.config import GraftError
from longgraft.kernels.int8_linear import PANEL, STEP, Packed, dequantized, int8_linear, pack

Model = TypeVar("Model", bound=nn.Module)


class Int8Linear(nn.Module):
    """A linear layer with an 8-bit weight; takes and gives activations `[..., in_features]` of any floating dtype.

    Stays on the CPU and in 8 bits whatever dtype the model is moved to. `kind` is the dtype of the weight it was made
    from. `values`, `scale`: see `Packed`. No gradients.
    """

    bias: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None, kind: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.inputs, packed.outputs
        self.kind = kind
        self._packed = packed
        self.register_buffer("values", packed.values)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @property
    def packed(self) -> Packed:
        """The weight as the kernel takes it."""
        held, known = self._buffers, self._packed  # attribute look-ups of a module cost several times as much
        values, scale = held["values"], held["scale"]
        if known.values is not values or known.scale is not scale:  # a state was loaded by assigning tensors
            assert values is not None and scale is not None
            known = self._packed = Packed(values, scale, self.out_features, self.in_features)
        return known

    @property
    def weight(self) -> Tensor:
        """The weight that the values stand for, in `kind`: made anew at each access; writing to it changes nothing."""
        return dequantized(self.packed).to(self.kind)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` times the weight transposed, plus the bias, in the dtype of `input`."""
        return int8_linear(input, self.packed, self._buffers["bias"])

    def extra_repr(self) -> str:
        """Say the sizes, as torch's own layer does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Refuse to move; let conversions of the model's dtype pass by, since scales stay fp32."""
        device = fn(torch.empty(0)).device
        if device.type != "cpu":
            raise GraftError(f"a model with 8-bit weights computes on the CPU; asked for {device}: move it first")
        return self


@dataclass(frozen=True, slots=True)
class Quantized:
    """What became 8-bit: bytes of weights before and after in the `layers` concerned, and the names of those `left`."""

    layers: int
    left: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def quantized(model: Model, keep: Collection[str] = ()) -> Model:
    """Replace the linear layers of `model` by 8-bit ones, in place, and return it; see `quantize`."""
    quantize(model, keep)
    return model


@torch.no_grad()
def quantize(model: nn.Module, keep: Collection[str] = ()) -> Quantized:
    """Replace the linear layers of `model` by 8-bit ones, in place.

    Each original weight is dropped before the next layer's turn, so memory goes down as it runs. Embeddings stay; an
    output layer that shares their weight gets an 8-bit copy and the two are no longer tied. Left alone: subclasses of
    `nn.Linear` (adapters), layers with hooks, parametrisations or a forward of their own, empty ones,
    those whose full name or last part of it is in `keep`, and what is no linear layer (grouped experts).
    Raises `GraftError` for a model that is not on the CPU, has no linear layers, or whose weights are not finite;
    then nothing has been changed.
    """
    names, left = _chosen(model, keep)
    _require(model, names)
    made: dict[int, Int8Linear] = {}  # one layer under two names stays one layer
    before = after = 0
    embeddings = _embeddings(model)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if id(layer) not in made:
            made[id(layer)] = new = _made(layer)
            before, after = before + layer.weight.nbytes, after + new.packed.nbytes
            if layer.weight is embeddings:
                _untie(model)
        model.set_submodule(name, made[id(layer)])
        del layer
    return Quantized(len(made), left, before, after)


def unquantized(model: Model) -> Model:
    """Replace every 8-bit layer of `model` by a `torch.nn.Linear` with the weight it stands for, in place.

    The reference for tests: what differs then is the rounding of activations alone.
    """
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, Int8Linear):
            model.set_submodule(name, _plain(layer))
    return model


@torch.no_grad()
def _plain(layer: Int8Linear) -> nn.Linear:
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


def _require(model: nn.Module, names: list[str]) -> None:
    """Raise before anything is changed."""
    others = {tensor.device.type for tensor in model.parameters()} - {"cpu"}
    if others:
        found = ", ".join(sorted(others))
        raise GraftError(f"{type(model).__name__} is on {found}: 8-bit weights need the whole model on the CPU")
    if not names:
        raise GraftError(f"{type(model).__name__}: no torch.nn.Linear to quantise, or all are kept")
    for name in names:
        for part, tensor in model.get_submodule(name).named_parameters():
            require_finite(f"{name}.{part}", tensor)


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise a `GraftError` that names the tensor if it has values that are not finite."""
    if not bool(torch.stack(torch.aminmax(tensor.detach())).float().isfinite().all()):
        raise GraftError(f"{name}: infinite or undefined values; expected finite weights to quantise")


def replaceable(model: nn.Module) -> list[str]:
    """Return the names of the layers that `quantize` would replace; a layer with two names is there twice."""
    return _chosen(model, ())[0]


def int8_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes that the 8-bit weight of a layer takes; see `Packed`."""
    panels = -(-outputs // PANEL)
    return panels * PANEL * (-(-inputs // STEP) * STEP + 4)


def _made(layer: nn.Linear) -> Int8Linear:
    return Int8Linear(pack(layer.weight), layer.bias, layer.weight.dtype).train(layer.training)


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
