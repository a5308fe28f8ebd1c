"""Accepts what the target agrees with: the ordinary sampler, asked once per visited node.

Knows the tree, the logits and the sampler; not who proposed a node, and not how drawing works. As proposals
are deterministic, drawing at a node and stepping to the child that holds the drawn token is exact speculative
sampling with q = 1, and the output cannot depend on the proposals. The draw that no child holds is the bonus.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, overload

from longgraft.config import TokenLogprob
from longgraft.sampler import Sampler
from longgraft.tree import Acceptance, Verification


class Ending(Protocol):
    """Knows where a generation ends; `longgraft.stop.StopRules` is the real one."""

    def watch(self) -> Callable[[int], bool]:
        """Return a function that takes the coming tokens one by one and tells whether that one is the last."""


class _Path(Seq[int]):
    """Committed tokens and those accepted after them, read as one sequence without copying either."""

    def __init__(self, committed: Seq[int], accepted: list[int]) -> None:
        self._committed = committed
        self._accepted = accepted

    def __len__(self) -> int:
        return len(self._committed) + len(self._accepted)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        n = len(self._committed)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return [*self._committed[start:stop], *self._accepted[max(start - n, 0) : max(stop - n, 0)]]
        index = index + len(self) if index < 0 else index
        return self._committed[index] if index < n else self._accepted[index - n]


def accept(result: Verification, sampler: Sampler, token_ids: Seq[int], stop: Ending | None = None) -> Acceptance:
    """Draw along the tree until a draw is no child of its node, or is the last token `stop` allows.

    `token_ids` are the committed tokens, the root included. No draw is made beyond what may be committed, so
    processors run exactly once per committed position. `stop` is only watched; nothing is modified but the
    sampler's own state.
    """
    is_last = stop.watch() if stop is not None else _never
    children = result.tree.children()
    path: list[int] = []
    drawn: list[int] = []
    logprobs: list[TokenLogprob] = []
    node: int | None = 0
    text = _Path(token_ids, drawn)
    while node is not None:
        draw = sampler.draw(result.logits[node], text)
        path.append(node)
        drawn.append(draw.token_id)
        if draw.logprob is not None:
            logprobs.append(draw.logprob)
        node = None if is_last(draw.token_id) else children[node].get(draw.token_id)
    return Acceptance(path, drawn, tuple(logprobs))


def _never(token_id: int) -> bool:
    return False
