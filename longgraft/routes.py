"""Records which experts a mixture-of-experts model chose, so that a change of experts can be told from a wrong result.

Knows torch modules by their class names; nothing of the engine. A router picks the k best of its scores: two
experts that tie within rounding may swap, and then the logits move by far more than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# How transformers names its router modules.
_ROUTER_NAMES = ("Router", "Gating", "MoEGate", "MoEV1Gate")


class Routes:
    """Which experts the routers of a mixture-of-experts model chose; nothing on any other model.

    `taken`: per recorded forward, per router, the set of experts of each row.
    """

    def __init__(self, model: Any) -> None:
        self.modules: list[nn.Module] = [m for m in model.modules() if type(m).__name__.endswith(_ROUTER_NAMES)]
        self.taken: list[list[list[frozenset[int]]]] = []
        self._top_k = int(getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1)

    @contextmanager
    def first_rows(self, rows: int) -> Iterator[None]:
        """Record the first `rows` rows of the forward inside."""
        chosen: list[list[frozenset[int]]] = []

        def note(module: nn.Module, args: Any, output: Any) -> None:
            chosen.append([frozenset(row.tolist()) for row in self._indices(output)[:rows]])

        hooks = [module.register_forward_hook(note) for module in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.taken.append(chosen)

    def _indices(self, output: Any) -> Tensor:
        """Return the chosen experts `[rows, k]` of a router's output: its integers, else its best scores."""
        parts = [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, Tensor)]
        whole = [part for part in parts if not part.is_floating_point()]
        found = whole[0] if whole else parts[0].topk(self._top_k, dim=-1).indices
        return found.reshape(-1, found.shape[-1])

    def by_row(self) -> list[tuple[frozenset[int], ...]]:
        """Return every recorded row's experts, one set a router, in the order the rows came."""
        return [row for chosen in self.taken for row in zip(*chosen)]
