"""Hidden states of some target layers, taken while a forward runs: what a drafter reads besides tokens.

Knows torch modules; no drafter and no round. A hook on each layer keeps its output rows until they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longgraft.config import GraftError


class Features:
    """Takes the outputs of decoder layers `layers` (counted from 0); `rows()` holds those of the last forward."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        self._stack: Any = getattr(decoder, "layers", None)
        if self._stack is None:
            raise GraftError(f"{type(model).__name__}: expected decoder layers to take hidden states from; found none")
        wrong = [layer for layer in self.layers if not 0 <= layer < len(self._stack)]
        if wrong or not self.layers:
            raise GraftError(f"feature layers {self.layers}: expected some of 0 to {len(self._stack) - 1}")
        self._seen: dict[int, Tensor] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the states of every forward inside the block; the last one's stay."""
        hooks = [self._stack[layer].register_forward_hook(self._keep(layer)) for layer in set(self.layers)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def rows(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return `[rows, layers * hidden]` of the last forward's rows first .. last-1, layers side by side."""
        return torch.cat([self._seen[layer][first:last] for layer in self.layers], dim=-1)

    def _keep(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._seen[layer] = (output[0] if isinstance(output, tuple) else output)[0].detach()

        return hook
