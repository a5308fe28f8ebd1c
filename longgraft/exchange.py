"""Other forwards for some modules of a model, for as long as a context lasts.

Knows no kernel and no architecture. The one idea: an instance's `forward` hides its class's; so the model keeps its
modules, weights and hooks, and has its own computation back the moment the last context on a module closes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch import nn

_ENTRY = threading.Lock()  # two engines may open and close contexts on one model at once


class Forward:
    """A module's `forward` while at least one context holds it; `holders` counts them."""

    __slots__ = ("holders", "layer")

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.holders = 0

    def own(self, *inputs: Any, **options: Any) -> Any:
        """Compute what the module's class would."""
        return type(self.layer).forward(self.layer, *inputs, **options)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Compute the module; whoever stands in overrides it."""
        return self.own(*inputs, **options)


Planned = tuple[nn.Module, Callable[[], Forward | None]]
"""A module, and what makes the forward it gets, or None where it shall keep its own."""


class Exchange:
    """A context in which modules have the forwards `planned` for them.

    May be entered repeatedly and nested, and contexts on one module may overlap; a module that has a forward of its
    own on entry is left alone.
    """

    def __init__(self, planned: Sequence[Planned]) -> None:
        self._planned = tuple(planned)
        self._held: list[list[Forward]] = []

    def __enter__(self) -> Any:
        """Give each module its forward."""
        held = []
        with _ENTRY:
            for layer, make in self._planned:
                forward = layer.__dict__.get("forward")
                if forward is None:
                    forward = make()
                    if forward is not None:
                        layer.forward = forward
                if isinstance(forward, Forward):
                    forward.holders += 1
                    held.append(forward)
        self._held.append(held)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back what the matching entry took."""
        with _ENTRY:
            for forward in self._held.pop():
                forward.holders -= 1
                if forward.holders == 0 and forward.layer.__dict__.get("forward") is forward:
                    del forward.layer.forward


def is_watched(module: nn.Module) -> bool:
    """Say whether somebody has hooks on the module, or gave it a forward that is not ours."""
    forward = module.__dict__.get("forward")
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or (forward is not None and not isinstance(forward, Forward))
    )
