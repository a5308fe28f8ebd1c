"""The lossless audit: is grafted output what plain decoding with the same seed gives, token for token?

Knows the engine and the sampler's `draw`; nothing of how proposals are made. In exact arithmetic the two cannot
differ. In float32 and below a forward of n rows may round differently from one of 1 row, so a token may change
where two tie within that rounding. A difference counts as a *proven tie* only if

    gap <= 2 x rounding

rounding: the largest difference of a logit between a 1-row and an n-row forward, measured behind plain decoding's
own cache at the position in question. gap: how far one token's logit must rise there for the sampler, noise
and filters included, to draw it instead. The sampler itself is asked, so the gap holds for any processors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from longgraft.cache import SequenceCache
from longgraft.config import Output, SamplingParams
from longgraft.engine import Engine
from longgraft.measure import filled, time_forward
from longgraft.policy import Policies
from longgraft.routes import Routes
from longgraft.sampler import Sampler
from longgraft.sequence import Sequence
from longgraft.target import Segment, Target
from longgraft.tree import Source, TokenTree, TreeBuilder

WIDTHS = (2, 4, 8, 16)
# A gap beyond this many logits is as good as none: the token is forbidden.
_FORBIDDEN = 2.0**20
_BISECTIONS = 40
VERDICTS = ("exact", "proven_tie", "router_tie", "MISMATCH")


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where grafted and plain output part: what each says there, and what was measured.

    `position` counts output tokens from 0. A token is None where that output had ended. `gap` and `bound` are in
    units of raw logits; `gap` is None if no logit would do.
    """

    position: int
    plain_token: int | None
    grafted_token: int | None
    verdict: str
    gap: float | None
    bound: float


@dataclass(frozen=True, slots=True)
class Audit:
    """What plain and grafted decoding gave, and every difference that was looked at (only the last is unproven)."""

    plain: Output
    grafted: Output
    differences: tuple[Difference, ...]

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`, the gravest that occurred."""
        return max((d.verdict for d in self.differences), key=VERDICTS.index, default="exact")

    def summary(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; `first_difference`, `gap` and `bound` are None if exact."""
        first = self.differences[0] if self.differences else None
        tokens = len(self.plain.token_ids)
        return {
            "exact": not self.differences,
            "verdict": self.verdict,
            "tokens": tokens,
            "first_difference": asdict(first) if first else None,
            "gap": first.gap if first else None,
            "bound": first.bound if first else None,
            "differences": [asdict(d) for d in self.differences],
            "differences_per_1k": round(1000 * len(self.differences) / tokens, 3) if tokens else 0.0,
            "seed": self.plain.seed,
            "plain_stats": self.plain.stats,
            "grafted_stats": self.grafted.stats,
        }


def plain_twin(engine: Engine) -> Engine:
    """Return an engine for plain decoding on the same weights and KV pool."""
    twin = copy.copy(engine)
    twin.config = replace(engine.config, policy="plain")
    twin.policies = Policies(engine.drafter, None, twin.config, engine.target.vocab_size)
    twin.cost = None
    return twin


def audit(engine: Engine, prompt_ids: list[int], params: SamplingParams, *, keep_going: bool = False) -> Audit:
    """Decode grafted, then plainly with the same seed, and judge the first difference.

    With `keep_going` a tie is settled in plain decoding's favour and the audit goes on behind it: grafted decoding
    starts again after plain's token. Reads the prompt twice, and once more for every tie passed.
    """
    seq = engine.open(prompt_ids, params)
    _finish(engine, seq)
    return compare(engine, prompt_ids, engine.output(seq), seq.sampler.params, keep_going=keep_going)


def compare(
    engine: Engine, prompt_ids: list[int], grafted: Output, params: SamplingParams, *, keep_going: bool = False
) -> Audit:
    """Decode plainly and judge a finished grafted `output` against it; `params` as `audit` (the seed given)."""
    twin = plain_twin(engine)
    params = replace(params, seed=grafted.seed)
    seq = twin.open(prompt_ids, params)
    expected, widths = list(grafted.token_ids), _widths(engine, grafted)
    differences: list[Difference] = []
    have_parted = False  # from then on the rest of plain decoding is only timed
    for position, token in _tokens(twin, seq):
        proposed = expected[position] if position < len(expected) else None
        if have_parted or proposed == token:
            continue
        differences.append(judge(twin, seq, proposed, widths))
        have_parted = not keep_going or differences[-1].verdict == "MISMATCH"
        if not have_parted:
            expected = _resumed(engine, prompt_ids, seq.new_token_ids, params)
    num_plain = len(seq.new_token_ids)
    if len(expected) > num_plain and not have_parted:
        differences.append(Difference(num_plain, None, expected[num_plain], "MISMATCH", None, 0.0))
    return Audit(twin.output(seq), grafted, tuple(differences))


def _tokens(twin: Engine, seq: Sequence) -> Iterator[tuple[int, int]]:
    """Decode plainly and yield (output position, token) while the cache still stands where it was drawn."""
    for committed in twin.run([seq]):
        for token in committed[0]:
            yield len(seq.new_token_ids) - 1, token


def _finish(engine: Engine, seq: Sequence) -> None:
    for _ in engine.run([seq]):
        pass


def _resumed(engine: Engine, prompt_ids: list[int], forced: list[int], params: SamplingParams) -> list[int]:
    """Return the output of grafted decoding that is made to begin with `forced`."""
    seq = engine.open(prompt_ids, params)
    kept = seq.stop.clip(forced)
    seq.token_ids.extend(kept)
    seq.sources += [int(Source.ROOT)] * len(kept)
    seq.origins += [(-1, -1)] * len(kept)
    if not seq.is_finished:
        _finish(engine, seq)
    return seq.new_token_ids


def _widths(engine: Engine, grafted: Output) -> tuple[int, ...]:
    """Return the row counts to measure at: none in exact mode, where width does not matter."""
    if engine.config.exact:
        return ()
    widest = engine.config.max_nodes + 1
    return tuple(sorted({width for width in WIDTHS if width <= widest} | {widest} - {1}))


def judge(twin: Engine, seq: Sequence, proposed: int | None, widths: Seq[int]) -> Difference:
    """Judge one difference: plain decoding has just committed its token, grafted decoding `proposed` another one.

    Measures on forks of the plain cache, inside the target's session; the plain sequence is not changed.
    """
    position, drawn = len(seq.new_token_ids) - 1, seq.root_token
    if proposed is None or not widths:
        return Difference(position, drawn, proposed, "MISMATCH", None, 0.0)
    routes = Routes(twin.target.model)
    one, *others = _last_logits(twin, seq, (1, *widths), routes)
    routes_differ = any(chosen != routes.taken[0] for chosen in routes.taken[1:])
    bound = 2 * max(float((one - other).abs().max()) for other in others)
    mask = seq.matcher.fork() if seq.matcher else None
    sampler = Sampler(seq.sampler.params, seq.token_ids[: seq.prompt_len], twin.target.vocab_size, mask)
    gap = max(gap_of(sampler, one, seq.token_ids[:-1], token) for token in (drawn, proposed))
    if gap <= bound:
        verdict = "router_tie" if routes_differ else "proven_tie"
    else:
        verdict = "router_tie" if routes_differ or _routes_differed(twin, seq) else "MISMATCH"
    return Difference(position, drawn, proposed, verdict, gap if gap < _FORBIDDEN else None, bound)


def _last_logits(twin: Engine, seq: Sequence, widths: Seq[int], routes: Routes) -> list[Tensor]:
    """Return the logits `[V]` from which the newest token was drawn, once for every width of the forward."""
    tree = TreeBuilder(seq.token_ids[-2]).build()
    cache = seq.cache.fork()
    try:
        cache.truncate(len(seq.token_ids) - 2)
        found = []
        for rows in widths:
            with routes.first_rows(1):
                logits = twin.target.forward([padded(cache, tree, rows)], long_rope=seq.long_rope)[0]
            found.append(logits[0].double())
        return found
    finally:
        cache.release()


def _routes_differed(twin: Engine, seq: Sequence) -> bool:
    """Tell whether any output token so far chooses other experts when read 16 at a time than one at a time."""
    one, many = Routes(twin.target.model), Routes(twin.target.model)
    if not one.modules:
        return False
    for routes, rows in ((one, 1), (many, WIDTHS[-1])):
        cache = seq.cache.fork()
        try:
            cache.truncate(seq.prompt_len - 1)
            for begin in range(seq.prompt_len - 1, len(seq.token_ids) - 1, rows):
                token_ids = np.asarray(seq.token_ids[begin : begin + rows][: len(seq.token_ids) - 1 - begin], np.int32)
                positions = np.arange(begin, begin + len(token_ids), dtype=np.int32)
                with routes.first_rows(len(token_ids)):
                    twin.target.forward([Segment(cache, token_ids, positions)], long_rope=seq.long_rope)
                cache.keep(range(len(token_ids)))
        finally:
            cache.release()
    return one.by_row() != many.by_row()


def gap_of(sampler: Sampler, logits: Tensor, token_ids: list[int], token: int) -> float:
    """Return by how much `token`'s logit must rise to be drawn after `token_ids`: 0 if it is, inf if nothing helps.

    Without filters this is the difference of processed scores, noise included, times the temperature.
    """

    def is_drawn(rise: float) -> bool:
        raised = logits.clone()
        raised[token] += rise
        return sampler.draw(raised, token_ids).token_id == token

    if is_drawn(0.0):
        return 0.0
    low, high = 0.0, 2.0**-20
    while not is_drawn(high):
        low, high = high, 2 * high
        if high > _FORBIDDEN:
            return float("inf")
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_drawn(middle) else (middle, high)
    return high


def sentence(result: Audit, tokenizer: Any) -> str:
    """Return the outcome as one sentence for people."""
    num = len(result.plain.token_ids)
    if not result.differences:
        rates = [output.stats["decode_tokens_per_s"] for output in (result.grafted, result.plain)]
        speed = f"; decoded at {rates[0]:.1f} tokens/s, plainly at {rates[1]:.1f}" if all(rates) else ""
        return f"exact: all {num} tokens are those of plain decoding (seed {result.plain.seed}){speed}"
    first = result.differences[0]
    plain, grafted = (
        "the end" if token is None else f"{tokenizer.decode([token])!r} ({token})"
        for token in (first.plain_token, first.grafted_token)
    )
    gap = "none" if first.gap is None else f"{first.gap:.3g}"
    more = f"; {len(result.differences)} differences in all" if len(result.differences) > 1 else ""
    return (
        f"{result.verdict}: first difference at output token {first.position} of {num}, plain {plain}, "
        f"grafted {grafted}; gap {gap}, rounding allows {first.bound:.3g}{more}"
    )


def padded(cache: SequenceCache, tree: TokenTree, rows: int) -> Segment:
    """Lay a tree out in exactly `rows` rows: the others are copies of the root hung below it, never read."""
    padding = rows - len(tree)
    mask = np.eye(rows, dtype=np.bool_)
    mask[: len(tree), : len(tree)] = tree.ancestor_mask()
    mask[len(tree) :, 0] = True
    token_ids = np.concatenate([tree.token_ids, np.full(padding, tree.token_ids[0], np.int32)])
    positions = np.concatenate([tree.positions(cache.length), np.full(padding, cache.length + 1, np.int32)])
    return Segment(cache, token_ids, positions.astype(np.int32), mask)


def exact_cost(engine: Engine, context: int) -> dict[str, float]:
    """Return what exact mode's kernels cost a plain round behind `context` cached tokens, beside the usual ones."""
    times = []
    for target in (Target(engine.target.model, "auto"), engine.target):
        with target.session():
            cache = filled(target, engine.pool, context)
            try:
                times.append(time_forward(target, cache, 1, repeats=3))
            finally:
                cache.release()
    usual, exact = times
    return {"usual_s": round(usual, 5), "exact_s": round(exact, 5), "cost": round(exact / usual, 3)}
