"""What earlier requests were answered, for later ones of the same tenant to copy from.

Knows token ids and names of tenants. Opt-in, bounded in tokens over all tenants, least recently used first; one
tenant's text never reaches another's request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class History:
    """Answers by tenant, at most `max_tokens` tokens in all."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._answers: OrderedDict[tuple[str, tuple[int, ...]], None] = OrderedDict()

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Keep an answer; the oldest go until all fit. One that is too long by itself keeps its last tokens."""
        key = (tenant, tuple(token_ids[-self.max_tokens :]) if self.max_tokens else ())
        if not key[1]:
            return
        if key not in self._answers:
            self.num_tokens += len(key[1])
        self._answers[key] = None
        self._answers.move_to_end(key)
        while self.num_tokens > self.max_tokens:
            (_, dropped), _ = self._answers.popitem(last=False)
            self.num_tokens -= len(dropped)

    def of(self, tenant: str) -> list[tuple[int, ...]]:
        """Return a tenant's answers, oldest first; they count as used now."""
        keys = [key for key in self._answers if key[0] == tenant]
        for key in keys:
            self._answers.move_to_end(key)
        return [token_ids for _, token_ids in keys]

    def forget(self, tenant: str) -> None:
        """Drop all of a tenant's answers."""
        for key in [key for key in self._answers if key[0] == tenant]:
            del self._answers[key]
            self.num_tokens -= len(key[1])
