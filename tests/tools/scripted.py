"""A model that writes what a test wants, through the engine's own sampler: whatever it would say, one token is left.

And commands that start quickly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from transformers import LogitsProcessor

import longgraft.load
from longgraft.engine import Engine
from tests.engines import cost_of
from tests.saved_model import calm

_loaded = lru_cache(maxsize=8)(longgraft.load.load)


@contextmanager
def quickly() -> Iterator[None]:
    """`calm`, each model read once, and no costs measured: every command of a test loads its model."""
    with calm(), patch("longgraft.load.load", _loaded), patch("longgraft.engine.costs_of", lambda *_: cost_of()):
        yield


class Script(LogitsProcessor):
    """Allows one token at each place behind the prompt; the last one from then on."""

    def __init__(self, prompt_len: int, token_ids: Sequence[int]) -> None:
        self.prompt_len, self.token_ids = prompt_len, list(token_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = min(input_ids.shape[1] - self.prompt_len, len(self.token_ids) - 1)
        only = torch.full_like(scores, -torch.inf)
        only[:, self.token_ids[place]] = 0.0
        return only


@contextmanager
def writing(answer: str, end: bool = True) -> Iterator[None]:
    """Let every engine answer with this text; then `<|start|>` (0), which ends it, or its last token for ever."""
    true_open = Engine.open

    def opened(self: Engine, prompt_ids: list[int], params: Any, *more: Any, **options: Any) -> Any:
        ids = self.tokenizer(answer, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        script = Script(len(prompt_ids), [*ids, 0] if end else ids)
        return true_open(self, prompt_ids, replace(params, processors=(script,), eos_token_ids=(0,)), *more, **options)

    with patch.object(Engine, "open", opened):
        yield
