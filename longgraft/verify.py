"""Verify: one target pass over the trees of a batch."""

from collections.abc import Sequence as Seq

import numpy as np

from longgraft.cache import SequenceCache
from longgraft.sequence import Sequence
from longgraft.target import Segment, Target
from longgraft.tree import TokenTree, Verification


def verify(target: Target, batch: Seq[Sequence], trees: Seq[TokenTree]) -> list[Verification]:
    """Run the target once over all trees; K/V rows land behind each prefix, uncommitted.

    Returns one `Verification` a sequence, logits for every node. All sequences of a batch are in one RoPE regime.
    """
    segments = [segment_of(seq.cache, tree) for seq, tree in zip(batch, trees)]
    logits = target.forward(segments, long_rope=batch[0].long_rope)
    return [Verification(tree, rows, None, np.arange(len(tree), dtype=np.int32)) for tree, rows in zip(trees, logits)]


def segment_of(cache: SequenceCache, tree: TokenTree) -> Segment:
    """Lay a tree out as the new rows behind a cache's prefix; a chain needs no mask."""
    mask = None if tree.is_chain else tree.ancestor_mask()
    return Segment(cache, tree.token_ids, tree.positions(cache.length), mask)
