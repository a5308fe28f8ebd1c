"""Verify: one target pass over the trees of a batch."""

from collections.abc import Sequence as Seq

import numpy as np

from longgraft.cache import SequenceCache
from longgraft.features import Features
from longgraft.sequence import Sequence
from longgraft.target import Segment, Target
from longgraft.tree import TokenTree, Verification


def verify(
    target: Target, batch: Seq[Sequence], trees: Seq[TokenTree], features: Features | None = None
) -> list[Verification]:
    """Run the target once over all trees; K/V rows land behind each prefix, uncommitted.

    Returns one `Verification` a sequence, logits for every node, and hidden states where `features` takes them. All
    sequences of a batch are in one RoPE regime.
    """
    segments = [segment_of(seq.cache, tree) for seq, tree in zip(batch, trees)]
    logits = target.forward(segments, long_rope=batch[0].long_rope, features=features)
    results, first = list[Verification](), 0
    for tree, rows in zip(trees, logits):
        states = features.rows(first, first + len(tree)) if features else None
        results.append(Verification(tree, rows, states, np.arange(len(tree), dtype=np.int32)))
        first += len(tree)
    return results


def segment_of(cache: SequenceCache, tree: TokenTree) -> Segment:
    """Lay a tree out as the new rows behind a cache's prefix; a chain needs no mask."""
    mask = None if tree.is_chain else tree.ancestor_mask()
    return Segment(cache, tree.token_ids, tree.positions(cache.length), mask)
