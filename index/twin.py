"""The plain twin of the native index: same lists, same trees, same learning, in Python.

Oracle of the tests and stand-in where no compiler was found (some 50 times slower). Knows no `Continuation`
and keeps no successor table; takes its bins, hazards and caps from `rank.py` as the native one does, and its
methods have the native one's names, arguments and results.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longgraft.index import rank
from longgraft.index.reference import SENTINEL, Automaton

IntArray = npt.NDArray[np.int32]


class Option(NamedTuple):
    """One thing that may come next; `state`, `length`: where the context stands with it added."""

    token: int
    match_len: int
    origin: int
    cell: int
    state: int
    length: int
    probability: float


def _match_cell(length: int, count: int, rest: int, order: int, age: int) -> int:
    cell = bisect_right(rank.LENGTH_EDGES, length)
    cell = cell * (len(rank.SHARE_EDGES) + 1) + bisect_right(rank.SHARE_EDGES, count / rest)
    cell = cell * (len(rank.TOTAL_EDGES) + 1) + bisect_right(rank.TOTAL_EDGES, rest)
    cell = cell * rank.NUM_ORDERS + min(order, rank.NUM_ORDERS - 1)
    return cell * (len(rank.AGE_EDGES) + 1) + bisect_right(rank.AGE_EDGES, age)


class PythonIndex:
    """Same methods and results as `longgraft.index._native.Index`."""

    def __init__(self, ranking: rank.Ranking) -> None:
        self.ranking = ranking
        self.reset()

    def __len__(self) -> int:
        return len(self.automaton.tokens)

    def reset(self) -> None:
        """Forget the text and what was learnt."""
        self.automaton = Automaton()
        self.forget()

    def forget(self) -> None:
        """Forget what was learnt."""
        self._hazards = self.ranking.priors.tolist()
        self._priors = self.ranking.priors.tolist()
        self._trials = [0.0] * rank.NUM_CELLS
        self._hits = [0.0] * rank.NUM_CELLS

    def mark(self) -> None:
        """Nothing: copying dicts costs what building anew costs."""

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, by building anew."""
        kept = self.automaton.tokens[:length]
        self.automaton = Automaton()
        for token in kept:
            self.automaton.append(token)

    def extend(self, token_ids: IntArray, learn: bool, successors: IntArray | None, vocab_size: int) -> int:
        """Append all tokens, or none: return the place of the first one outside [-1, vocab_size), else -1."""
        wrong = np.flatnonzero((token_ids < SENTINEL) | (token_ids >= vocab_size))
        if len(wrong):
            return int(wrong[0])
        for token in token_ids.tolist():
            if learn and token != SENTINEL and self.automaton.tokens:
                self._learn(token, successors)
            self.automaton.append(token)
        return -1

    def _learn(self, token: int, successors: IntArray | None) -> None:
        r = self.ranking
        options, _ = self._list(*self.automaton.text_end(), self.automaton.tokens[-1], successors, self._recent(), 0.0)
        for option in options:
            cell, hit = option.cell, option.token == token
            self._trials[cell] = self._trials[cell] * r.decay + 1.0
            self._hits[cell] = self._hits[cell] * r.decay + (1.0 if hit else 0.0)
            mass = r.prior_weight * self._priors[cell]
            self._hazards[cell] = (mass + self._hits[cell]) / (r.prior_weight + self._trials[cell])
            if hit:
                return

    def _list(
        self, state: int, length: int, last: int, rows: IntArray | None, recent: list[Option], floor: float
    ) -> tuple[list[Option], float]:
        """Return what may come next in order, and the probability that none of it does."""
        options: list[Option] = []
        rest = self._list_matches(options, state, length, floor)
        known = {option.token for option in options}
        for option in self._successors(length, last, rows) + recent:
            if rest < floor:
                break
            if option.token not in known:
                known.add(option.token)
                hazard = self._hazards[option.cell]
                options.append(option._replace(probability=rest * hazard))
                rest *= 1.0 - hazard
        return options, rest

    def _list_matches(self, options: list[Option], state: int, length: int, floor: float) -> float:
        a, rest, level = self.automaton, 1.0, 0
        size = len(a.tokens)
        while level < rank.MAX_LEVELS and state != 0:
            remaining = a.counts[state] - (a.ends[state] == size)
            known = {option.token for option in options}
            fresh = []
            for token, target in islice(reversed(a.edges[state].items()), rank.MAX_CHILDREN):
                if token in known:
                    remaining -= a.counts[target]
                else:
                    fresh.append((-a.counts[target], -a.ends[target], token, target))
            for minus_count, minus_end, token, target in sorted(fresh)[: rank.MAX_MATCHES - len(options)]:
                count, end = -minus_count, -minus_end
                cell = _match_cell(length, count, max(remaining, count), len(options), size - end)
                hazard = self._hazards[cell]
                options.append(Option(token, length, end - 1, cell, target, length + 1, rest * hazard))
                rest *= 1.0 - hazard
                remaining -= count
                if rest < floor or len(options) == rank.MAX_MATCHES:
                    return rest
            state = a.links[state]
            length = a.lengths[state]
            level += 1
        return rest

    def _successors(self, length: int, last: int, rows: IntArray | None) -> list[Option]:
        if rows is None or not 0 <= last < len(rows):
            return []
        context = bisect_right(rank.CONTEXT_EDGES, length)
        listed = []
        for k, token in enumerate(rows[last, : rank.MAX_SUCCESSORS].tolist()):
            if token >= 0:
                cell = rank.SUCCESSOR_BASE + k * rank.NUM_CONTEXTS + context
                listed.append(Option(token, 0, -1, cell, *self.automaton.advance(0, 0, token), 0.0))
        return listed

    def _recent(self) -> list[Option]:
        """The commonest of the last distinct tokens."""
        a = self.automaton
        size = len(a.tokens)
        ends: dict[int, int] = {}
        for end in range(size, max(size - rank.RECENT_SCAN, 0), -1):
            token = a.tokens[end - 1]
            if token != SENTINEL and len(ends) < rank.RECENT_DISTINCT:
                ends.setdefault(token, end)
        order = sorted(ends, key=lambda token: (-a.counts[a.edges[0][token]], -ends[token]))
        return [
            Option(token, 0, ends[token] - 1, rank.RECENT_BASE + i, a.edges[0][token], 1, 0.0)
            for i, token in enumerate(order[: rank.MAX_RECENT])
        ]

    def _walk(self, path: Sequence[int]) -> tuple[int, int, int]:
        state, length = self.automaton.text_end()
        last = self.automaton.tokens[-1] if self.automaton.tokens else SENTINEL
        for last in path:
            state, length = self.automaton.advance(state, length, last)
        return state, length, last

    def draft(self, out: IntArray, path: IntArray, threshold: float, successors: IntArray | None) -> int:
        """Fill the rows of `out [6, budget]`, likeliest node first; return the number of nodes."""
        nodes: list[tuple[Option, int]] = []
        heap: list[tuple[float, int, int, Option]] = []
        recent, serial = self._recent(), 0
        state, length, last = self._walk(path.tolist())
        mass, parent, budget = 1.0, -1, out.shape[1]
        while len(nodes) < budget:
            for option in self._list(state, length, last, successors, recent, threshold / mass)[0]:
                p = option.probability * mass
                if p >= threshold:
                    heapq.heappush(heap, (-p, serial, parent, option))
                    serial += 1
            if not heap:
                break
            minus_p, _, parent_of, option = heapq.heappop(heap)
            nodes.append((option, parent_of))
            state, length, last = option.state, option.length, option.token
            mass, parent = -minus_p, len(nodes) - 1
            out[:, parent] = (last, parent_of, 0, option.match_len, option.origin, option.cell)
            out[2, parent] = np.float32(math.log(mass)).view(np.int32)
        return len(nodes)

    def options(self, path: IntArray, successors: IntArray | None) -> tuple[npt.NDArray[Any], ...]:
        """Return token_ids, match_lens, origins, cells, probabilities of all that is listed after a path."""
        listed, _ = self._list(*self._walk(path.tolist()), successors, self._recent(), 0.0)
        columns = list(zip(*((*o[:4], o.probability) for o in listed))) or [()] * 5
        dtypes = (np.int32, np.int32, np.int32, np.int32, np.float64)
        return tuple(np.array(column, dtype) for column, dtype in zip(columns, dtypes))

    def match(self) -> tuple[int, int]:
        """Return the longest suffix that occurred before: (length, its most recent earlier end)."""
        return self.automaton.match_len, self.automaton.match_end

    def tokens(self) -> IntArray:
        """Return the text."""
        return np.array(self.automaton.tokens, np.int32)

    def learnt(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return trials and hits by cell."""
        return np.array(self._trials), np.array(self._hits)

    def set_learnt(self, trials: npt.NDArray[np.float64], hits: npt.NDArray[np.float64]) -> None:
        """Take over what `learnt` of another index gave."""
        self.forget()
        self._trials, self._hits = trials.tolist(), hits.tolist()
        for cell in np.flatnonzero(trials).tolist():
            mass = self.ranking.prior_weight * self._priors[cell] + self._hits[cell]
            self._hazards[cell] = mass / (self.ranking.prior_weight + self._trials[cell])

    def states(self) -> IntArray:
        """Return (length, length of the link, count, last end) of every state but the root, flat."""
        a = self.automaton
        columns = (a.lengths[1:], [a.lengths[link] for link in a.links[1:]], a.counts[1:], a.ends[1:])
        return np.array(columns, np.int32).T.reshape(-1)

    def check_integrity(self) -> str:
        """Return "" or the first broken invariant."""
        return self.automaton.check_integrity()

    @property
    def steps(self) -> int:
        """Work done, in visited states."""
        return self.automaton.steps

    @property
    def memory_bytes(self) -> int:
        """Rough size; a dict automaton costs some 600 bytes a state."""
        return 600 * len(self.automaton.links) + 32 * rank.NUM_CELLS
