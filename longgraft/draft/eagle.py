"""EAGLE-3 as drafter: a one-layer head that goes on thinking where the target stopped.

Knows its head, the states the target left and the rows of one round; not the target's cache, not retrieval, and not
which nodes are worth asking about. Row i of a text joins the target's states at token i with token i + 1. Rows of
committed tokens stay; those of a round's nodes, fed with the head's own output, are dropped with the round, since
verification brings the target's own states for whatever is kept. Prompt and committed states are only stored until a
round asks; then keys and values are all that older rows need, so catching up is three matrix products.

A head is trained for so many positions. Positions are counted from the first stored row, and when they run out, the
newest `window` rows are laid out again from position 0: only a branch of more than `TREE_DEPTH` nodes can reach beyond.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft.config import GraftError
from longgraft.cost import CostTable
from longgraft.draft.base import Draft
from longgraft.draft.head import Eagle3Head, Rows, attend
from longgraft.draft.weights import LoadedHead, load_head
from longgraft.kernels.top_ids import top_ids
from longgraft.linear import wide
from longgraft.sequence import Sequence
from longgraft.tree import Acceptance, Level, Source, TreeBuilder, Verification

WINDOW = 1024
# Positions kept free behind the text for a tree's levels; at most a quarter of what the head has.
TREE_DEPTH = 16
# Widths timed behind a short and behind a full window, and how often.
WIDTHS, FULL_WIDTHS, REPEATS = (1, 4, 16, 64), (1, 16), 3


class _Text:
    """What is known of one text: rows 0 .. `rows` - 1 belong to positions `start` .. of the text.

    `inputs [max_rows, H]`: the target's states after `fc`; `keys`, `values [max_rows, Hk, D]`. `waiting`: states
    `[n, F]` of the positions behind, not looked at yet.
    """

    def __init__(self, head: Eagle3Head, start: int, max_rows: int) -> None:
        like, shape = head.fc.weight, head.shape
        self.start, self.rows = start, 0
        self.inputs = like.new_empty(max_rows, shape.hidden)
        self.keys = like.new_empty(max_rows, shape.kv_heads, shape.head_dim)
        self.values = torch.empty_like(self.keys)
        self.waiting: list[Tensor] = []

    @property
    def num_waiting(self) -> int:
        """How many positions wait."""
        return sum(map(len, self.waiting))

    @property
    def end(self) -> int:
        """First position of the text whose states are not here."""
        return self.start + self.rows + self.num_waiting

    def store(self, features: Tensor, most: int, newest: int) -> None:
        """Append states; when more than `most` wait, keep the `newest` and forget all rows."""
        self.waiting.append(features)
        if self.num_waiting > most:
            end = self.end
            self.waiting = [torch.cat(self.waiting)[-newest:]]
            self.start, self.rows = end - newest, 0


@dataclass(frozen=True, slots=True)
class HeadCost:
    """What passes over n nodes behind L rows take (`table`), and reading one committed row (`read`, seconds)."""

    table: CostTable
    read: float


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head."""

    def __init__(self, loaded: LoadedHead, *, window: int = WINDOW, cost: CostTable | None = None) -> None:
        """Draft with a loaded head.

        `window`: prompt rows read of a longer text. `cost`: of passes over n nodes behind L rows (None: measured at
        first use); reading a committed row then counts as a 64th of a pass over 64.
        """
        if window < 1:
            raise GraftError(f"window of the EAGLE-3 head is {window}: expected 1 row or more")
        self.head, self.embed = loaded.head, loaded.embed
        self.target_ids = loaded.target_ids.cpu().numpy()
        self.draft_ids = np.full(loaded.head.shape.vocab, -1, np.int64)
        self.draft_ids[self.target_ids] = np.arange(len(self.target_ids))
        self.feature_layers = loaded.head.shape.layers
        self.max_rows = min(loaded.head.shape.max_positions, 2 * window + TREE_DEPTH)
        self.last_row = self.max_rows - min(TREE_DEPTH, self.max_rows // 4)
        self.feature_window = max(1, min(window, self.last_row // 2))
        self.linear = wide(self.head)
        self._cost = None if cost is None else HeadCost(cost, float(cost.rounds(64, 0)[-1]) / 64)

    @classmethod
    def from_pretrained(cls, name: str, target: Any, **options: Any) -> Eagle3Drafter:
        """Load a head from a folder or hub id for a loaded target model; `GraftError` if it does not fit."""
        return cls(load_head(name, target), **options)

    @property
    def cost(self) -> HeadCost:
        """What this head costs on this machine, measured the first time somebody asks."""
        if self._cost is None:
            self._cost = measured(self)
        return self._cost

    @property
    def cost_table(self) -> CostTable:
        """What passes over nodes cost."""
        return self.cost.table

    def session(self) -> AbstractContextManager[Any]:
        """Run the head's linear layers on our kernel where that is faster."""
        return self.linear

    def prefill(self, sequence: Sequence, first: int, features: Tensor) -> None:
        """Store states of prompt rows."""
        self._store(sequence, first, features)

    def begin(self, sequence: Sequence) -> Draft | None:
        """Begin a round; None where the states up to the root are not there (a prompt of one token)."""
        state: _Text | None = sequence.draft_state
        if state is None or state.end != len(sequence.token_ids) - 1:
            return None
        return _Draft(self, state, sequence.token_ids)

    def extend(self, sequence: Sequence, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        """Store the states behind committed tokens: the target's own, whatever the head had in their place."""
        if token_ids:
            assert result.features is not None, "the target was not asked for hidden states"
            first = len(sequence.token_ids) - len(token_ids) - 1
            self._store(sequence, first, result.features[accepted.path[: len(token_ids)]])

    def reset(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        sequence.draft_state = None

    def learn(self, nodes: int, context: int, seconds: float) -> None:
        """Correct the costs by a pass that was made, if anybody ever asked what one costs."""
        if self._cost is not None:
            self._cost.table.learn(nodes, context, seconds)

    def _store(self, sequence: Sequence, first: int, features: Tensor) -> None:
        state: _Text | None = sequence.draft_state
        if state is None or state.end != first:
            state = sequence.draft_state = _Text(self.head, first, self.max_rows)
        state.store(features, self.last_row, self.feature_window)

    @torch.no_grad()
    def read(self, state: _Text, token_ids: Seq[int]) -> Tensor:
        """Read what waits; return the layer's output at the last row. [1, H]

        Older rows are seen by later ones through their keys and values alone, so only the last one is attended.
        """
        if state.waiting:
            fresh = self.head.combine(torch.cat(state.waiting))
            state.waiting = []
        else:  # a round that begins where the last one did: nothing was committed between
            state.rows -= 1
            fresh = state.inputs[state.rows : state.rows + 1].clone()
        if state.rows + len(fresh) > self.last_row:
            kept = torch.cat([state.inputs[: state.rows], fresh])[-self.feature_window :]
            state.start += state.rows + len(fresh) - len(kept)
            fresh, state.rows = kept, 0
        first, end = state.rows, state.rows + len(fresh)
        rows = self.project(token_ids[state.start + first + 1 : state.start + end + 1], fresh, range(first, end))
        state.inputs[first:end], state.keys[first:end], state.values[first:end] = fresh, rows.key, rows.value
        state.rows = end
        seen = torch.ones(1, end, dtype=torch.bool, device=fresh.device)
        attended = attend(rows.query[-1:], state.keys[:end], state.values[:end], seen)
        return self.head.finish(attended, rows.residual[-1:])

    def project(self, token_ids: Seq[int], features: Tensor, positions: Seq[int]) -> Rows:
        """Begin the layer on rows that join `features [n, H]` with tokens, at positions of the window."""
        ids = torch.as_tensor(token_ids, dtype=torch.long, device=features.device)
        places = torch.as_tensor(positions, dtype=torch.long, device=features.device)
        return self.head.project(torch.nn.functional.embedding(ids, self.embed), features, places)


class _Draft:
    """One round: the root's row is the last committed one; the other nodes' rows lie behind it and go with the round.

    `row_of[node]`: its row in `fed` (what its children are fed) and `hidden`; the root's is 0. `above[row]`: the rows
    of its ancestors and itself without the root; row i's keys and values are the (i - 1)th.
    """

    in_one_pass = False

    def __init__(self, drafter: Eagle3Drafter, state: _Text, token_ids: Seq[int]) -> None:
        self.drafter, self.state, self.token_ids = drafter, state, token_ids
        self.row_of: dict[int, int] = {}
        self.above: list[list[int]] = [[]]
        self.hidden = state.inputs[:0]
        self.keys, self.values = state.keys[:0], state.values[:0]

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        """Return what the next pass is expected to take; reading what waits is included unless `caught_up`."""
        drafter, state, cost = self.drafter, self.state, self.drafter.cost
        waiting = state.num_waiting
        fits = state.rows + waiting <= drafter.last_row
        context, to_read = (state.rows + waiting, waiting) if fits else (drafter.feature_window, drafter.feature_window)
        seconds = float(cost.table.rounds(rows, context)[-1])
        return seconds if caught_up else seconds + max(0, to_read - 1) * cost.read

    @torch.no_grad()
    def expand(self, tree: TreeBuilder, nodes: Seq[int], width: int) -> Level:
        """Ask the head about nodes; see `Draft`. Tokens outside the draft vocabulary get no entry."""
        begin, read = time.perf_counter(), self.state.num_waiting
        if 0 in nodes and 0 not in self.row_of:
            self.hidden = self.drafter.read(self.state, self.token_ids)
            self.row_of[0] = 0
        fresh = [node for node in nodes if node not in self.row_of]
        if fresh:
            self._think(tree, fresh)
        level = self._level(tree, nodes, width)
        if read <= 1:
            self.drafter.learn(len(nodes), self.state.rows, time.perf_counter() - begin)
        return level

    def _think(self, tree: TreeBuilder, nodes: Seq[int]) -> None:
        """Run the layer over nodes whose parents were asked about before."""
        state, drafter, known = self.state, self.drafter, len(self.above)
        unasked = [node for node in nodes if tree.parents[node] not in self.row_of]
        if unasked:
            raise ValueError(f"nodes {unasked}: expected their parents to have been asked about in an earlier pass")
        parents = [self.row_of[tree.parents[node]] for node in nodes]
        for row, (node, parent) in enumerate(zip(nodes, parents), known):
            self.row_of[node] = row
            self.above.append([*self.above[parent], row])
        fed = drafter.head.feedback(self.hidden[parents])
        tokens = [tree.token_ids[node] for node in nodes]
        rows = drafter.project(tokens, fed, [state.rows - 1 + len(above) for above in self.above[known:]])
        self.keys, self.values = torch.cat([self.keys, rows.key]), torch.cat([self.values, rows.value])
        mask = np.zeros((len(nodes), state.rows + len(self.keys)), np.bool_)
        mask[:, : state.rows] = True
        for i, above in enumerate(self.above[known:]):
            mask[i, state.rows - 1 + np.array(above)] = True
        keys, values = (
            torch.cat([mine[: state.rows], new]) for mine, new in ((state.keys, self.keys), (state.values, self.values))
        )
        attended = attend(rows.query, keys, values, torch.as_tensor(mask, device=keys.device))
        self.hidden = torch.cat([self.hidden, drafter.head.finish(attended, rows.residual)])

    def _level(self, tree: TreeBuilder, nodes: Seq[int], width: int) -> Level:
        """Return the likeliest children of each node, and those it has already."""
        drafter = self.drafter
        logits = drafter.head.logits(self.hidden[[self.row_of[node] for node in nodes]]).float()
        norms = torch.logsumexp(logits, dim=-1).tolist()
        best = top_ids(logits, min(width, logits.shape[-1])).tolist()
        ids, parents, rows = list[int](), list[int](), list[int]()
        for row, (node, top) in enumerate(zip(nodes, best)):
            there = drafter.draft_ids[[tree.token_ids[child] for child in tree.children[node]]].tolist()
            wanted = [*top, *(number for number in there if number >= 0 and number not in top)]
            ids += wanted
            parents += [node] * len(wanted)
            rows += [row] * len(wanted)
        scores = logits[rows, ids].cpu().numpy() - np.array(norms)[rows]
        return Level(drafter.target_ids[ids].astype(np.int32), np.array(parents, np.int32), scores.astype(np.float32))


def measured(drafter: Eagle3Drafter) -> HeadCost:
    """Time passes over a few numbers of nodes behind a short and a full window, and reading; medians, in seconds."""
    high, low = drafter.last_row, max(1, drafter.last_row // 8)
    with drafter.session():
        _timed(drafter, low, 1)
        behind_full = {n: _timed(drafter, high, n) for n in FULL_WIDTHS}
        behind_short = {n: _timed(drafter, low, n) for n in WIDTHS}
    times = {(n, high): passes for n, (passes, _) in behind_full.items()}
    times |= {(n, low): passes for n, (passes, _) in behind_short.items()}
    return HeadCost(CostTable.fit(times), behind_full[1][1] / high)


def _timed(drafter: Eagle3Drafter, context: int, nodes: int) -> tuple[float, float]:
    """Return the median times, in seconds, of a pass over `nodes` nodes behind `context` rows and of reading those."""
    passes, readings, weight = [], [], drafter.head.fc.weight
    tree = TreeBuilder(0)
    level = [tree.add(0, token, -1.0, Source.DRAFT) for token in range(min(nodes, drafter.head.shape.vocab))]
    for _ in range(REPEATS):
        state = _Text(drafter.head, 0, drafter.max_rows)
        state.waiting = [torch.randn(context, weight.shape[1]).to(weight)]
        draft = _Draft(drafter, state, [0] * (context + 1))
        begin = time.perf_counter()
        draft.expand(tree, [0], 1)
        read = time.perf_counter()
        draft.expand(tree, level, 1)
        passes.append(time.perf_counter() - read)
        readings.append(read - begin)
    return float(np.median(passes)), float(np.median(readings))
