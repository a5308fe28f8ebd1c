"""Hostile and friendly drafters: stand-ins for a draft model, made with the whole true text of their sequence.

Know the seam of `longgraft.draft.base` and no model (but for `ModelTopK`): `DRAFTERS[name](truth)` goes to an engine as
its drafter. Each also holds the asking policy to its side of the seam: the root first, parents before children, no node
twice, and tokens committed exactly as `extend` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft.tree import Level, TreeBuilder
from tests.models import VOCAB

Child = tuple[int, float]  # token, probability given its parent


def path_of(tree: TreeBuilder, node: int) -> list[int]:
    """Return the tokens from below the root down to `node`."""
    tokens: list[int] = []
    while node > 0:
        tokens.append(tree.token_ids[node])
        node = tree.parents[node]
    return tokens[::-1]


class ScriptedDraft:
    """One round of a `ScriptedDrafter`; `asked` holds the nodes of every pass."""

    def __init__(self, drafter: ScriptedDrafter, length: int) -> None:
        self.drafter = drafter
        self.in_one_pass = drafter.in_one_pass
        self.length = length  # committed tokens, the root included
        self.asked: list[list[int]] = []

    def expand(self, tree: TreeBuilder, nodes: Sequence[int], width: int) -> Level:
        before = {node for level in self.asked for node in level}
        assert nodes and width >= 1, "a pass over nothing"
        assert before or list(nodes) == [0], "the root is asked about first"
        assert len(set(nodes)) == len(nodes) and not before & set(nodes), "a node was asked about twice"
        for place, node in enumerate(nodes):
            askable = before | set(nodes[:place]) if self.in_one_pass else before
            assert node == 0 or tree.parents[node] in askable, "a parent was not asked about before its child"
        self.asked.append(list(nodes))
        self.drafter.passes += 1
        paths = [path_of(tree, node) for node in nodes]
        said = self.drafter.level(self.length, paths, width)
        rows = [(token, node, p) for node, children in zip(nodes, said) for token, p in children]
        known = {(node, token) for token, node, _ in rows}
        rows += [
            (token, parent, 0.01)
            for token, parent in zip(tree.token_ids, tree.parents)
            if parent in nodes and (parent, token) not in known
        ]
        tokens, parents, ps = zip(*rows) if rows else ((), (), ())
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.log(np.array(ps, np.float32))
        return Level(np.array(tokens, np.int32), np.array(parents, np.int32), scores)

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        return 0.001 * (1 + rows)


class ScriptedDrafter:
    """Right with probability 0.7, as far as the text is known; other children are wrong.

    `truth`: prompt and output together. `passes`, `rounds`: how often it was asked.
    """

    feature_layers: tuple[int, ...] = ()
    feature_window = 0
    cost_table = None
    in_one_pass = False

    def __init__(self, truth: Sequence[int] = ()) -> None:
        self.truth = [int(token) for token in truth]
        self.passes = self.rounds = 0
        self.drafts: list[ScriptedDraft] = []

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prefill(self, sequence: Any, first: int, features: Tensor) -> None:
        raise AssertionError("a drafter without feature layers is given no features")

    def begin(self, sequence: Any) -> ScriptedDraft | None:
        self.rounds += 1
        expected = sequence.draft_state
        assert expected is None or expected == len(sequence.token_ids), "tokens were committed that it was not told of"
        self.drafts.append(ScriptedDraft(self, len(sequence.token_ids)))
        return self.drafts[-1]

    def extend(self, sequence: Any, token_ids: list[int], result: Any, accepted: Any) -> None:
        assert sequence.token_ids[len(sequence.token_ids) - len(token_ids) :] == token_ids
        assert len(token_ids) <= len(accepted.path)
        sequence.draft_state = len(sequence.token_ids)

    def reset(self, sequence: Any) -> None:
        sequence.draft_state = None

    def level(self, length: int, paths: list[list[int]], width: int) -> list[list[Child]]:
        """Return the children said to follow each path of one pass."""
        return [self.children(length, path, width) for path in paths]

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        """Return the children of one path, likeliest first; their probabilities add up to 1 at most."""
        return self.ranked(self.true_child(length, path), path, width)

    def true_child(self, length: int, path: list[int]) -> int | None:
        """Return the token that truly follows `path`; None off the true path or beyond the known text."""
        end = length + len(path)
        known = self.truth[length : end + 1]
        return known[-1] if len(known) == len(path) + 1 and known[:-1] == path else None

    def ranked(self, first: int | None, path: list[int], width: int) -> list[Child]:
        """Return `first` at 0.7, then wrong tokens, each a quarter as likely."""
        base = sum(path) + 7 * len(path)
        tokens = [first] if first is not None else []
        tokens += [token for token in ((base + 11 * i) % VOCAB for i in range(width + 1)) if token != first]
        return [(token, 0.7 * 0.25**i + 1e-4) for i, token in enumerate(tokens[:width])]


class Right(ScriptedDrafter):
    """As the base class: the true token first, everywhere."""


class Wrong(ScriptedDrafter):
    """Sure of itself, and never right."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        true = self.true_child(length, path)
        said = self.ranked(None, path, width + 1)
        return [child for child in said if child[0] != true][:width]


class RightUntil(ScriptedDrafter):
    """Right for 0 to 6 tokens, changing from round to round, then wrong."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        true = self.true_child(length, path)
        said = self.ranked(true if len(path) < length * 5 % 7 else None, path, width + 1)
        return [child for child in said if child[0] != true or len(path) < length * 5 % 7][:width]


class Siblings(ScriptedDrafter):
    """The true token is the second or third choice."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        said = self.ranked(self.true_child(length, path), path, width)
        place = min(1 + len(path) % 2, len(said) - 1)
        tokens = [token for token, _ in said]
        tokens.insert(place, tokens.pop(0))
        return [(token, 0.3 - 0.02 * i) for i, token in enumerate(tokens)]


class Duplicates(ScriptedDrafter):
    """Says every token twice, the second time better."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        said = super().children(length, path, width)
        return [(token, p / 2) for token, p in said] + said


class OutOfVocabulary(ScriptedDrafter):
    """Ids that no target knows, first and best."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        strangers = [(VOCAB, 0.9), (-1, 0.9), (2**31 - 1, 0.9), (-(2**31), 0.9)]
        return strangers[: 1 + len(path) % 4] + super().children(length, path, width)


class OnlyOutOfVocabulary(ScriptedDrafter):
    """Nothing but ids that no target knows."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        return [(VOCAB + i, 0.1) for i in range(width)]


class Broken(ScriptedDrafter):
    """Probabilities that are none: above 1, zero, negative, not a number; the true token is among them."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        odd = (3.0, 0.0, -1.0, math.nan, math.inf)
        return [(token, odd[i % 5]) for i, (token, _) in enumerate(super().children(length, path, width))]


class Empty(ScriptedDrafter):
    """Has nothing to say."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        return []


class EmptyBelow(ScriptedDrafter):
    """Has nothing to say below depth 3."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        return super().children(length, path, width) if len(path) < 3 else []


class Ties(ScriptedDrafter):
    """Every child as likely as every other; the true one comes last."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        said = super().children(length, path, width)
        return [(token, 1 / width) for token, _ in reversed(said)]


class Fills(ScriptedDrafter):
    """Fills every level with tokens that stand nowhere else in it, each node surer than it could be."""

    def children(self, length: int, path: list[int], width: int) -> list[Child]:
        base = sum((token + 1) * 31**i for i, token in enumerate(path))
        return [((base + 17 * i) % VOCAB, 0.99 - 0.001 * i) for i in range(width)]


class StepsAside(ScriptedDrafter):
    """Right, but in two of three rounds it is not there."""

    def begin(self, sequence: Any) -> ScriptedDraft | None:
        draft = super().begin(sequence)
        return draft if self.rounds % 3 == 0 else None


class NeverThere(ScriptedDrafter):
    """Steps aside in every round."""

    def begin(self, sequence: Any) -> ScriptedDraft | None:
        super().begin(sequence)
        return None


class ModelTopK(ScriptedDrafter):
    """The likeliest tokens by a (tiny) transformers model, which reads the whole text for every node; no truth."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def begin(self, sequence: Any) -> ScriptedDraft | None:
        self.truth = list(sequence.token_ids)
        return super().begin(sequence)

    @torch.no_grad()
    def level(self, length: int, paths: list[list[int]], width: int) -> list[list[Child]]:
        ids = torch.tensor([self.truth[:length] + path for path in paths])
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        top = torch.softmax(logits.double(), -1).topk(min(width, logits.shape[-1]))
        return [list(zip(tokens, ps)) for tokens, ps in zip(top.indices.tolist(), top.values.tolist())]


DRAFTERS: dict[str, Callable[[Sequence[int]], ScriptedDrafter]] = {
    "right": Right,
    "wrong": Wrong,
    "right_until": RightUntil,
    "siblings": Siblings,
    "duplicates": Duplicates,
    "out_of_vocabulary": OutOfVocabulary,
    "only_out_of_vocabulary": OnlyOutOfVocabulary,
    "broken": Broken,
    "empty": Empty,
    "empty_below": EmptyBelow,
    "ties": Ties,
    "fills": Fills,
    "steps_aside": StepsAside,
    "never_there": NeverThere,
}
