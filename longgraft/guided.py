"""A round's proposals where the answer has a grammar: the policy's own, made to fit it.

Knows policies, index and matcher by their seams. The one idea: **what is forced is skipped before anybody is asked**.
If the grammar forces the next tokens, the index is asked what follows behind them, so that one pass takes the forced
tokens and the copied ones together. Plain decoding stays plain, and the fixed trees of `dense`, `pruned` and `paper`
only lose what is forbidden.
"""

from __future__ import annotations

from longgraft.constrain import constrain
from longgraft.graft import graft
from longgraft.matcher import Matcher
from longgraft.sequence import Sequence
from longgraft.tree import Source, TreeBuilder

# Nodes retrieved behind what is forced at the root.
GRAFTED = 32


def guided(seq: Sequence, most: int, vocab_size: int) -> TreeBuilder:
    """Return the proposals of a sequence's policy, as far as its grammar allows them; `most` nodes may be forced."""
    builder, matcher = seq.policy.propose(seq), seq.matcher
    if matcher is None or not (seq.policy.adapts or len(builder) > 1):
        return builder
    matcher.go_to(seq.token_ids)
    if seq.policy.retrieves and seq.policy.adapts:
        builder = _past_forced(builder, seq, matcher, min(most, seq.stop.remaining - 1), vocab_size)
    return constrain(builder, matcher, most if seq.policy.adapts else 0, seq.stop.remaining - 1)


def _past_forced(builder: TreeBuilder, seq: Sequence, matcher: Matcher, most: int, vocab_size: int) -> TreeBuilder:
    """Return a tree that has what is forced at the root, and what the index says follows it, too."""
    forced, node = matcher.forced()[: max(most, 0)], 0
    if not forced:
        return builder
    builder = builder.copy()  # a policy learns from its own
    for token in forced:
        node = builder.add(node, token, 0.0, Source.GRAMMAR)
    found = seq.index.draft(GRAFTED, forced, node)
    graft(builder, [found] if found else [], vocab_size, max_depth=seq.stop.remaining - 1)
    return builder
