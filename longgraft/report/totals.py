"""What a report says in numbers: the sums of one generation beside plain decoding, and its sources.

Knows outputs and an audit's verdict; no HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longgraft.audit import Audit
from longgraft.config import Output
from longgraft.render import LOOKS
from longgraft.tree import Source

# Verdict of an audit: what to tell readers.
SAID = {
    "exact": "Plain decoding with the same seed wrote the same {n} tokens, one for one.",
    "proven_tie": "Plain decoding parted at a tie within rounding, which was proven.",
    "router_tie": "Plain decoding parted at a tie between experts.",
    "MISMATCH": "PLAIN DECODING WROTE SOMETHING ELSE: this is a mistake in longgraft, please report it.",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison; a text is "" where there is nothing to say."""

    name: str
    grafted: str
    plain: str = ""
    gain: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """One source: its letter, what it is called, tokens of the answer, proposed and accepted nodes."""

    letter: str
    called: str
    tokens: int
    proposed: int
    accepted: int


def rows_of(output: Output, plain: Output | None) -> list[Row]:
    """Return the comparison line by line; `gain` is how many times better than plain decoding."""
    mine, other = output.stats, plain.stats if plain is not None else {}
    lines = [
        ("decoding speed", "decode_tokens_per_s", "{:,.1f} tokens/s", +1),
        ("decoding time", "decode_s", "{:,.2f} s", -1),
        ("reading the prompt", "prefill_s", "{:,.2f} s", 0),
        ("in all", "end_to_end_s", "{:,.2f} s", -1),
        ("passes of the model", "rounds", "{:,}", -1),
        ("tokens a pass", "acceptance_length", "{:,.2f}", +1),
    ]
    return [_row(name, mine[key], other.get(key), form, sign) for name, key, form, sign in lines]


def _row(name: str, mine: float, other: float | None, form: str, sign: int) -> Row:
    if other is None:
        return Row(name, form.format(mine))
    better, worse = (mine, other) if sign > 0 else (other, mine)
    gain = f"{better / worse:,.2f}x" if sign and worse else ""
    return Row(name, form.format(mine), form.format(other), gain)


def shares_of(output: Output) -> list[Share]:
    """Return the sources that proposed something or wrote a token, the most frequent first."""
    tokens = Counter(int(source) for source in output.sources)
    proposed, accepted = (_by_source(output.stats, key) for key in ("nodes_by_source", "accepted_by_source"))
    present = {source for source in LOOKS if tokens[source] or proposed.get(source)}
    return [
        Share(LOOKS[s][0], LOOKS[s][2], tokens[s], proposed.get(s, 0), accepted.get(s, 0))
        for s in sorted(present, key=lambda s: (-tokens[s], -proposed.get(s, 0), s))
    ]


def _by_source(stats: Mapping[str, Any], key: str) -> dict[int, int]:
    return {int(Source[name.upper()]): count for name, count in stats[key].items()}


def verdict_of(audit: Audit | None) -> str:
    """Return a sentence on whether plain decoding wrote the same; "" if it was not asked."""
    return SAID[audit.verdict].format(n=len(audit.grafted.token_ids)) if audit is not None else ""


def headline(output: Output, audit: Audit | None) -> str:
    """Return one line: how much, how fast, how many times faster."""
    stats = output.stats
    line = f"{stats['new_tokens']:,} tokens in {stats['rounds']:,} passes of the model"
    speed = f"{stats['decode_tokens_per_s']:,.1f} tokens/s"
    plain = audit.plain.stats["decode_tokens_per_s"] if audit is not None else 0.0
    return f"{line}, {speed}" + (f", {stats['decode_tokens_per_s'] / plain:.2f}x plain decoding" if plain else "")
