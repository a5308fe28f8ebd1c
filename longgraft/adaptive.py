"""Adaptive: every proposal in one currency, and no draft pass that is not worth its time.

Knows drafter, index and cost by their seams. A round starts with what the index says. Then the drafter is asked, pass
by pass, about the nodes where that promises the most, as long as the accepted tokens it is expected to add come faster
than those of the round so far: the gate and the number of rows answer the same question. What a pass adds is learnt
from passes made. Retrieved continuations hang below drafted nodes as well as below the root.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longgraft.cost import CostTable
from longgraft.draft.base import Draft, Drafter
from longgraft.draft.recorded import begin
from longgraft.graft import depths_of, graft
from longgraft.merge import Opinions, Weights
from longgraft.prune import add_level
from longgraft.sequence import OBSERVED, Sequence
from longgraft.tree import Acceptance, TreeBuilder

WIDTH = 8  # children a drafter names for a node
MAX_ASKED = 16  # nodes in one draft pass
LEAST_PATH = 0.02  # nodes less likely than this are not asked about
# At most so many new nodes of a pass are looked up in the index, and only those at least so likely.
LOOKED_UP, LIKELY = 4, 0.1
GRAFTED = 16  # nodes retrieved below a drafted one
# How much of a node's uncovered probability a drafter covers, before anything is known, and how many observations
# that counts for.
FIRST_GAIN, FIRST_COUNT = 0.85, 6.0
COVERAGE_BINS = (0.05, 0.3, 0.6, 0.85)
FORGET = 0.98
# What a drafter promised is held against what came, an asked node at a time; it begins with some kept promises.
CREDITED, FORGOTTEN = 2.0, 0.95
# A text is read once this many times its price would have been saved, and only where as much can still be saved in
# the rounds that are left, going by those so far: what is saved is a guess until then. Of the first rounds so many
# count as having saved nothing.
PATIENCE = 4.0
FIRST_ROUNDS = 8
# So much of the time of reading the prompt may go into the drafter's reading, before anything was saved.
FREE = 0.03
EXPLORED = 0.01  # share of the time for passes that do not promise to pay


@dataclass
class State:
    """What one sequence has learnt about its drafter.

    `gains [bins]` and `counts [bins]`: by how likely the children a node has already are, what asking about it added.
    `credit`: seconds that may go into reading before any are saved. `missed`, `rounds`: seconds that passes would have
    saved in so many rounds if the drafter had read the text. `clock`: seconds since the last pass. `expected`,
    `came`: children that should have come lately, and those that did.
    """

    weights: Weights = field(default_factory=Weights)
    gains: npt.NDArray[np.float64] = field(default_factory=lambda: _first_gains() * FIRST_COUNT)
    counts: npt.NDArray[np.float64] = field(default_factory=lambda: np.full(len(COVERAGE_BINS) + 1, FIRST_COUNT))
    opinions: Opinions | None = None
    expected: float = CREDITED
    came: float = CREDITED
    credit: float = 0.0
    missed: float = 0.0
    rounds: int = FIRST_ROUNDS
    clock: float = 0.0

    def gain(self, coverage: float) -> float:
        """Return how much coverage asking about a node is expected to add."""
        at = int(np.searchsorted(COVERAGE_BINS, coverage))
        return max(0.0, float(self.gains[at] / self.counts[at])) * min(1.0, self.came / self.expected)

    def learn_gain(self, before: float, after: float) -> None:
        """Take in what asking about one node added."""
        at = int(np.searchsorted(COVERAGE_BINS, before))
        self.gains[at] = FORGET * self.gains[at] + after - before
        self.counts[at] = FORGET * self.counts[at] + 1.0


def _first_gains() -> npt.NDArray[np.float64]:
    edges = np.array([0.0, *COVERAGE_BINS, 1.0])
    return FIRST_GAIN * (1.0 - (edges[1:] + edges[:-1]) / 2)


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """All proposals in one currency; as many nodes and draft passes as are worth their cost."""

    drafter: Drafter
    cost: CostTable | None
    max_nodes: int
    vocab_size: int
    adapts = True
    observed = OBSERVED
    retrieves = True
    drafts = True

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return the merged tree of this round."""
        state = seq.policy_state = seq.policy_state or State(credit=self._granted(seq))
        opinions = state.opinions = Opinions(TreeBuilder(seq.root_token))
        round_ = _Round(self, seq, state, opinions)
        if self.cost is not None:
            state.rounds += 1
            state.clock += float(self.cost.rounds(1, len(seq.token_ids))[0])
        round_.look_up([0], self.max_nodes)
        draft = begin(self.drafter, seq) if round_.max_depth > 0 and self.cost is not None else None
        while draft is not None and (nodes := round_.worth_asking(draft)):
            round_.ask(draft, nodes)
        return opinions.builder

    def _granted(self, seq: Sequence) -> float:
        """Return the seconds that the drafter may read before it has saved any."""
        rows = 64
        return FREE * seq.prompt_len * float(self.cost.rounds(rows, seq.prompt_len)[-1]) / rows if self.cost else 0.0

    def learn(self, seq: Sequence, accepted: Acceptance) -> None:
        """Let the weights learn from what the target drew."""
        state: State = seq.policy_state
        if state.opinions is not None:
            expected, came = state.opinions.learn(state.weights, accepted.token_ids)
            if expected:
                state.expected = FORGOTTEN * state.expected + expected
                state.came = FORGOTTEN * state.came + came
            state.opinions = None


class _Round:
    """One round under way: what was proposed and what it has cost."""

    def __init__(self, policy: AdaptivePolicy, seq: Sequence, state: State, opinions: Opinions) -> None:
        self.policy, self.seq, self.state, self.opinions = policy, seq, state, opinions
        self.spent = 0.0
        self.max_depth = seq.stop.remaining - 1

    def look_up(self, nodes: Seq[int], budget: int) -> None:
        """Ask the index what follows some nodes."""
        builder = self.opinions.builder
        for node in nodes:
            if (found := self.seq.index.draft(budget, path_of(builder, node), node)) is not None:
                (grafted,) = graft(builder, [found], self.policy.vocab_size, self.max_depth)
                self.opinions.take_found(found, grafted)
        self.opinions.combine(self.state.weights)

    def rate(self) -> float:
        """Return the tokens a second of this round if nothing more is asked, what was spent included."""
        assert self.policy.cost is not None
        gains = np.sort(np.exp(self.opinions.builder.scores[1:]))[::-1][: self.policy.max_nodes] * self.seq.trust
        seconds = self.policy.cost.rounds(1 + len(gains), len(self.seq.token_ids)) + self.spent
        return float(np.max((1.0 + np.concatenate([[0.0], np.cumsum(gains)])) / seconds))

    def worth_asking(self, draft: Draft) -> list[int]:
        """Return the nodes of the next draft pass, parents first; none if no pass is worth its time."""
        promises = self._promises(draft)
        if not promises:
            return []
        rate, row = self.rate(), self._row_seconds()
        caught_up = [draft.seconds(rows, True) for rows in range(1, len(promises) + 1)]
        count = 1
        while count < len(promises) and promises[count][0] > rate * (caught_up[count] - caught_up[count - 1] + row):
            count += 1
        gain = sum(promise for promise, _ in promises[:count])
        saved = gain / rate - caught_up[count - 1] - count * row
        return (
            sorted(node for _, node in promises[:count])
            if self._pays(draft, saved, count, caught_up[count - 1])
            else []
        )

    def _pays(self, draft: Draft, saved: float, count: int, caught_up: float) -> bool:
        """Say whether a pass pays that would save so many seconds if the drafter had read the text.

        What it has not read is an investment, if this pass does not pay for it: it is made when the savings forgone
        reach its price.
        """
        state, seconds = self.state, draft.seconds(count)
        behind = max(0.0, seconds - caught_up)
        state.missed += max(saved, 0.0)
        to_come = state.missed / state.rounds * self.seq.stop.remaining
        is_due = state.credit + state.missed / PATIENCE >= behind and to_come >= PATIENCE * behind
        if saved > behind or (saved > 0 and is_due) or EXPLORED * state.clock > seconds:
            self.spent += seconds
            state.credit, state.missed, state.rounds, state.clock = 0.0, 0.0, FIRST_ROUNDS, 0.0
            return True
        return False

    def _promises(self, draft: Draft) -> list[tuple[float, int]]:
        """Return (what asking about it is expected to add, node) of the best nodes to ask about, best first."""
        opinions, state, scores = self.opinions, self.state, self.opinions.builder.scores
        found = list[tuple[float, int]]()
        least, asked = np.log(LEAST_PATH), set(opinions.asked)
        depths = depths_of(opinions.builder)
        for node, parent in enumerate(opinions.builder.parents):
            is_open = node == 0 or parent in asked
            if node in opinions.asked or not is_open or scores[node] < least or depths[node] >= self.max_depth:
                continue
            if draft.in_one_pass:
                asked.add(node)
            promise = float(np.exp(scores[node])) * state.gain(opinions.coverage(node))
            found.append((promise, node))
        return self._closed(sorted(found, key=lambda pair: (-pair[0], pair[1])))

    def _closed(self, found: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """Return the first `MAX_ASKED`, each behind its parent."""
        promise_of, chosen, done = {node: promise for promise, node in found}, list[tuple[float, int]](), set[int]()
        for _, node in found:
            path = [node]
            while (parent := self.opinions.builder.parents[path[-1]]) in promise_of and parent not in done:
                path.append(parent)
            if node in done or len(chosen) + len(path) > MAX_ASKED:
                continue
            done.update(path)
            chosen += [(promise_of[one], one) for one in reversed(path)]
        return chosen

    def _row_seconds(self) -> float:
        """Return what one more row costs the target, taken over a few."""
        assert self.policy.cost is not None
        seconds = self.policy.cost.rounds(8, len(self.seq.token_ids))
        return float(seconds[7] - seconds[1]) / 6

    def ask(self, draft: Draft, nodes: list[int]) -> None:
        """Make one draft pass, graft below what it found, and learn what it added."""
        opinions, state = self.opinions, self.state
        before = [opinions.coverage(node) for node in nodes]
        level = draft.expand(opinions.builder, nodes, WIDTH)
        fresh = add_level(opinions.builder, level, self.policy.vocab_size)
        opinions.take_level(level, nodes)
        opinions.combine(state.weights)
        for node, coverage in zip(nodes, before):
            state.learn_gain(coverage, opinions.coverage(node))
        scores = opinions.builder.scores
        likely = sorted((n for n in fresh if scores[n] > np.log(LIKELY)), key=lambda n: -scores[n])[:LOOKED_UP]
        if likely:
            self.look_up(likely, GRAFTED)


def path_of(builder: TreeBuilder, node: int) -> list[int]:
    """Return the tokens from below the root to a node."""
    tokens = list[int]()
    while node > 0:
        tokens.append(builder.token_ids[node])
        node = builder.parents[node]
    return tokens[::-1]
