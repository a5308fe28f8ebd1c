"""What happened in a generation, in plain numbers. The definitions of all metrics are here.

acceptance length: new tokens per target pass, the bonus token included, over all rounds (a plain round
counts 1). nodes: proposed nodes that were verified, root not counted. accepted: proposed nodes on the
agreeing path that were committed. decode tokens/s: new tokens / time of all rounds. end-to-end time: prefill,
rounds and everything between, waiting for memory included. put_back: how often the memory was given to an older
request, and all tokens so far were read again.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from longgraft.tree import Source, TokenTree


@dataclass(frozen=True, slots=True)
class RoundStats:
    """One round: proposed nodes, accepted ones, committed tokens, and whether a later sibling was chosen."""

    nodes: int
    accepted: int
    new_tokens: int
    sibling_chosen: bool
    max_depth: int


@dataclass
class Stats:
    """Per-request record; `summary()` is what users see."""

    prompt_tokens: int = 0
    is_plain: bool = False
    rounds: list[RoundStats] = field(default_factory=list)
    nodes_by_source: Counter[int] = field(default_factory=Counter)
    accepted_by_source: Counter[int] = field(default_factory=Counter)
    nodes_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    nodes_by_place: Counter[tuple[int, int]] = field(default_factory=Counter)
    accepted_by_place: Counter[tuple[int, int]] = field(default_factory=Counter)
    draft_rows: list[int] = field(default_factory=list)
    is_priced: bool = False
    draft_price: float = 0.0
    prefilled_tokens: int = 0
    put_back: int = 0
    prefix_rows: int = 0
    prefix_chunks: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the enclosed block to a stage."""
        with shared_stage([self], name):
            yield

    @contextmanager
    def drafting(self, rows: int, price: float = 0.0) -> Iterator[None]:
        """Add the enclosed draft pass over `rows` nodes, expected to take `price` seconds, to the record."""
        self.draft_rows.append(rows)
        self.draft_price += price
        with self.stage("draft"):
            yield

    def record(self, tree: TokenTree, accepted: list[int], new_tokens: int) -> None:
        """Take in one round: the verified tree, the accepted proposed nodes, the number of committed tokens."""
        self.nodes_by_source.update(tree.sources[1:].tolist())
        self.nodes_by_depth.update(tree.depths[1:].tolist())
        self.nodes_by_place.update(zip(tree.sources[1:].tolist(), tree.depths[1:].tolist()))
        self.accepted_by_place.update((int(tree.sources[node]), int(tree.depths[node])) for node in accepted)
        self.accepted_by_source.update(int(tree.sources[node]) for node in accepted)
        self.accepted_by_depth.update(int(tree.depths[node]) for node in accepted)
        firsts = {int(tree.parents[node]): node for node in range(len(tree) - 1, 0, -1)}
        sibling = any(firsts[int(tree.parents[node])] != node for node in accepted)
        self.rounds.append(RoundStats(len(tree) - 1, len(accepted), new_tokens, sibling, int(tree.depths.max())))

    @property
    def new_tokens(self) -> int:
        """Committed tokens so far."""
        return sum(r.new_tokens for r in self.rounds)

    @property
    def acceptance_length(self) -> float:
        """New tokens per target pass, bonus included, over all rounds."""
        return self.new_tokens / len(self.rounds) if self.rounds else 0.0

    def summary(self) -> dict[str, Any]:
        """Return everything as JSON-ready numbers; times in seconds."""
        prefill = self.seconds["prefill"]
        decode = sum(self.seconds[name] for name in ("plan", "verify", "accept", "extend"))
        drafted = [r for r in self.rounds if r.nodes]
        return {
            "prompt_tokens": self.prompt_tokens,
            "prefix_rows": self.prefix_rows,
            "prefix_chunks": self.prefix_chunks,
            "new_tokens": self.new_tokens,
            "rounds": len(self.rounds),
            "drafted_rounds": len(drafted),
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_length_drafted": round(sum(r.new_tokens for r in drafted) / len(drafted), 4)
            if drafted
            else 0.0,
            "nodes": sum(r.nodes for r in self.rounds),
            "accepted": sum(r.accepted for r in self.rounds),
            "nodes_by_source": _named(self.nodes_by_source),
            "accepted_by_source": _named(self.accepted_by_source),
            "nodes_by_depth": dict(sorted(self.nodes_by_depth.items())),
            "accepted_by_depth": dict(sorted(self.accepted_by_depth.items())),
            "nodes_by_source_depth": _placed(self.nodes_by_place),
            "accepted_by_source_depth": _placed(self.accepted_by_place),
            "draft_passes": len(self.draft_rows),
            "draft_rows": list(self.draft_rows),
            "draft_price_s": round(self.draft_price, 4),
            "draft_s": round(self.seconds.get("draft", 0.0), 4),
            "sibling_rounds": sum(r.sibling_chosen for r in self.rounds),
            "new_tokens_by_round": [r.new_tokens for r in self.rounds],
            "accepted_by_round": [(r.nodes, r.accepted) for r in self.rounds],
            "put_back": self.put_back,
            "prefill_tokens_per_s": round(self.prefilled_tokens / prefill, 2) if prefill else 0.0,
            "decode_tokens_per_s": round(self.new_tokens / decode, 2) if decode else 0.0,
            "prefill_s": round(prefill, 4),
            "decode_s": round(decode, 4),
            "end_to_end_s": round(self.seconds["total"], 4),
            "seconds_by_stage": {name: round(s, 4) for name, s in sorted(self.seconds.items()) if name != "total"},
            "why": self.why(),
        }

    def why(self) -> str:
        """Return one line on why the speed-up was small, or an empty string if it was not."""
        nodes, accepted = sum(r.nodes for r in self.rounds), sum(r.accepted for r in self.rounds)
        if not self.rounds:
            return "nothing was generated"
        if self.is_plain:
            return "plain decoding was asked for"
        if self.seconds["prefill"] > 2 * self.seconds["verify"]:
            return "most of the time went into reading the prompt, which drafting cannot shorten"
        if self.acceptance_length >= 2:
            return ""
        if nodes == 0:
            return "no proposal was worth its cost: the output repeats neither the prompt nor itself"
        return f"{accepted} of {nodes} proposed tokens were right: the output repeats little of the prompt or of itself"


@contextmanager
def shared_stage(records: Sequence[Stats], name: str) -> Iterator[None]:
    """Add the time of the enclosed block to a stage that all these requests go through together."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        for stats in records:
            stats.seconds[name] += time.perf_counter() - begin


def _placed(counts: Counter[tuple[int, int]]) -> dict[str, dict[int, int]]:
    """Return counts by source, then by depth."""
    placed: dict[str, dict[int, int]] = {}
    for (source, depth), count in sorted(counts.items()):
        placed.setdefault(Source(source).name.lower(), {})[depth] = count
    return placed


def _named(counts: Counter[int]) -> dict[str, int]:
    return {Source(source).name.lower(): count for source, count in sorted(counts.items())}
