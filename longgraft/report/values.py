"""The part of a report that its script reads: tokens, places and trees as compact JSON, everything written once.

Knows outputs and traces; no HTML. Columns instead of records, token texts and places by number, probabilities in
thousandths: 8-15 bytes a node. However much was verified, at most `MOST_NODES` are kept, the likeliest of every
round and all accepted ones; the page says how many there were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from longgraft.config import Output
from longgraft.render import LOOKS
from longgraft.report.places import Places
from longgraft.report.words import name_of
from longgraft.trace import STAGES, Trace, TracedRound
from longgraft.tree import TokenTree

MOST_NODES = 200_000
DRAWN = "-"  # the letter of a node or token that nobody proposed
LETTERS = {int(source): letter or DRAWN for source, (letter, _, _) in LOOKS.items()}


class Numbered:
    """Numbers things in the order in which they first come."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._numbers: dict[Hashable, int] = {}
        self.made: list[Any] = []

    def __call__(self, key: Hashable) -> int:
        """Return the number of `key`; what is made of it is kept when it is new."""
        number = self._numbers.setdefault(key, len(self.made))
        if number == len(self.made):
            self.made.append(self._make(key))
        return number


def values_of(output: Output, trace: Trace, places: Places) -> dict[str, Any]:
    """Return everything that the script shows, JSON-ready.

    `tokens`: `name`, `id`, `source` (letters), `place` and `chance` (the model's own log-probability, if asked for)
    by token. `rounds`: see `round_values`. `names`, `places`: what the numbers mean.
    """
    names = Numbered(lambda token_id: name_of(places.tokenizer, token_id))
    labels = Numbered(lambda label: list(label))
    tokens = {
        "id": list(output.token_ids),
        "name": [names(token_id) for token_id in output.token_ids],
        "source": "".join([LETTERS[source] for source in output.sources]),
        "place": [labels(places.label(i)) for i in range(len(output.token_ids))],
        "chance": [round(one.logprob, 4) if math.isfinite(one.logprob) else None for one in output.logprobs],
    }
    quota = MOST_NODES // max(1, len(trace))
    rounds = [round_values(one, names, quota) for one in trace]
    return {
        "stages": list(STAGES),
        "called": {LETTERS[source]: called for source, (_, _, called) in LOOKS.items()},
        "tokens": tokens,
        "rounds": rounds,
        "names": names.made,
        "places": labels.made,
    }


def round_values(one: TracedRound, names: Callable[[int], int], quota: int) -> list[Any]:
    """Return `[token names, parents, thousandths, letters, path, new tokens, microseconds by stage, rows]`.

    The first four are by node, the root left out, nodes counted from 1 (0 is the root). Thousandths: the probability
    with which a node was expected to be accepted, given that its parent is. `rows`: as verified, before any cut.
    """
    tree, keep = one.tree, kept_nodes(one.tree, one.path, quota)
    rest, number = keep[1:], np.zeros(len(one.tree), np.intp)
    number[keep] = np.arange(len(keep))
    with np.errstate(invalid="ignore"):  # below a node that cannot be accepted nothing is known
        rise = tree.scores[rest] - tree.scores[tree.parents[rest]]
    given = np.exp(np.minimum(np.nan_to_num(rise, nan=-np.inf), 0.0))
    return [
        [names(token_id) for token_id in tree.token_ids[rest].tolist()],
        number[tree.parents[rest]].tolist(),
        np.rint(1000 * given).astype(int).tolist(),
        "".join([LETTERS[source] for source in tree.sources[rest].tolist()]),
        number[list(one.path)].tolist(),
        one.new_tokens,
        [round(1e6 * seconds) for seconds in one.seconds],
        one.rows,
    ]


def kept_nodes(tree: TokenTree, path: Seq[int], quota: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the nodes to keep, ascending: root and path, and the likeliest others, about `quota` in all.

    Scores never grow along a path and parents come first, so the best ones are closed under parents.
    """
    best = np.argsort(-tree.scores, kind="stable")[: max(quota, 1)]
    return np.union1d(best, np.asarray([0, *path], np.intp))


def script_json(values: Any) -> str:
    """Return JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for unsafe in "<>&\u2028\u2029":
        text = text.replace(unsafe, f"\\u{ord(unsafe):04x}")
    return text
