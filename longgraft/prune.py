"""Prune: grow the draft tree level by level, and stop where the drafter is unsure.

Knows drafters by their seam and trees; no model, no index, no cost. The one idea: **pruning is no longer asking**. A
gate sees the nodes that would be expanded next and says whether one more draft pass is made; nothing drafted is ever
thrown away for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.draft.base import Draft
from longgraft.tree import Level, Source, TreeBuilder

# gate(depth, tree, frontier): depth 0 are the root's children; frontier: the nodes to be expanded next, best first, of
# equal ones the one drafted first; empty if the drafter had nothing to say. True: one more draft pass, please.
Gate = Callable[[int, TreeBuilder, Sequence[int]], bool]
_VERSION = "longgraft_gates"


def always(depth: int, tree: TreeBuilder, frontier: Sequence[int]) -> bool:
    """Ask for every level."""
    return True


def grow(
    draft: Draft,
    builder: TreeBuilder,
    depth: int,
    width: int,
    gate: Gate = always,
    *,
    vocab_size: int | None = None,
) -> int:
    """Grow EAGLE-2's beam below the root and return the number of draft passes made.

    The first pass gives `width` children of the root; then up to `depth` times the `width` best new nodes of the last
    level by path log-probability get `width` children each: width + depth * width**2 proposals at most (a depth of -1
    asks for nothing). `gate` is asked after every level that may be followed by another. Tokens outside `vocab_size`
    are left out.
    """
    frontier = [0]
    for level in range(depth + 1):
        new = add_level(builder, draft.expand(builder, frontier, width), vocab_size)
        # sorted() is stable: of equal scores, the one that was drafted first.
        frontier = sorted(new, key=lambda node: -builder.scores[node])[:width]
        if level == depth or not gate(level, builder, frontier) or not frontier:
            return level + 1
    return 0


def add_level(builder: TreeBuilder, level: Level, vocab_size: int | None = None) -> list[int]:
    """Add what a draft pass proposed, with source DRAFT, and return the nodes that were not there before.

    Left out are tokens outside the vocabulary and scores that are no finite number. Raises `ValueError` for a parent
    that is not in the tree.
    """
    before = len(builder)
    if len(level.parents) and not 0 <= level.parents.min() <= level.parents.max() < before:
        raise ValueError(f"draft: parents {level.parents.min()} to {level.parents.max()} for a tree of {before} nodes")
    for token, parent, score in zip(level.token_ids.tolist(), level.parents.tolist(), level.scores.tolist()):
        is_known = token >= 0 and (vocab_size is None or token < vocab_size)
        if is_known and math.isfinite(score):
            builder.add(parent, token, builder.scores[parent] + score, Source.DRAFT)
    return list(range(before, len(builder)))


def best(builder: TreeBuilder, num_nodes: int) -> TreeBuilder:
    """Return a builder of the `num_nodes` best nodes, root included: prefix-closed, see `TreeBuilder.build`."""
    tree = builder.build(num_nodes)
    kept = TreeBuilder(int(tree.token_ids[0]))
    for node in range(1, len(tree)):
        origin = (int(tree.origins[node, 0]), int(tree.origins[node, 1]))
        token, score = int(tree.token_ids[node]), float(tree.scores[node])
        kept.add(int(tree.parents[node]), token, score, int(tree.sources[node]), origin)
    return kept


@dataclass(frozen=True, slots=True)
class Gates:
    """Where the paper's method (arXiv 2605.20104) looks at a draft tree, and what it then does.

    After the level of depth `checkpoints[s]` (0: the root's children), drafting stops if the best path of that level
    is less probable than `thresholds[s]`; of `shares[-1]` rows (the root counted) the best `shares[s]` drafted ones are
    then verified. `shares[-1]` is the whole budget: what a tree that was never pruned gets. `depth` and `width` are the
    beam's, EAGLE's own defaults (total_token 60, depth 7, top_k 10).

    Checkpoints and shares are the paper's. Its thresholds are calibrated for each drafter and not public: 0.35, 0.25
    and 0.15 are those of DARTree, an open re-implementation; `python -m longgraft.eval.calibrate_gates` finds others.
    """

    checkpoints: tuple[int, ...] = (0, 1, 5)
    shares: tuple[int, ...] = (8, 24, 40, 60)
    thresholds: tuple[float, ...] = (0.35, 0.25, 0.15)
    depth: int = 7
    width: int = 10

    def __post_init__(self) -> None:
        for name in ("checkpoints", "shares"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name), int, "whole numbers"))
        object.__setattr__(self, "thresholds", _tuple("thresholds", self.thresholds, Real, "numbers"))
        counts = len(self.checkpoints), len(self.shares) - 1, len(self.thresholds)
        _check(len(set(counts)) == 1, f"gates: {counts[0]} checkpoints, {counts[1]} + 1 shares, {counts[2]} thresholds")
        _check(min((0, *self.checkpoints)) == 0 and _rises(self.checkpoints), "gates: checkpoints must rise from 0 on")
        _check(self.shares[0] >= 1 and _rises(self.shares), "gates: shares must rise from 1 (the root) on")
        _check(all(0 <= t < math.inf for t in self.thresholds), "gates: thresholds must be probabilities, 0 or more")
        for name in ("depth", "width"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            _check(is_whole and value >= 1, f"gates: {name} is {value!r}: expected 1 or more")

    @property
    def rows(self) -> int:
        """Rows verified a round, root included."""
        return self.shares[-1]

    def save(self, path: str | Path, **notes: Any) -> None:
        """Write them as JSON, beside `notes` on how they were found."""
        Path(path).write_text(json.dumps({_VERSION: 1, **asdict(self), "notes": notes}, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Gates:
        """Read them from JSON; what a file leaves out is the paper's. Anything else is one `GraftError`."""
        try:
            document: Any = json.loads(Path(path).read_text("utf-8"))
            if not isinstance(document, dict) or document.pop(_VERSION, None) != 1:
                raise ValueError("version")
            document.pop("notes", None)
            return cls(**document)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise GraftError(f"gates {path}: expected longgraft gates of version 1 ({error})") from error


class ConfidenceGate:
    """The paper's gate, for one round: asks at the checkpoints only and remembers at which one it pruned.

    `stage` is the number of that checkpoint, or len(checkpoints) if drafting was never cut short. A drafter with
    nothing to say is one whose best path has probability 0 at the next checkpoint.
    """

    def __init__(self, gates: Gates) -> None:
        self.gates = gates
        self.stage = len(gates.checkpoints)

    def __call__(self, depth: int, tree: TreeBuilder, frontier: Sequence[int]) -> bool:
        """Tell whether the level after `depth` is drafted."""
        gates = self.gates
        if not frontier:
            self.stage = sum(checkpoint < depth for checkpoint in gates.checkpoints)
            return False
        if depth not in gates.checkpoints:
            return True
        number = gates.checkpoints.index(depth)
        if math.exp(tree.scores[frontier[0]]) >= gates.thresholds[number]:
            return True
        self.stage = number
        return False


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise GraftError(message)


def _tuple(name: str, values: Any, kind: type, wanted: str) -> tuple[Any, ...]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    fits = is_list and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
    _check(fits, f"gates: {name} are {values!r}: expected a list of {wanted}")
    return tuple(values)


def _rises(values: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(values))
