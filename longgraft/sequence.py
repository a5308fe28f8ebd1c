"""All mutable state of one request. Nothing else in the engine is mutable.

Between rounds the cache holds one row fewer than there are tokens: the last token is the root of the next
tree and its K/V are computed together with the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from longgraft.cache import SequenceCache
from longgraft.config import TokenLogprob
from longgraft.kernels.top_ids import top_ids
from longgraft.matcher import Matcher
from longgraft.prompt_scores import PromptScores
from longgraft.sampler import Sampler
from longgraft.stats import Stats
from longgraft.stop import StopRules
from longgraft.trace import Trace
from longgraft.tree import Acceptance, Continuation, Source, TokenTree, TreeBuilder, Verification

# Rows of the successor table refreshed after a round: the visited nodes and the likeliest others. Every row
# costs a top-k over the whole vocabulary, and rows beyond a few add little (the paper refreshes all).
OBSERVED = 8
NUM_SUCCESSORS = 8
# How fast kept promises are forgotten, a round, and how many accepted nodes a fresh sequence is credited with.
FORGET = 0.97
TRUST_PRIOR = 1.0


class Index(Protocol):
    """What a sequence asks of its index; `longgraft.index.context_index.ContextIndex` is the real one."""

    def extend(self, token_ids: npt.ArrayLike, learn: bool) -> None:
        """Take in committed tokens."""

    def observe(self, token_ids: npt.ArrayLike, top_ids: npt.NDArray[np.int32]) -> None:
        """Take in the target's likeliest successors of some tokens."""

    def draft(self, budget: int, path: Any = (), at: int = 0) -> Continuation | None:
        """Propose at most `budget` nodes after the committed tokens and `path`."""


class Policy(Protocol):
    """How the proposals of a round come about; `longgraft.policy` makes them.

    `adapts`: True where the cost table chooses how many of the best nodes are verified, False where all are.
    `observed`: at most so many nodes refresh the successor table a round. `retrieves`, `drafts`: whether the index
    and the drafter are fed at all.
    """

    adapts: bool
    observed: int
    retrieves: bool
    drafts: bool

    def propose(self, seq: Sequence) -> TreeBuilder:
        """Return this round's proposals, scored by the log-probability that a node's path is accepted."""

    def learn(self, seq: Sequence, accepted: Acceptance) -> None:
        """See what became of them, before the sequence commits it."""


@dataclass
class Sequence:
    """One request: tokens, what was computed about them, how to choose the next ones and when to stop.

    `num_indexed`: the index holds so many first tokens. `ended`: why it ended before a stop rule fired. `trace`: its
    rounds, if they are kept.
    """

    token_ids: list[int]
    prompt_len: int
    cache: SequenceCache
    index: Index
    sampler: Sampler
    stop: StopRules
    stats: Stats
    policy: Policy
    long_rope: bool = False
    draft_state: Any = None
    policy_state: Any = None
    tenant: str | None = None
    num_indexed: int = 0
    ended: str | None = None
    promised: float = 0.0
    kept: float = 0.0
    sources: list[int] = field(default_factory=list)
    origins: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    matcher: Matcher | None = None
    trace: Trace | None = None

    @property
    def root_token(self) -> int:
        """The last committed token, whose K/V are not in the cache yet."""
        return self.token_ids[-1]

    @property
    def new_token_ids(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.token_ids[self.prompt_len :]

    @property
    def is_finished(self) -> bool:
        """True once a stop rule has fired, and nothing is left to be said of the prompt."""
        return self.stop.finish_reason is not None and not self.is_scoring

    @property
    def is_scoring(self) -> bool:
        """True while log-probabilities of prompt tokens are asked for and missing."""
        return self.prompt_scores is not None and not self.prompt_scores.is_complete

    @property
    def trust(self) -> float:
        """Accepted nodes over those that trees promised lately, at most 1.

        Probabilities are calibrated over all proposals; those picked as the best promise a little too much.
        """
        return min(1.0, (TRUST_PRIOR + self.kept) / (TRUST_PRIOR + self.promised))

    def extend(self, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        """Commit `token_ids` (the accepted ones after clipping): KV rows, index, tokens, provenance, stats."""
        path = accepted.path[: len(token_ids)]
        self.cache.keep([int(result.slots[node]) for node in path])
        if result.features is not None and path:
            self.cache.write_side(self.cache.length - len(path), result.features[path])
        if self.policy.retrieves:
            self._observe(result, path)
            self.index.extend(np.asarray(token_ids, np.int32), learn=True)
            self.num_indexed += len(token_ids)
        self.logprobs += accepted.logprobs[: len(token_ids)]
        self.record(token_ids, result.tree, accepted.path[1 : len(token_ids) + 1])

    def record(self, token_ids: list[int], tree: TokenTree, proposed: list[int]) -> None:
        """Commit `token_ids` as text alone: where they came from, of which the first were the nodes `proposed`."""
        self.token_ids.extend(token_ids)
        drawn = len(token_ids) - len(proposed)
        self.sources += [int(tree.sources[node]) for node in proposed] + [int(Source.ROOT)] * drawn
        self.origins += [(int(d), int(o)) for d, o in tree.origins[proposed]] + [(-1, -1)] * drawn
        self.stats.record(tree, proposed, len(token_ids))
        self.promised = FORGET * self.promised + float(np.exp(tree.scores[1:]).sum())
        self.kept = FORGET * self.kept + len(proposed)

    def _observe(self, result: Verification, path: list[int]) -> None:
        """Refresh successor rows from raw logits: of the visited nodes, then of the likeliest others."""
        most = self.policy.observed
        visited = path[-most:]
        likeliest = np.argsort(-result.tree.scores, kind="stable")[:most].tolist()
        others = [node for node in likeliest if node not in path]
        # Last write wins, so the visited nodes come last.
        nodes = others[: most - len(visited)] + visited
        k = min(NUM_SUCCESSORS, result.logits.shape[-1])
        top = top_ids(result.logits[nodes], k)
        self.index.observe(result.tree.token_ids[nodes], top.to("cpu").numpy().astype(np.int32))
