"""Hostile and friendly draft sources: stand-ins for the index of one sequence.

Knows `Continuation` only. Each is made with the whole true text of its sequence, prompt and output together,
and given to the engine in place of the index: `Engine(..., index=lambda vocab_size: SOURCES[name](truth))`.
Whatever a source proposes, the output may not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from longgraft.tree import Continuation, Source
from tests.models import VOCAB

Row = tuple[int, int, float]  # token, parent (an earlier entry, or -1), score


class ScriptedIndex:
    """An index that knows the whole text in advance, and proposes what `rows` makes of it.

    `truth` is prompt and output together; beyond its end nothing is known. `is_flat` gives all entries one score.
    """

    def __init__(self, truth: Sequence[int], *, is_flat: bool = False) -> None:
        self.truth = [int(token) for token in truth]
        self.is_flat = is_flat
        self.length = 0

    def begin(self, prompt_len: int | None = None) -> None:
        pass

    def extend(self, token_ids: npt.ArrayLike, learn: bool = False) -> None:
        self.length += len(np.asarray(token_ids))

    def observe(self, token_ids: npt.ArrayLike, top_ids: npt.ArrayLike) -> None:
        pass

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def reset(self) -> None:
        self.length = 0

    def check_integrity(self) -> str:
        return ""

    @property
    def memory_bytes(self) -> int:
        return 0

    def draft(self, budget: int, path: npt.ArrayLike = (), at: int = 0) -> Continuation | None:
        rows = self.rows(self.length + len(np.asarray(path)), budget)
        if not rows:
            return None
        token_ids, parents, scores = zip(*rows)
        n = len(rows)
        return Continuation(
            np.array(token_ids, np.int32),
            np.array(parents, np.int32),
            np.full(n, -1.0, np.float32) if self.is_flat else np.array(scores, np.float32),
            np.full(n, Source.PROMPT, np.int8),
            np.full((n, 2), -1, np.int32),
            np.full(n, 3, np.int32),
            at,
        )

    def rows(self, position: int, budget: int) -> list[Row]:
        """Return the entries proposed for the text's tokens from `position` on."""
        return _chain(self.truth[position : position + budget])


def _chain(token_ids: Sequence[int]) -> list[Row]:
    return [(token, depth - 1, -0.1 * (depth + 1)) for depth, token in enumerate(token_ids)]


def _other(token: int, by: int = 1) -> int:
    return (token + by) % VOCAB


class Right(ScriptedIndex):
    """Always right."""


class Wrong(ScriptedIndex):
    """Wrong from the first token on, though what is below would be right."""

    def rows(self, position: int, budget: int) -> list[Row]:
        truth = self.truth[position : position + budget]
        return _chain([_other(token) for token in truth[:1]] + truth[1:])


class RightUntil(ScriptedIndex):
    """Right for 0 to 6 tokens, changing from round to round, then wrong."""

    def rows(self, position: int, budget: int) -> list[Row]:
        depth = position * 5 % 7
        truth = self.truth[position : position + budget]
        return _chain(truth[:depth] + [_other(token) for token in truth[depth:]])


class Siblings(ScriptedIndex):
    """The true token is the second or third child at every depth, behind better-scored wrong ones with children."""

    def rows(self, position: int, budget: int) -> list[Row]:
        rows: list[Row] = []
        at, score = -1, 0.0
        for depth, token in enumerate(self.truth[position : position + budget // 5]):
            wrong = [_other(token, 1 + i) for i in range(1 + depth % 2)]
            for i, sibling in enumerate(wrong):
                rows.append((sibling, at, score - 0.1 - 0.05 * i))
                rows.append((token, len(rows) - 1, score - 0.3))
            score -= 0.4
            rows.append((token, at, score))
            at = len(rows) - 1
        return rows


class Duplicates(ScriptedIndex):
    """The true token twice under every parent; one copy leads on rightly, the other wrongly, the better one in turn."""

    def rows(self, position: int, budget: int) -> list[Row]:
        rows: list[Row] = []
        at = -1
        for depth, token in enumerate(self.truth[position : position + budget // 3]):
            first, second = (-0.3, -0.2) if depth % 2 else (-0.2, -0.3)
            rows += [(token, at, first - depth), (token, at, second - depth)]
            rows.append((_other(token), len(rows) - 2, -0.35 - depth))
            at = len(rows) - 2
        return rows


class Empty(ScriptedIndex):
    """Has nothing to say."""

    def rows(self, position: int, budget: int) -> list[Row]:
        return []


class Sometimes(ScriptedIndex):
    """Right, but silent every other time: plain rounds between tree rounds."""

    def rows(self, position: int, budget: int) -> list[Row]:
        return [] if position % 2 else _chain(self.truth[position : position + min(budget, 3)])


class Zeros(ScriptedIndex):
    """Token id 0 everywhere: a chain of it, and as a child of every true token."""

    def rows(self, position: int, budget: int) -> list[Row]:
        rows = _chain([0] * (budget // 3))
        at = -1
        for depth, token in enumerate(self.truth[position : position + budget // 3]):
            rows += [(0, at, -0.05 - 0.1 * depth), (token, at, -0.1 - 0.1 * depth)]
            at = len(rows) - 1
        return rows


class OutOfVocabulary(ScriptedIndex):
    """Ids no target knows, beside true tokens and above them; the engine must drop them and all below them."""

    def rows(self, position: int, budget: int) -> list[Row]:
        rows: list[Row] = []
        at = -1
        strangers = (VOCAB, -1, 2**31 - 1, -(2**31))
        for depth, token in enumerate(self.truth[position : position + budget // 3]):
            rows.append((strangers[depth % 4], at, -0.1 * depth - 0.01))
            rows.append((token, len(rows) - 1, -0.1 * depth - 0.02))
            rows.append((token, at, -0.1 * (depth + 1)))
            at = len(rows) - 1
        return rows


class OnlyOutOfVocabulary(ScriptedIndex):
    """Nothing but ids no target knows."""

    def rows(self, position: int, budget: int) -> list[Row]:
        return _chain([VOCAB + i for i in range(budget)])


class VeryLong(ScriptedIndex):
    """Many times the budget: all of the remaining text, then as much that is wrong."""

    def rows(self, position: int, budget: int) -> list[Row]:
        return _chain(self.truth[position:] + [_other(i * 37) for i in range(8 * budget)])


class RandomTree(ScriptedIndex):
    """A random tree of random tokens, the true ones among them."""

    def rows(self, position: int, budget: int) -> list[Row]:
        rng = np.random.default_rng(position)
        rows: list[Row] = []
        depths: list[int] = []
        for entry in range(int(rng.integers(0, budget + 1))):
            parent = int(rng.integers(-1, entry))
            depth = 0 if parent < 0 else depths[parent] + 1
            known = self.truth[position + depth : position + depth + 1]
            token = known[0] if known and rng.random() < 0.6 else int(rng.integers(0, VOCAB))
            depths.append(depth)
            rows.append((token, parent, (rows[parent][2] if parent >= 0 else 0.0) - float(rng.random())))
        return rows


_CLASSES: dict[str, type[ScriptedIndex]] = {
    "right": Right,
    "wrong": Wrong,
    "right_until": RightUntil,
    "siblings": Siblings,
    "duplicates": Duplicates,
    "empty": Empty,
    "sometimes": Sometimes,
    "zeros": Zeros,
    "out_of_vocabulary": OutOfVocabulary,
    "only_out_of_vocabulary": OnlyOutOfVocabulary,
    "very_long": VeryLong,
    "random": RandomTree,
}


def _flat(kind: type[ScriptedIndex]) -> Callable[[Sequence[int]], ScriptedIndex]:
    return lambda truth: kind(truth, is_flat=True)


SOURCES: dict[str, Callable[[Sequence[int]], ScriptedIndex]] = {
    **_CLASSES,
    **{f"{name}_flat": _flat(_CLASSES[name]) for name in ("siblings", "duplicates", "random")},
}
