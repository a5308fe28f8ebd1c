"""Recorded rounds: what each stage of the paper's method would have verified, and how much of it was right.

Rounds are drafted to full depth; when the text is known, so is how much of each tree it would have accepted. Knows
engine and policies; chooses nothing. Records replay without any model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longgraft.config import GraftError, SamplingParams
from longgraft.draft.base import Draft
from longgraft.policies import FixedPolicy, graft_successors
from longgraft.prune import Gates, always
from longgraft.sequence import Sequence as TokenSequence
from longgraft.tree import Level, TokenTree, TreeBuilder

VERSION = "longgraft_recorded_levels"


@dataclass(frozen=True, slots=True)
class Round:
    """One recorded round, with S checkpoints.

    `confidences [depth]`: probability of the best path of each level that another may follow. By stage (pruned at
    checkpoint 0, ..., never), each [S + 1]: `accepted` tokens (bonus not counted), `rows` verified, `draft_seconds`.
    `context`: tokens before the round.
    """

    confidences: tuple[float, ...]
    accepted: tuple[int, ...]
    rows: tuple[int, ...]
    draft_seconds: tuple[float, ...]
    context: int


class WatchedDraft:
    """A draft that notes what each of its passes was expected to take."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.in_one_pass = draft.in_one_pass
        self.passes: list[float] = []

    def expand(self, tree: TreeBuilder, nodes: Sequence[int], width: int) -> Level:
        """Make the pass."""
        self.passes.append(float(self.draft.seconds(len(nodes))))
        return self.draft.expand(tree, nodes, width)

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        """Return what the next pass is expected to take."""
        return self.draft.seconds(rows)


@dataclass(frozen=True, slots=True)
class Recorder(FixedPolicy):
    """Verifies the dense tree, and writes down what the stages of the paper's method would have verified instead."""

    kept: list[tuple[int, list[float], list[float], list[TokenTree]]] = field(default_factory=list)
    observed = 1024
    retrieves = True

    def propose(self, seq: TokenSequence) -> TreeBuilder:
        """Return the dense tree."""
        draft = self.drafter.begin(seq)
        if draft is None:
            return TreeBuilder(seq.root_token)
        watched, best_paths = WatchedDraft(draft), list[float]()

        def gate(depth: int, tree: TreeBuilder, frontier: Sequence[int]) -> bool:
            best_paths.append(math.exp(tree.scores[frontier[0]]) if frontier else 0.0)
            return always(depth, tree, frontier)

        builder = self.grown(watched, seq, gate)
        if seq.stop.remaining - 2 >= self.gates.depth:  # a beam cut short by the end of the text says little
            trees = [self.stage_tree(builder, seq, stage) for stage in range(len(self.gates.shares))]
            self.kept.append((len(seq.token_ids), best_paths, watched.passes, trees))
        return self.capped(builder, self.gates.rows)

    def stage_tree(self, builder: TreeBuilder, seq: TokenSequence, stage: int) -> TokenTree:
        """Return what the paper's method verifies when its gate ends at `stage`, from a beam of full depth."""
        share = self.gates.shares[stage]
        deepest = [*self.gates.checkpoints, self.gates.depth][stage]
        tree = self.capped(up_to(builder, deepest + 1), share)
        graft_successors(tree, seq, self.gates.rows - share, self.vocab_size)
        return tree.build()

    def rounds(self, token_ids: Sequence[int]) -> Iterator[Round]:
        """Yield the rounds of one finished text, and forget them."""
        for length, paths, passes, trees in self.kept:
            truth = token_ids[length:]
            spent = np.cumsum(passes)
            last = [min(c, len(passes) - 1) for c in (*self.gates.checkpoints, self.gates.depth)]
            yield Round(
                tuple(round(p, 6) for p in paths),
                tuple(accepted_length(tree, truth) for tree in trees),
                tuple(len(tree) for tree in trees),
                tuple(round(float(spent[i]), 6) for i in last),
                length,
            )
        self.kept.clear()


def up_to(builder: TreeBuilder, depth: int) -> TreeBuilder:
    """Return the nodes of at most this depth (root: 0), in the same order."""
    kept, place, depths = TreeBuilder(builder.token_ids[0]), {0: 0}, [0]
    for node in range(1, len(builder)):
        parent = builder.parents[node]
        depths.append(depths[parent] + 1)
        if depths[node] <= depth:
            token, source = builder.token_ids[node], builder.sources[node]
            place[node] = kept.add(place[parent], token, builder.scores[node], source)
    return kept


def accepted_length(tree: TokenTree, truth: Sequence[int]) -> int:
    """Return how many tokens of `truth` a tree holds as a path from its root."""
    children, node = tree.children(), 0
    for depth, token in enumerate(truth):
        found = children[node].get(token)
        if found is None:
            return depth
        node = found
    return len(truth)


def record(engine: Any, prompts: Sequence[list[int]], gates: Gates, max_new_tokens: int) -> list[Round]:
    """Let an engine with a drafter write greedily after each prompt; return its rounds."""
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    rounds: list[Round] = []
    for prompt in prompts:
        recorder = Recorder(engine.drafter, gates, engine.config.max_nodes, engine.target.vocab_size)
        seq = engine.open(prompt, params, policy="dense")
        seq.policy = recorder
        for _ in engine.run([seq]):
            pass
        rounds += recorder.rounds(seq.token_ids)
    return rounds


def save(path: str | Path, rounds: Sequence[Round], gates: Gates) -> None:
    """Write recorded rounds as JSON, one a line, with the checkpoints and shares that they were recorded for."""
    head = {"checkpoints": gates.checkpoints, "shares": gates.shares, "depth": gates.depth, "width": gates.width}
    lines = [[one.confidences, one.accepted, one.rows, one.draft_seconds, one.context] for one in rounds]
    body = ",\n".join(json.dumps(line) for line in lines)
    Path(path).write_text(f'{{"{VERSION}": 1, "gates": {json.dumps(head)}, "rounds": [\n{body}\n]}}\n', "utf-8")


def load(path: str | Path) -> tuple[list[Round], Gates]:
    """Read recorded rounds; `GraftError` for anything else."""
    try:
        document: Any = json.loads(Path(path).read_text("utf-8"))
        if document[VERSION] != 1:
            raise ValueError("version")
        gates = Gates(**document["gates"])
        rounds = [_round(line, len(gates.shares)) for line in document["rounds"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GraftError(f"recorded levels {path}: expected a file of --record, version 1 ({error})") from error
    return rounds, gates


def _round(line: Any, num_stages: int) -> Round:
    confidences, accepted, rows, seconds, context = line
    one = Round(tuple(map(float, confidences)), tuple(accepted), tuple(rows), tuple(map(float, seconds)), int(context))
    if not len(one.accepted) == len(one.rows) == len(one.draft_seconds) == num_stages:
        raise ValueError(f"a round without {num_stages} stages")
    numbers = np.asarray([*one.confidences, *one.accepted, *one.rows, *one.draft_seconds, context], np.float64)
    if (
        not np.all(np.isfinite(numbers))
        or numbers.min() < 0
        or min(one.rows) < 1
        or max(one.confidences, default=0) > 1
    ):
        raise ValueError("a round with numbers out of range")
    return one
