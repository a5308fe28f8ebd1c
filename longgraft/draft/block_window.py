"""The target's features of the last committed tokens, and which of them a drafter has taken in.

Knows positions and tensors; no model. The one idea: the drafter's context is a window of the text that begins
anywhere and whose rows are numbered from 0. When it is full it begins again, from the last rows, so a text of any
length stays within the positions the drafter was trained on and within bounded memory.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class FeatureWindow:
    """Keeps at least the last `window` rows of features (if so many are known) and counts how many are new.

    A context holds at most `capacity` rows (window < capacity).
    """

    def __init__(self, window: int, capacity: int) -> None:
        self.window = window
        self.capacity = capacity
        self.end = 0
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._chunks: deque[Tensor] = deque()
        self.kept = 0
        self.lag = 0
        self.taken: int | None = None

    def append(self, first: int, features: Tensor) -> None:
        """Take in `features [n, F]` of tokens at positions first, first + 1, ...; a gap forgets what was before it."""
        if first != self.end:
            self.clear()
        self.end = first + len(features)
        if not len(features):
            return
        if len(features) > self.window:
            self.clear()
            features = features[-self.window :].clone()  # a slice alone would keep the whole chunk alive
        self._chunks.append(features)
        self.kept += len(features)
        self.lag += len(features)
        while self.kept - len(self._chunks[0]) >= self.window:
            self.kept -= len(self._chunks.popleft())

    @property
    def must_restart(self) -> bool:
        """True if the next rows go into a new context: there is none, it is full, or rows in between are gone."""
        return self.taken is None or self.lag > self.kept or self.taken + self.lag > self.capacity

    @property
    def held(self) -> int:
        """How many rows the context holds that the next pass builds on."""
        return 0 if self.must_restart else int(self.taken or 0)

    @property
    def next_rows(self) -> int:
        """How many rows the next `take` returns."""
        return min(self.kept, self.window) if self.must_restart else self.lag

    def take(self) -> tuple[Tensor, bool]:
        """Return the rows to take in now `[n, F]` (n may be 0) and whether they begin a new context."""
        restart, count = self.must_restart, self.next_rows
        rows = self._last(count)
        self.taken = count if restart or self.taken is None else self.taken + count
        self.lag = 0
        return rows, restart

    def _last(self, count: int) -> Tensor:
        """Return the last `count` rows known; at least one row is."""
        found: list[Tensor] = []
        missing = count
        for chunk in reversed(self._chunks):
            if missing <= 0:
                break
            found.append(chunk[-missing:] if missing < len(chunk) else chunk)
            missing -= len(found[-1])
        return torch.cat(found[::-1]) if found else self._chunks[-1][:0]
