"""Packs linear layers while a checkpoint is read, so that the whole model is never there in its own dtype.

Knows no file format: it is a quantizer to transformers, which reads a weight, has it packed and goes on to the next.
The one idea: a linear layer on its way holds its packed values as if they were its weight; once all is read, each such
layer gives way to a `QuantizedLinear` of the same values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from longgraft.config import GraftError
from longgraft.kernels.int4_linear import Packed4
from longgraft.kernels.int8_linear import Packed
from longgraft.quantize import replaceable, require_finite, width_of
from longgraft.quantized_linear import QuantizedLinear, pack

METHOD = "longgraft_packed"


class WhileReading(QuantizationConfigMixin):
    """What `from_pretrained` is given as `quantization_config`; `refusal` is set if a weight cannot be packed."""

    def __init__(self, bits: int) -> None:
        self.quant_method = METHOD
        self.bits = bits
        self.refusal: GraftError | None = None


class Packer(HfQuantizer):
    """Packs the weights of linear layers as they are read. Output layers that share the embeddings' weight stay."""

    quantization_config: WhileReading
    is_trainable = False

    def __init__(self, quantization_config: WhileReading, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.dtype = torch.float32
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the weights to pack
        self.widths: dict[str, int] = {}  # their bits
        self.packed: dict[str, Packed | Packed4] = {}

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Remember the dtype asked for."""
        self.dtype = dtype
        return dtype

    def is_serializable(self, *ignored: Any, **options: Any) -> bool:
        """Say that transformers cannot save the result."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        tied = model.all_tied_weights_keys
        shared = {*tied, *tied.values()}
        for name in replaceable(model):
            if (weight := f"{name}.weight") not in shared:
                layer = model.get_submodule(name)
                self.shapes[weight] = tuple(layer.weight.shape)
                self.widths[weight] = width_of(model, layer, self.quantization_config.bits)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        """Say whether this is the weight of a linear layer."""
        return param_name in self.shapes

    def get_quantize_ops(self) -> ConversionOps:
        """Return what packs one weight."""
        return _Pack(self)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        made: dict[int, QuantizedLinear] = {}  # one layer under two names stays one layer
        for name, packed in self.packed.items():
            path = name.removesuffix(".weight")
            layer = model.get_submodule(path)
            if id(layer) not in made:
                if layer.bias is not None:
                    require_finite(f"{path}.bias", layer.bias)
                made[id(layer)] = QuantizedLinear(packed, layer.bias, self.dtype).train(layer.training)
            model.set_submodule(path, made[id(layer)])
        self.packed.clear()
        self._forget(model)
        return model

    def _forget(self, model: Any) -> None:
        """Leave no trace of a quantizer: `save_pretrained` and trainers would ask it."""
        conversions = getattr(model, "_weight_conversions", None)
        self.remove_quantization_config(model)
        model._weight_conversions = conversions
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_is_quantized"):
                del config._is_quantized


class _Pack(ConversionOps):
    def __init__(self, packer: Packer) -> None:
        self.packer = packer

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the packed values in place of each weight that is to be packed."""
        return {name: self._converted(name, value) for name, value in input_dict.items()}

    def _converted(self, name: str, value: Any) -> Any:
        weight: Tensor = value[0] if isinstance(value, list) else value
        expected = self.packer.shapes.get(name)
        if expected is None:
            return value
        try:
            if tuple(weight.shape) != expected:
                raise GraftError(
                    f"{name}: {list(weight.shape)} in the checkpoint, expected {list(expected)}; "
                    "its config and its weights do not belong together: fetch both again"
                )
            require_finite(name, weight)
            packed = pack(weight, self.packer.widths[name])
        except GraftError as refusal:
            self.packer.quantization_config.refusal = refusal
            raise
        self.packer.packed[name] = packed
        return nn.Parameter(packed.values, requires_grad=False)


def while_reading(bits: int) -> WhileReading:
    """Return the `quantization_config` that has linear layers packed; transformers is told of it at the first call."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(Packer)
    return WhileReading(bits)
