"""The plain twin of the native learnt index: same lists, same trees, same learning, in Python.

Oracle of the tests and stand-in where no compiler was found (some 300 times slower). Records for fitting
weights are made by the native one alone. The idea: floats are added in the native order, so the results are the
same bit for bit, and its methods have the native one's names, arguments and results.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longgraft.index.copying import Copy, Step, Substitutions, add_nearby, follow_copy, longest_of
from longgraft.index.features import MAX_HINTS, NUM_CLASSES, NUM_WEIGHTS, Listing
from longgraft.index.listing import Context, Lister
from longgraft.index.logit import MOST_SHRINK, Logit, Scored
from longgraft.index.places import MAX_MATCH, MAX_TOKENS, NOWHERE, Found, Library, match_length
from longgraft.index.reference import SENTINEL, Automaton

IntArray = npt.NDArray[np.int32]
DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a node stands: the copy, the automaton's (state, length), and the tokens of its path."""

    copy: Copy
    cursor: tuple[int, int]
    path: tuple[int, ...]
    found: Found


class PythonLearntIndex:
    """Same methods and results as `longgraft.index._native.LearntIndex`.

    `weights` [NUM_WEIGHTS]: start of the tables. `classes` [any length]: kind, below NUM_CLASSES, of each token's
    text. `rate`: of the gradient steps on the weights in generated text; 0: none. `shrink`, 0 to 0.75: how much less
    likely than estimated a node is, most at one half. Raises ValueError for others.
    """

    def __init__(self, weights: DoubleArray, classes: npt.NDArray[np.uint8] | None, rate: float, shrink: float) -> None:
        if classes is not None and np.any(classes >= NUM_CLASSES):
            raise ValueError(f"classes: expected numbers below {NUM_CLASSES}")
        if not 0 <= shrink <= MOST_SHRINK:
            raise ValueError(f"shrink is {shrink}: expected 0 to {MOST_SHRINK}")
        self._logit = Logit(weights, rate)
        self._classes = classes
        self._shrink = shrink
        self.reset()

    def reset(self) -> None:
        """Forget the texts and what was learnt."""
        self._logit.reset()
        self._texts = Library()
        self._automaton = Automaton()
        self._pairs = Substitutions(self._texts)
        self._lister = Lister(self._texts, self._pairs, self._classes)
        self._forget_copies()

    def _forget_copies(self) -> None:
        self._pairs.clear()
        self._copy = Copy()
        self._found: Found | None = None  # occurrences of the end of the text, while `_copy` stands there

    def __len__(self) -> int:
        return len(self._texts.own)

    @property
    def side_len(self) -> int:
        """Tokens of the side text."""
        return len(self._texts.side)

    def begin(self, prompt_len: int) -> None:
        """Say how many tokens of the own text are the prompt's."""
        self._lister.prompt_len = prompt_len

    def hint(self, places: IntArray, cosines: DoubleArray) -> None:
        """Propose places, best first, for the text as it is now; others than a text's are passed over."""
        if len(places) != len(cosines) or not np.all(np.isfinite(cosines)):
            raise ValueError("hint: expected a finite cosine for each place")
        self._lister.hints = list(zip(places.tolist(), cosines.tolist()))[:MAX_HINTS]

    def extend(self, ids: IntArray, follow: bool, rows: IntArray | None, vocab: int) -> int:
        """Append all tokens, or none: return the place of the first one outside [-1, vocab), else -1.

        `follow`: they were generated, so the pointer follows them and what was listed for each is scored against it.
        """
        wrong = first_wrong(ids, vocab)
        if wrong < 0:
            check_room(len(self), len(ids))
            for token in ids.tolist():
                if follow and token != SENTINEL:
                    self._follow(token, rows)
                else:
                    self._append(token)
                    self._found = None
        return wrong

    def extend_side(self, ids: IntArray, vocab: int) -> int:
        """Append to the side text all tokens, or none, as `extend`."""
        wrong = first_wrong(ids, vocab)
        if wrong < 0:
            check_room(self.side_len, len(ids))
            for token in ids.tolist():
                self._texts.side.append(token)
            self._found = None
        return wrong

    def clear_side(self) -> None:
        """Forget the side text, and with it every pointer that may lead there."""
        self._texts.side = type(self._texts.side)()
        self._forget_copies()

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, by building anew; what was learnt stays."""
        if not 0 <= length <= len(self):
            raise ValueError(f"truncate to {length} tokens: the text holds {len(self)}")
        kept = self._texts.own.tokens[:length]
        self._texts.own = type(self._texts.own)()
        self._lister.hints = []
        self._automaton = Automaton()
        self._forget_copies()
        for token in kept:
            self._append(token)

    def _append(self, token: int) -> None:
        self._lister.hints = []  # they were for the text as it was
        self._texts.own.append(token)
        self._automaton.append(token)

    def _follow(self, token: int, rows: IntArray | None) -> None:
        before = self._end()
        if self._logit.rate > 0 and len(self):
            self._logit.learn(token, self._list(before, rows))
        self._append(token)
        self._found = self._look_up(self._context(()), self._automaton.text_end())
        step = Step(self._texts, len(self), committed=True)
        self._copy = follow_copy(self._pairs, before.copy, token, self._found, step)

    def _context(self, path: Sequence[int]) -> list[int]:
        return [*self._texts.own.tokens[-MAX_MATCH:], *path]

    def _look_up(self, context: Sequence[int], cursor: tuple[int, int]) -> Found:
        """Occurrences of the context in both texts, the longest first, however often shorter ones occurred."""
        found: Found = {}
        state, length = cursor
        a = self._automaton
        if length > 8:
            place = a.match_end if state == a.text_end()[0] else a.ends[state]
            if 0 < place < len(self):
                found[place] = match_length(a.tokens, place, context)
        self._texts.add_occurrences(context, found)
        return found

    def _end(self) -> Position:
        """The end of the text; a pointer that leads nowhere starts at its longest occurrence."""
        if self._found is None:
            self._found = self._look_up(self._context(()), self._automaton.text_end())
            place, length = longest_of(self._found)
            if self._copy.source == NOWHERE and length >= 2:
                self._copy.source = self._copy.left = place
        return Position(self._copy, self._automaton.text_end(), (), dict(self._found))

    def _advance(self, at: Position, token: int) -> Position:
        path = (*at.path, token)
        cursor = (0, 0) if token == SENTINEL else self._automaton.advance(*at.cursor, token)
        found = self._look_up(self._context(path), cursor)
        step = Step(self._texts, len(self) + len(path), committed=False)
        return Position(follow_copy(self._pairs, at.copy, token, found, step), cursor, path, found)

    def _after(self, path: IntArray) -> Position:
        self._lister.collect_recents()
        at = self._end()
        for token in path.tolist():
            at = self._advance(at, token)
        return at

    def _list(self, at: Position, rows: IntArray | None) -> Listing:
        """Return what may come next at a position."""
        if not at.path:
            self._lister.collect_recents()
        context, found = self._context(at.path) or [SENTINEL], dict(at.found)
        add_nearby(self._texts, at.copy, context, found)
        last = context[-1]
        row = rows[last].tolist() if rows is not None and 0 <= last < len(rows) else []
        return self._lister.list_options(Context(context, found, at.copy, row, is_root=not at.path))

    def draft(self, out: IntArray, path: IntArray, threshold: float, rows: IntArray | None) -> int:
        """Fill `out [5, budget]` with token, parent, score bits, match_len and place, likeliest node first.

        Returns the number of nodes, none of them less likely than `threshold`.
        """
        if out.ndim != 2 or len(out) != 5:
            raise ValueError("out: expected 5 rows")
        heap: list[tuple[float, int, int, Scored]] = []
        positions: list[Position] = []
        parent, mass, serial = -1, 1.0, 0
        if out.shape[1] == 0:
            return 0
        root = at = self._after(path)
        while len(positions) < out.shape[1]:
            for option in self._logit.score(self._list(at, rows))[0]:
                if not mass * option.p < threshold:
                    heapq.heappush(heap, (-(mass * option.p), serial, parent, option))
                    serial += 1
            if not heap:
                break
            minus_p, _, parent_of, option = heapq.heappop(heap)
            mass, parent = -minus_p, len(positions)
            at = self._advance(positions[parent_of] if parent_of >= 0 else root, option.token)
            positions.append(at)
            out[:, parent] = (option.token, parent_of, 0, option.match_len, option.place)
            out[2, parent] = self._shrunk(mass).view(np.int32)
        return len(positions)

    def _shrunk(self, p: float) -> np.float32:
        """Of many estimates those come first that are too high: likely nodes are a little less likely than that."""
        shrunk = p * (1.0 - 4.0 * self._shrink * p * (1.0 - p))
        return np.float32(math.log(shrunk) if shrunk > 0 else -math.inf)

    def options(self, path: IntArray, rows: IntArray | None) -> tuple[IntArray, IntArray, IntArray, DoubleArray, float]:
        """Return token_ids, match_lens, places, probabilities of all that is listed, and the probability of none."""
        listed, rest = self._logit.score(self._list(self._after(path), rows))
        tokens, lens, places, p = zip(*listed) if listed else ((), (), (), ())
        return np.array(tokens, np.int32), np.array(lens, np.int32), np.array(places, np.int32), np.array(p), rest

    def weights(self) -> DoubleArray:
        """Return the tables as they are now. [NUM_WEIGHTS]"""
        return np.array(self._logit.weights)

    def tokens(self) -> IntArray:
        """Return the own text."""
        return np.array(self._texts.own.tokens, np.int32)

    def copy(self) -> tuple[int, int, int, int, int, int, int, int, float]:
        """Return the copy: source, run, lost, left, since, number of the pair, offset, second, success."""
        c = self._copy
        pair = -1 if c.pair is None else c.pair.number
        return c.source, c.run, c.lost, c.left, c.since, pair, c.offset, c.second, c.success

    @property
    def num_pairs(self) -> int:
        """Substitutions kept."""
        return len(self._pairs)

    @property
    def memory_bytes(self) -> int:
        """Rough size; a dict automaton costs some 600 bytes a state, the places as much a token."""
        return 600 * (len(self._automaton.links) + len(self) + self.side_len) + 32 * NUM_WEIGHTS

    def check_integrity(self) -> str:
        """Return "" or the first broken invariant."""
        own, side = self._texts.own.check_integrity(), self._texts.side.check_integrity()
        return own or side or self._automaton.check_integrity()


def first_wrong(ids: IntArray, vocab: int) -> int:
    """Return the place of the first id outside [-1, vocab), else -1."""
    wrong = np.flatnonzero((ids < SENTINEL) | (ids >= vocab))
    return int(wrong[0]) if len(wrong) else -1


def check_room(size: int, n: int) -> None:
    """Raise ValueError where `n` more tokens do not fit."""
    if size + n > MAX_TOKENS:
        raise ValueError("the index is full: a text may hold 2**29 tokens")
