"""Runs transformers' own DFlash drafter classes as one of our networks.

Knows transformers' calling convention (`noise_embeds`, `context_hidden_states`, a `DFlashCache`), as its
`DFlashTokenCandidateGenerator` uses it; nothing of rounds. In transformers 5.24 one class has it:
`MuseGlimmerAssistantModel`. The one idea: the same two calls as `BlockModel`, so that the drafter does not know which
it has.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from longgraft.config import GraftError

_ARGUMENTS = {"noise_embeds", "context_hidden_states", "position_ids", "cache"}


class NativeContext:
    """A `DFlashCache` and how many of its rows are context; the last block's rows are still in it."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.length = 0
        self.stale = 0


class NativeNet(torch.nn.Module):
    """One of transformers' drafter models."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        arguments = inspect.signature(type(model).forward).parameters
        # Wrapped forwards (a renamed argument, say) still show their own signature through functools.wraps.
        if not set(arguments) >= _ARGUMENTS:
            raise GraftError(
                f"{type(model).__name__} is no block drafter: expected a transformers class whose forward takes "
                f"{', '.join(sorted(_ARGUMENTS))}"
            )
        self.model = model
        self.max_positions = int(model.config.max_position_embeddings)

    def open(self) -> NativeContext:
        """Return an empty context."""
        from transformers.cache_utils import DFlashCache

        cache = DFlashCache(config=self.model.config)
        cache.activate_past_recording()
        return NativeContext(cache)

    def run(self, context: NativeContext, block: Tensor, features: Tensor) -> Tensor:
        """Take `features [n, F]` into the context and return the states of `block [B, H]`; see `BlockModel.run`."""
        context.cache.set_previous_accepted_tokens(len(features))
        if context.stale:
            context.cache.crop(-context.stale)
        first = context.length
        positions = torch.arange(first, first + len(features) + len(block), device=block.device)
        output = self.model(
            noise_embeds=block[None],
            context_hidden_states=features[None],
            position_ids=positions[None],
            attention_mask=None,
            cache=context.cache,
        )
        context.length, context.stale = first + len(features), len(block)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def load_native(folder: str, target_model: Any) -> NativeNet:
    """Load a drafter of a class transformers has, on the target's device and in its dtype; no remote code."""
    from transformers import AutoModel

    options: dict[str, Any] = {"dtype": target_model.dtype, "output_loading_info": True, "trust_remote_code": False}
    options["ignore_mismatched_sizes"] = True  # so that they are reported here, by name
    try:
        model, found = AutoModel.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise GraftError(f"transformers cannot load it: {' '.join(str(error).split())[:300]}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found.get(kind):
            name = sorted(str(key) for key in found[kind])[0]
            raise GraftError(
                f"its weights do not fit {type(model).__name__}: {kind.replace('_', ' ')}, {name} among them"
            )
    hidden = target_model.get_input_embeddings().weight.shape[1]
    if model.config.hidden_size != hidden:
        raise GraftError(
            f"hidden_size is {model.config.hidden_size}, the target's {hidden}: it was made for another target"
        )
    return NativeNet(model.to(target_model.device).eval())
