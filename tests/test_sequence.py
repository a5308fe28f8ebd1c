"""What a sequence does with accepted tokens: rows kept, index told, provenance written down, all in step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from longgraft.cache import ChunkPool, LayerShape, SequenceCache
from longgraft.config import TokenLogprob
from longgraft.policy import RetrievalPolicy
from longgraft.sequence import NUM_SUCCESSORS, OBSERVED, Sequence
from longgraft.stats import Stats
from longgraft.stop import StopRules
from longgraft.tree import Acceptance, Source, TokenTree, TreeBuilder, Verification

VOCAB = 80
PROMPT = [4, 5, 6]


class RecordingIndex:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def extend(self, token_ids: Any, learn: bool) -> None:
        self.calls.append(("extend", np.asarray(token_ids).tolist(), learn))

    def observe(self, token_ids: Any, top_ids: Any) -> None:
        self.calls.append(("observe", np.asarray(token_ids).tolist(), np.asarray(top_ids).tolist()))

    def draft(self, budget: int, path: Any = (), at: int = 0) -> None:
        return None


def sequence() -> Sequence:
    """A sequence after its prompt was read: row r of the cache holds the value r."""
    cache = SequenceCache(ChunkPool([LayerShape(1, 1, 1)], 2, torch.float32, chunk_rows=8))
    cache.reserve(len(PROMPT) - 1)
    rows = torch.arange(len(PROMPT) - 1.0).reshape(-1, 1, 1)
    cache.write(0, rows, rows)
    cache.keep(range(len(PROMPT) - 1))
    return Sequence(
        list(PROMPT), len(PROMPT), cache, RecordingIndex(), None, StopRules((), (), 9), Stats(),  # type: ignore[arg-type]
        RetrievalPolicy(60, 100),
    )  # fmt: skip


def tree() -> TokenTree:
    """Root 6; 10 and 11 below it; 12 below 11; 13 below 12."""
    builder = TreeBuilder(PROMPT[-1])
    for number, (parent, token, source) in enumerate(
        [(0, 10, Source.PROMPT), (0, 11, Source.HISTORY), (2, 12, Source.SUCCESSOR), (3, 13, Source.PROMPT)]
    ):
        builder.add(parent, token, -0.1 * number - 0.1, source, (0, 50 + number))
    return builder.build()


def verified(seq: Sequence, made: TokenTree) -> Verification:
    """Write row 100 + i for node i; node i finds token i likeliest, then i + 1 and so on."""
    seq.cache.reserve(len(made))
    rows = 100 + torch.arange(float(len(made))).reshape(-1, 1, 1)
    seq.cache.write(0, rows, rows)
    logits = torch.zeros(len(made), VOCAB)
    for node in range(len(made)):
        logits[node, node : node + NUM_SUCCESSORS] = torch.arange(NUM_SUCCESSORS, 0.0, -1.0)
    return Verification(made, logits, None, np.arange(len(made), dtype=np.int32))


def accepted(path: list[int], token_ids: list[int], logprobs: bool = False) -> Acceptance:
    return Acceptance(path, token_ids, tuple(TokenLogprob(t, -1.0) for t in token_ids) if logprobs else ())


def rows(seq: Sequence) -> list[int]:
    return [int(row) for keys, _ in seq.cache.runs(0) for row in keys.flatten()]


def test_a_path_is_committed() -> None:
    seq, made = sequence(), tree()
    seq.extend([11, 12, 30], verified(seq, made), accepted([0, 2, 3], [11, 12, 30], logprobs=True))
    assert seq.token_ids == [*PROMPT, 11, 12, 30] and seq.new_token_ids == [11, 12, 30] and seq.root_token == 30
    assert seq.cache.length == len(seq.token_ids) - 1
    assert rows(seq) == [0, 1, 100, 102, 103], "the rows of the root and of the accepted nodes, in their order"
    assert seq.sources == [Source.HISTORY, Source.SUCCESSOR, Source.ROOT]
    assert seq.origins == [(0, 51), (0, 52), (-1, -1)]
    assert [entry.token_id for entry in seq.logprobs] == [11, 12, 30]
    assert (seq.stats.rounds[0].nodes, seq.stats.rounds[0].accepted, seq.stats.new_tokens) == (4, 2, 3)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_a_clipped_path_ends_with_its_last_committed_token(kept: int) -> None:
    seq, made = sequence(), tree()
    tokens = [11, 12, 13, 30]
    seq.extend(tokens[:kept], verified(seq, made), accepted([0, 2, 3, 4], tokens, logprobs=True))
    assert seq.new_token_ids == tokens[:kept] and len(seq.logprobs) == kept
    assert seq.cache.length == len(seq.token_ids) - 1 and seq.cache.reserved == 0
    assert rows(seq)[2:] == [100, 102, 103, 104][:kept]
    proposed = min(kept, 3)
    assert seq.sources == [Source.HISTORY, Source.SUCCESSOR, Source.PROMPT, Source.ROOT][:kept]
    assert seq.stats.rounds[0].accepted == proposed
    assert len(seq.origins) == kept


def test_a_plain_round_commits_one_token() -> None:
    seq = sequence()
    seq.extend([7], verified(seq, TreeBuilder(PROMPT[-1]).build()), accepted([0], [7]))
    assert (seq.new_token_ids, seq.sources, seq.origins) == ([7], [Source.ROOT], [(-1, -1)])
    assert rows(seq) == [0, 1, 100] and seq.logprobs == []


def test_the_index_learns_of_every_committed_token_once() -> None:
    seq, made = sequence(), tree()
    seq.extend([11, 12], verified(seq, made), accepted([0, 2, 3], [11, 12, 30]))
    extended = [call for call in seq.index.calls if call[0] == "extend"]  # type: ignore[attr-defined]
    assert extended == [("extend", [11, 12], True)]


def test_successors_come_from_the_rows_of_their_nodes_the_visited_ones_last() -> None:
    seq, made = sequence(), tree()
    seq.extend([11, 12, 30], verified(seq, made), accepted([0, 2, 3], [11, 12, 30]))
    ((_, tokens, tops),) = [call for call in seq.index.calls if call[0] == "observe"]  # type: ignore[attr-defined]
    assert tokens[-3:] == [6, 11, 12] and sorted(tokens) == [6, 10, 11, 12, 13]
    nodes = {6: 0, 10: 1, 11: 2, 12: 3, 13: 4}
    assert all(top == list(range(nodes[token], nodes[token] + NUM_SUCCESSORS)) for token, top in zip(tokens, tops))


@pytest.mark.parametrize("depth", [0, 3, 30])
def test_the_work_for_successors_is_bounded(depth: int) -> None:
    builder = TreeBuilder(PROMPT[-1])
    for node in range(depth):
        builder.add(node, node, -0.1 * node, Source.PROMPT)
    for token in range(20):
        builder.add(0, 20 + token % 19, -9.0, Source.PROMPT)
    seq = sequence()
    seq.cache = SequenceCache(ChunkPool([LayerShape(1, 1, 1)], 9, torch.float32, chunk_rows=8))
    made = builder.build()
    path = list(range(depth + 1))
    seq.extend([1] * len(path), verified(seq, made), accepted(path, [1] * len(path)))
    ((_, tokens, _),) = [call for call in seq.index.calls if call[0] == "observe"]  # type: ignore[attr-defined]
    assert len(tokens) == OBSERVED


def test_a_vocabulary_smaller_than_the_successor_row() -> None:
    seq = sequence()
    made = TreeBuilder(1).build()
    seq.cache.reserve(1)
    seq.extend([1], Verification(made, torch.zeros(1, 3), None, np.zeros(1, np.int32)), accepted([0], [1]))
    ((_, _, tops),) = [call for call in seq.index.calls if call[0] == "observe"]  # type: ignore[attr-defined]
    assert sorted(tops[0]) == [0, 1, 2]


def test_it_is_finished_when_a_stop_rule_says_so() -> None:
    seq = sequence()
    assert not seq.is_finished
    seq.stop.clip([1] * 9)
    assert seq.is_finished and seq.stop.finish_reason == "length"


def test_trust_is_the_share_of_promises_kept() -> None:
    seq = sequence()
    assert seq.trust == 1.0
    made = tree()
    for _ in range(2):
        seq.extend([30], verified(seq, made), accepted([0], [30]))
    low = seq.trust
    assert low < 0.5, "nearly three accepted nodes were promised, twice"
    for _ in range(3):
        seq.extend([11, 12, 30], verified(seq, made), accepted([0, 2, 3], [11, 12, 30]))
    assert low < seq.trust < 1.0


def test_trust_comes_back_when_nothing_is_promised() -> None:
    """A sequence that ran plain for long is believed again."""
    seq = sequence()
    seq.extend([30], verified(seq, tree()), accepted([0], [30]))
    for _ in range(200):
        seq.cache.truncate(0)
        seq.extend([1], verified(seq, TreeBuilder(1).build()), accepted([0], [1]))
    assert seq.trust > 0.95
