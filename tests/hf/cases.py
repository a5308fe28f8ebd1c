"""What the tests of the drop-in share: a run length, a way to read results, and an observer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longgraft.config import EngineConfig

PLAIN = EngineConfig(policy="plain")
NEW = 16


def new_ids(output: Tensor, prompt: Tensor) -> list[list[int]]:
    return output[:, prompt.shape[1] :].tolist()


class Seen:
    """A streamer, a processor and a criterion that write down what they are shown."""

    def __init__(self, last: Callable[[Tensor], bool] = lambda ids: False) -> None:
        self.puts: list[list[Any]] = []
        self.rows: list[list[int]] = []
        self.is_ended = False
        self._last = last

    def put(self, value: Tensor) -> None:
        assert not self.is_ended
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.is_ended = True

    def process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        self.rows += input_ids.tolist()
        return scores

    def criterion(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.rows += input_ids.tolist()
        return torch.tensor([self._last(row) for row in input_ids])
