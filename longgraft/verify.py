"""Verify: one target pass over the trees of a batch."""

from collections.abc import Sequence as Seq

import numpy as np

from longgraft.cache import SequenceCache
from longgraft.sequence import Sequence
from longgraft.target import Segment, Target
from longgraft.tree import TokenTree, Verification


def verify(
    target: Target, batch: Seq[Sequence], trees: Seq[TokenTree], exact_rows: int | None = None
) -> list[Verification]:
    """Run the target once over all trees; K/V rows land behind each prefix, uncommitted.

    Returns one `Verification` a sequence, logits for every node. With `exact_rows` every segment is padded to
    that many rows. All sequences of a batch are in the same RoPE regime.
    """
    segments = [segment_of(seq, tree, exact_rows) for seq, tree in zip(batch, trees)]
    logits = target.forward(segments, long_rope=batch[0].long_rope)
    return [
        Verification(tree, rows[: len(tree)], None, np.arange(len(tree), dtype=np.int32))
        for tree, rows in zip(trees, logits)
    ]


def segment_of(seq: Sequence, tree: TokenTree, exact_rows: int | None = None) -> Segment:
    """Lay a tree out as the new rows of its sequence."""
    if exact_rows is not None:
        return padded(seq.cache, tree, exact_rows)
    mask = None if tree.is_chain else tree.ancestor_mask()
    return Segment(seq.cache, tree.token_ids, tree.positions(seq.cache.length), mask)


def padded(cache: SequenceCache, tree: TokenTree, rows: int) -> Segment:
    """Lay a tree out in exactly `rows` rows: the rest are copies of the root, hung below it and never read."""
    if len(tree) > rows:
        raise ValueError(f"a tree of {len(tree)} nodes does not fit the fixed width of {rows} rows")
    padding = rows - len(tree)
    mask = np.eye(rows, dtype=np.bool_)
    mask[: len(tree), : len(tree)] = tree.ancestor_mask()
    mask[len(tree) :, 0] = True
    token_ids = np.concatenate([tree.token_ids, np.full(padding, tree.token_ids[0], np.int32)])
    positions = np.concatenate([tree.positions(cache.length), np.full(padding, cache.length + 1, np.int32)])
    return Segment(cache, token_ids, positions.astype(np.int32), mask)
