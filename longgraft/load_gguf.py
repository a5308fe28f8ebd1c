"""Reads the weights of a GGUF file one tensor at a time.

Knows no model: which tensor is which weight, and what is to be undone on the way, transformers' tables say, and the
`gguf` package expands the blocks. The one idea: transformers takes weights that are read when it asks for them, so a
tensor's turn is all there ever is of it in memory besides its place in the model, and most are expanded some rows at a
time, straight into the dtype wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft.config import GraftError

SLICE = 1 << 20  # numbers expanded at a time: their fp32 and what expanding them takes besides stay within 32 MiB


class UnknownWay(Exception):
    """This file, or this release of transformers, needs the way that holds all tensors at once; says why."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a GGUF file, read anew at each access by any index, which returns all of it.

    `kind`: its `GGMLQuantizationType`. `shape`: of the numbers, rows last but one. `offset`: bytes from the file's
    beginning. `undo`: gives the weight's numbers for those of the file, None where they are the same.
    """

    path: Path
    name: str
    kind: Any
    shape: tuple[int, ...]
    offset: int
    undo: Callable[[Any], Any] | None
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = prod(self.shape[:-1]), self.shape[-1]
        if self.undo is not None:
            numbers = self.undo(self._rows(0, rows).reshape(self.shape))
            return torch.from_numpy(np.ascontiguousarray(numbers)).to(self.dtype)
        whole = torch.empty(rows, columns, dtype=self.dtype)
        step = max(1, SLICE // columns)
        for begin in range(0, rows, step):
            whole[begin : begin + step] = torch.from_numpy(self._rows(begin, min(begin + step, rows)))
        return whole.view(self.shape)

    def _rows(self, begin: int, end: int) -> Any:
        """Return rows `begin` to `end` as a writable fp32 array `[end - begin, columns]`."""
        from gguf import GGMLQuantizationType, dequantize
        from gguf.quants import quant_shape_to_byte_shape

        size = int(quant_shape_to_byte_shape(self.shape, self.kind)[-1])
        data = np.fromfile(self.path, np.uint8, (end - begin) * size, offset=self.offset + begin * size)
        if len(data) < (end - begin) * size:
            raise GraftError(f"{self.path.name} ends within {self.name}: expected a complete file; fetch it again")
        plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
        return dequantize(data.reshape(end - begin, size).view(plain.get(self.kind, np.uint8)), self.kind)


def stored(path: Path, model: Any, dtype: torch.dtype) -> dict[str, Stored]:
    """Return the weights of `model` (on any device, "meta" too) that the file has, under the model's names, unread.

    Raises `UnknownWay` where one tensor of the file is not one weight of the model (grouped experts), where the
    architecture is one that transformers itself reads lazily, and for releases of transformers without these tables.
    """
    try:
        import gguf
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )
    except ImportError as error:
        raise UnknownWay(str(error)) from error
    reader = gguf.GGUFReader(path)
    architecture = reader.get_field("general.architecture").contents()
    if _lazy_already(architecture):
        raise UnknownWay(f"transformers reads {architecture} files tensor by tensor itself")
    try:
        tables = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        names = get_gguf_hf_weights_map(model, tables)
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise UnknownWay(str(error)) from error
    found: dict[str, Stored] = {}
    for tensor in reader.tensors:
        if tensor.name in names:
            shape = tuple(reversed(tensor.shape.tolist()))
            undo = _undo(tables, tensor.name, shape)
            place = names[tensor.name]
            found[place] = Stored(path, tensor.name, tensor.tensor_type, shape, tensor.data_offset, undo, dtype)
    lacking = set(model.state_dict()) - set(found) - set(model.all_tied_weights_keys)
    if len(found) < len(reader.tensors) and lacking:  # it may be what becomes of tensors without a place
        raise UnknownWay(f"{min(lacking)} is not one tensor of the file")
    return found


def _lazy_already(architecture: str) -> bool:
    """Say whether transformers has a way of its own for files of an architecture; older releases have none."""
    try:
        from transformers.integrations.gguf import is_gguf_arch_supported
    except ImportError:
        return False
    return bool(is_gguf_arch_supported(architecture))


def _undo(tables: Any, name: str, shape: tuple[int, ...]) -> Callable[[Any], Any] | None:
    """Return what transformers' tables do to the numbers of a tensor, None for nothing."""
    stand_in = np.broadcast_to(np.float32(-1.0), shape)  # takes no memory; the logarithm of its negative is defined
    try:
        result = tables.process(weights=stand_in, name=name)
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownWay(f"{name} is not one weight") from error
    if result.name != name:
        raise UnknownWay(f"{name} is not one weight")
    return None if result.weights is stand_in else lambda numbers: tables.process(weights=numbers, name=name).weights
