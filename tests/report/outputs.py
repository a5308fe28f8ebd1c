"""Outputs made by hand: a text whose tokens came from given sources, with rounds that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longgraft.config import Output
from longgraft.stats import Stats
from longgraft.trace import Trace
from longgraft.tree import Source, TreeBuilder

R, P, H, S, D, V, C, X, F, G = (
    int(source)
    for source in (
        Source.ROOT, Source.PROMPT, Source.HISTORY, Source.SUCCESSOR, Source.DRAFT,
        Source.DENSE, Source.CORPUS, Source.PREDICTION, Source.DOCUMENT, Source.GRAMMAR,
    )
)  # fmt: skip


def made(
    token_ids: Sequence[int],
    sources: Sequence[int],
    text: str,
    *,
    wrong: int = 1,
    origins: Sequence[tuple[int, int]] | None = None,
    **changes: Any,
) -> Output:
    """An output; a round ends at every drawn token. In each round `wrong` nodes hang beside the path."""
    stats, trace = Stats(prompt_tokens=5), Trace()
    origins = origins or [(-1, -1)] * len(sources)
    for begin, end in rounds_of(sources):
        builder, path = TreeBuilder(0), [0]
        for i in range(begin, end):
            if sources[i] != R:
                path.append(builder.add(path[-1], token_ids[i], -0.25 * len(path), sources[i], origins[i]))
        for other in range(wrong):
            builder.add(0, 10_000 + other, -2.0 - other, S)
        tree = builder.build()
        spent = {"plan": 0.001, "verify": 0.04, "accept": 0.002, "extend": 0.003}
        for stage, seconds in spent.items():
            stats.seconds[stage] += seconds
        stats.seconds["total"] += 0.05
        numbers = [node for node in range(1, len(tree)) if tree.token_ids[node] < 10_000]
        stats.record(tree, numbers, end - begin)
        trace.take(tree, numbers, end - begin, stats.seconds)
    values: dict[str, Any] = {
        "token_ids": tuple(token_ids),
        "text": text,
        "finish_reason": "length",
        "seed": 3,
        "prompt_len": 5,
        "sources": tuple(sources),
        "origins": tuple(origins),
        "stats": stats.summary(),
        "trace": trace,
    }
    return Output(**values | changes)


def rounds_of(sources: Sequence[int]) -> list[tuple[int, int]]:
    """Where rounds begin and end: behind every drawn token."""
    ends = [i + 1 for i, source in enumerate(sources) if source == R]
    if not ends or ends[-1] < len(sources):
        ends.append(len(sources))
    return [(begin, end) for begin, end in zip([0, *ends], ends) if end > begin]
