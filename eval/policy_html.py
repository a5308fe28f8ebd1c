"""A report's sections as one HTML file that needs no other. Owns `jinja2`, which torch brings along. Knows no figures.

Light or dark as the reader's system says; figures are told by text, never by colour alone.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

if TYPE_CHECKING:
    from longgraft.eval.policy_report import Section

TEMPLATE = Path(__file__).resolve().parent / "data" / "report.html"


def html(parts: Sequence[Section], plots: Sequence[Path] = ()) -> str:
    """Return a page of sections with the plots below the first table; pictures lie inside."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    pictures = [(path.stem.replace("_", " "), base64.b64encode(path.read_bytes()).decode()) for path in plots]
    return template.render(parts=parts, tables=[tables(part) for part in parts], pictures=pictures) + "\n"


def tables(part: Section) -> list[tuple[list[str], list[list[str]]]]:
    """Return a section's rows as tables (header, lines); rows with other columns begin a new one."""
    found: list[tuple[list[str], list[list[str]]]] = []
    for row in part.rows:
        if not found or found[-1][0] != list(row):
            found.append((list(row), []))
        found[-1][1].append([f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()])
    return found
