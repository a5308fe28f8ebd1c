"""A linear layer with a packed weight of 8 or 4 bits, and what the rest of the engine need know of the two widths.

Knows no model. The one idea: both widths are tensors of bytes that the kernels read in order, so one module holds
either, and everything else speaks of a number of bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longgraft.config import GraftError
from longgraft.kernels import int4_linear, int8_linear
from longgraft.kernels.int4_linear import Packed4
from longgraft.kernels.int8_linear import Packed
from longgraft.kernels.packed_linear import PANEL, STEP


class QuantizedLinear(nn.Module):
    """A linear layer with a packed weight; takes and gives activations `[..., in_features]` of any floating dtype.

    Stays on the CPU and in its bits whatever dtype the model is moved to. `kind` is the dtype of the weight it was made
    from. `values`, `scale`: see `Packed` and `Packed4`. No gradients.
    """

    bias: Tensor | None

    def __init__(self, packed: Packed | Packed4, bias: Tensor | None, kind: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = packed.inputs, packed.outputs, packed.bits
        self.kind = kind
        self._packed = packed
        self.register_buffer("values", packed.values)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @property
    def packed(self) -> Packed | Packed4:
        """The weight as the kernel takes it."""
        held, known = self._buffers, self._packed  # attribute look-ups of a module cost several times as much
        values, scale = held["values"], held["scale"]
        if known.values is not values or known.scale is not scale:  # a state was loaded by assigning tensors
            assert values is not None
            sizes = (self.out_features, self.in_features)
            known = self._packed = Packed4(values, *sizes) if scale is None else Packed(values, scale, *sizes)
        return known

    @property
    def weight(self) -> Tensor:
        """The weight that the values stand for, in `kind`: made anew at each access; writing to it changes nothing."""
        return dequantized(self.packed).to(self.kind)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` times the weight transposed, plus the bias, in the dtype of `input`."""
        packed = self.packed
        if isinstance(packed, Packed4):
            return int4_linear.int4_linear(input, packed, self._buffers["bias"])
        return int8_linear.int8_linear(input, packed, self._buffers["bias"])

    def extra_repr(self) -> str:
        """Say the sizes, as torch's own layer does."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, bits={self.bits}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Refuse to move; let conversions of the model's dtype pass by, since scales stay fp32."""
        device = fn(torch.empty(0)).device
        if device.type != "cpu":
            raise GraftError(
                f"a model with {self.bits}-bit weights computes on the CPU; asked for {device}: move it first"
            )
        return self


def pack(weight: Tensor, bits: int) -> Packed | Packed4:
    """Return `weight [N, K]` in 8 or 4 bits; raises ValueError for one that cannot be packed."""
    return int4_linear.pack(weight) if bits == 4 else int8_linear.pack(weight)


def dequantized(packed: Packed | Packed4) -> Tensor:
    """Return the weight that the values stand for, fp32 `[N, K]`."""
    return int4_linear.dequantized(packed) if isinstance(packed, Packed4) else int8_linear.dequantized(packed)


def packed_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes that the packed weight of a layer takes; see `Packed` and `Packed4`."""
    panels = -(-outputs // PANEL)
    if bits == 4:
        return panels * -(-inputs // int4_linear.BLOCK) * int4_linear.BLOCK_BYTES
    return panels * PANEL * (-(-inputs // STEP) * STEP + 4)
