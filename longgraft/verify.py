"""Verify: one target pass over the trees of a batch, and over whatever else has rows in it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from longgraft.cache import SequenceCache
from longgraft.features import Features
from longgraft.target import Segment, Target
from longgraft.tree import TokenTree, Verification


@dataclass(frozen=True, slots=True)
class Rows:
    """What a forward says of one segment: `logits [n, V]` ([0, V] where none are wanted), hidden states or None."""

    logits: Tensor
    states: Tensor | None


def run_segments(
    target: Target, segments: Seq[Segment], long_rope: bool = False, features: Features | None = None
) -> list[Rows]:
    """Run the target once over all segments, and return what it says of each; K/V land behind each prefix, uncommitted.

    All sequences of a forward are in one RoPE regime.
    """
    logits = target.forward(segments, long_rope=long_rope, features=features)
    results, first = list[Rows](), 0
    for segment, rows in zip(segments, logits):
        last = first + len(segment.token_ids)
        results.append(Rows(rows, features.rows(first, last) if features else None))
        first = last
    return results


def verified(tree: TokenTree, rows: Rows) -> Verification:
    """Return what the target says of a tree's nodes; row i belongs to node i."""
    return Verification(tree, rows.logits, rows.states, np.arange(len(tree), dtype=np.int32))


def segment_of(cache: SequenceCache, tree: TokenTree) -> Segment:
    """Lay a tree out as the new rows behind a cache's prefix; a chain needs no mask."""
    mask = None if tree.is_chain else tree.ancestor_mask()
    return Segment(cache, tree.token_ids, tree.positions(cache.length), mask)
