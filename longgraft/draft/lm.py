"""A smaller language model as drafter: any causal LM with the target's tokenizer.

Knows its own model, cache and costs; not the target, not retrieval, and not which nodes are worth asking about. It
reads lazily: nothing until it is asked, then whatever was committed meanwhile in the same pass. Behind a long text it
reads the first few tokens and the last `window` only, at contiguous positions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft.cache import SequenceCache
from longgraft.config import GraftError
from longgraft.cost import CostTable
from longgraft.draft.base import Draft
from longgraft.kernels.top_ids import top_ids
from longgraft.measure import measure_costs
from longgraft.sequence import Sequence
from longgraft.target import Segment, Target
from longgraft.tree import Acceptance, IntArray, Level, TreeBuilder, Verification

# First tokens kept in front of a window: what attention falls back on (StreamingLLM, arXiv 2309.17453, keeps 4).
SINKS = 4
WINDOW = 256
# So many committed tokens are read in the pass that drafts; more are read before it, without logits.
MAX_CAUGHT_UP = 8
READING_ROWS = 512
# Room kept behind the text for the nodes of a round; they lie side by side, so their positions need far less.
TREE_ROWS = 64
# Sequences that the pool holds at once; one beyond them drafts nothing.
MAX_SEQUENCES = 8


@dataclass
class _Text:
    """What was read of one sequence: rows 0 .. of `cache` hold the sinks and then the tokens from `start` on.

    `rows[row, token]`: reserved row of a node by its parent's row and its token; `pending`: reserved rows that hold
    committed tokens, the root last.
    """

    cache: SequenceCache
    start: int = 0
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    pending: int = 0

    @property
    def read(self) -> int:
        """How many tokens of the text were read, or are left out for good."""
        return self.cache.length if not self.start else self.start + self.cache.length - SINKS


class ModelDrafter:
    """Drafts with a loaded causal LM; raises `GraftError` if that cannot run behind our attention."""

    feature_layers: tuple[int, ...] = ()
    feature_window = 0

    def __init__(self, model: Any, vocab_size: int, *, window: int = WINDOW, cost: CostTable | None = None) -> None:
        """`vocab_size`: the target's. `window`: tokens read of a longer text. `cost`: of its passes (None: measure)."""
        if window < 1:
            raise GraftError(f"window of the drafter is {window}: expected 1 token or more")
        self.model = Target(model)
        self.vocab_size = min(vocab_size, self.model.vocab_size)
        limit = self.model.context_limit or 2 * window + SINKS
        self.window = min(window, max(1, limit // 2 - SINKS))
        self.max_rows = min(2 * self.window + SINKS, limit)
        self.chunks = -(-(self.max_rows + 2 * TREE_ROWS) // 256)
        self.pool = self.model.new_pool(MAX_SEQUENCES * self.chunks)
        with self.model.session():
            self.cost = cost or measure_costs(self.model, self.pool, (128, self.max_rows))

    @property
    def cost_table(self) -> CostTable:
        """What passes of the model cost."""
        return self.cost

    def session(self) -> AbstractContextManager[None]:
        """Run the model with our attention and linear kernels."""
        return self.model.session()

    def prefill(self, sequence: Sequence, first: int, features: Tensor) -> None:
        """Do nothing: it reads tokens, when it is asked."""

    def begin(self, sequence: Sequence) -> Draft | None:
        """Begin a round; None if its cache has no room or the text holds tokens it does not know."""
        state = sequence.draft_state = sequence.draft_state or _Text(SequenceCache(self.pool))
        state.cache.truncate(state.cache.length)
        tokens = sequence.token_ids
        if (
            state.cache.length + len(tokens) - state.read + TREE_ROWS > self.max_rows
            or len(tokens) - state.read > self.window
        ):
            state.cache.truncate(0)
            state.start = max(0, len(tokens) - self.window) if len(tokens) > self.window + SINKS else 0
        left = (
            tokens[state.read :] if state.cache.length else tokens[: SINKS * bool(state.start)] + tokens[state.start :]
        )
        has_room = self.pool.num_free + len(state.cache.chunks) >= self.chunks
        if max(left) >= self.model.vocab_size or not has_room:
            return None
        return _Draft(self, state, np.asarray(left, np.int32))

    def extend(self, sequence: Sequence, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        """Keep the rows of committed tokens that were read while drafting; the new root stays unread."""
        state: _Text | None = sequence.draft_state
        if state is None or not state.pending:
            return
        row, kept = state.pending - 1, list(range(state.pending))
        for token in token_ids[:-1]:
            if (row, token) not in state.rows:
                break
            row = state.rows[row, token]
            kept.append(row)
        state.cache.keep(kept)
        state.rows, state.pending = {}, 0

    def reset(self, sequence: Sequence) -> None:
        """Forget a sequence and give its rows back."""
        if sequence.draft_state is not None:
            sequence.draft_state.cache.release()
            sequence.draft_state = None


class _Draft:
    """One round: the first pass reads what is left of the text together with the nodes."""

    in_one_pass = True

    def __init__(self, drafter: ModelDrafter, state: _Text, left: IntArray) -> None:
        self.drafter, self.state, self.left = drafter, state, left
        state.rows, state.pending = {}, 0
        # Of each node asked about: its reserved row, and those of its ancestors and itself.
        self.seen: dict[int, list[int]] = {}

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        """Return what the next pass is expected to take, reading what is left of the text included."""
        read_before, in_pass = (0, min(len(self.left), 1)) if caught_up else self._split()
        length, cost = self.state.cache.length, self.drafter.cost
        seconds = float(cost.rounds(in_pass - bool(in_pass) + rows, length + read_before)[-1])
        for first in range(0, read_before, READING_ROWS):
            rows = min(READING_ROWS, read_before - first)
            seconds += float(cost.rounds(rows, length + first)[-1])
        return seconds

    def expand(self, tree: TreeBuilder, nodes: Seq[int], width: int) -> Level:
        """Ask the model about nodes; see `Draft`."""
        read_before, in_pass = self._split()
        cache, model = self.state.cache, self.drafter.model
        if read_before:
            model.prefill(cache, self.left[:read_before], READING_ROWS)
        begin = time.perf_counter()
        segment = self._segment(tree, nodes, self.left[len(self.left) - in_pass :])
        logits = model.forward([segment])[0][-len(nodes) :]
        self.left = self.left[:0]
        level = self._level(tree, nodes, logits, width)
        self.drafter.cost.learn(len(segment.token_ids), cache.length, time.perf_counter() - begin)
        return level

    def _split(self) -> tuple[int, int]:
        """Return how many tokens are read before the pass, and how many in it (the root among them)."""
        read_before = len(self.left) - 1 if len(self.left) > MAX_CAUGHT_UP else 0
        return read_before, len(self.left) - read_before

    def _segment(self, tree: TreeBuilder, nodes: Seq[int], committed: IntArray) -> Segment:
        """Lay committed tokens and nodes out behind the rows of earlier passes; the root is the last committed."""
        cache, state, first = self.state.cache, self.state, self.state.cache.reserved if self.seen else 0
        if not self.seen:
            state.pending = len(committed)
            self.seen[0] = list(range(len(committed)))
        fresh = [node for node in nodes if node not in self.seen]
        for row, node in enumerate(fresh, first + len(committed)):
            above = self.seen[tree.parents[node]]
            self.seen[node] = [*above, row]
            state.rows[above[-1], tree.token_ids[node]] = row
        tokens = np.array([*committed.tolist(), *(tree.token_ids[node] for node in fresh)], np.int32)
        seen = [list(range(i + 1)) for i in range(len(committed))] + [self.seen[node] for node in fresh]
        mask = np.zeros((len(tokens), first + len(tokens)), np.bool_)
        for i, columns in enumerate(seen):
            mask[i, columns] = True
        positions = np.array([cache.length + len(columns) - 1 for columns in seen], np.int32)
        return Segment(cache, tokens, positions, mask, earlier=first)

    def _level(self, tree: TreeBuilder, nodes: Seq[int], logits: Tensor, width: int) -> Level:
        """Return the likeliest children of each node, and those it has already."""
        known = logits[:, : self.drafter.vocab_size].float()
        norms = torch.logsumexp(known, dim=-1).tolist()
        best = top_ids(known, min(width, known.shape[-1])).tolist()
        tokens, parents = list[int](), list[int]()
        rows = list[int]()
        for row, (node, top) in enumerate(zip(nodes, best)):
            there = [tree.token_ids[child] for child in tree.children[node]]
            wanted = [*top, *(t for t in there if t not in top and t < known.shape[-1])]
            tokens += wanted
            parents += [node] * len(wanted)
            rows += [row] * len(wanted)
        scores = known[rows, tokens].cpu().numpy() - np.array(norms)[rows]
        return Level(np.array(tokens, np.int32), np.array(parents, np.int32), scores.astype(np.float32))
