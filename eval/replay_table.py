"""The figures of a replay as rows, and laid out for reading: a table of methods and the reliability diagram.

Knows no drafter and no trace. One row is one method at one budget on one family; `pooled` is all tokens / all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longgraft.eval.tally import Tally
from longgraft.eval.traces import POOLED


def rows_of(method: str, budget: int, tallies: dict[str, Tally]) -> list[dict[str, Any]]:
    """Return one row a family, `pooled` last."""
    names = [*sorted(set(tallies) - {POOLED}), POOLED]
    return [{"method": method, "family": name, "budget": budget, **tallies[name].summary()} for name in names]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay rows out for reading: a block a budget, a line a method, a column a family."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    text = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        heads = "".join(f"{name[:12]:>13}" for name in families)
        text.append(f"\nB = {budget}\n{'method':15}{heads}{'mean':>7}{'acc/node':>10}{'p50 us':>9}{'p99 us':>9}")
        for method in dict.fromkeys(row["method"] for row in rows):
            found = {row["family"]: row for row in rows if (row["method"], row["budget"]) == (method, budget)}
            if found:
                lengths = [found[name]["acceptance_length"] for name in families]
                mean = sum(lengths[:-1]) / max(len(lengths) - 1, 1)
                last = found[POOLED]
                text.append(
                    f"{method:15}{''.join(f'{length:13.2f}' for length in lengths)}{mean:7.2f}"
                    f"{last['accepted_per_node']:10.3f}{last['draft_us_p50']:9.1f}{last['draft_us_p99']:9.1f}"
                )
    return "\n".join(text)


def diagram(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the reliability diagram out for reading."""
    text = ["\npredicted and observed acceptance of nodes (longgraft); * off by more than 0.05 + 2 standard errors"]
    for row in rows:
        text.append(
            f"B={row['budget']:<4} p >= {row['from']:<6} {row['nodes']:>9} nodes  {row['predicted']:.4f} -> "
            f"{row['observed']:.4f} +- {row['standard_error']:.4f}{' *' if row['off'] else ''}"
        )
    return "\n".join(text)
