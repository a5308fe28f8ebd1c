"""A model that writes what a test wants, through the engine's own sampler: whatever it would say, one token is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from transformers import LogitsProcessor

from longgraft.engine import Engine


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
    """Let every engine answer with this text; then `<|start|>` (0), which ends it, or the text's last token for ever."""
    true_open = Engine.open

    def opened(self: Engine, prompt_ids: list[int], params: Any, *more: Any, **options: Any) -> Any:
        ids = self.tokenizer(answer, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        script = Script(len(prompt_ids), [*ids, 0] if end else ids)
        return true_open(self, prompt_ids, replace(params, processors=(script,), eos_token_ids=(0,)), *more, **options)

    with patch.object(Engine, "open", opened):
        yield
