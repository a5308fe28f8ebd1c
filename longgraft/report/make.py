"""Makes the report of what an engine has just generated, with plain decoding measured beside it if wanted.

Knows the engine; nothing of HTML. What was generated is never lost: the page is written before plain decoding begins,
and once more when it has ended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from longgraft import __version__
from longgraft.audit import Audit, compare
from longgraft.config import Output, SamplingParams
from longgraft.engine import Engine
from longgraft.references import PREDICTION, References
from longgraft.report.page import report_html, write_report


def save_report(
    path: str | os.PathLike[str],
    engine: Engine,
    prompt_ids: list[int],
    output: Output,
    *,
    about: Mapping[str, Any] | None = None,
    references: References | None = None,
    plainly: SamplingParams | None = None,
    notes: Mapping[int, str] | None = None,
) -> None:
    """Write the report of an `output` that was generated with `trace`.

    `about`: names to tell at its head, as options have them (`TOLD`). `plainly`: the parameters it was generated with,
    to decode the same plainly as well, unless it was cancelled. `notes`: see `report_html`.
    """
    known, texts = described(engine, output, about or {}), texts_of(references)

    def write(audit: Audit | None) -> None:
        tokenizer = engine.tokenizer
        html = report_html(output, tokenizer, prompt_ids, about=known, audit=audit, texts=texts, notes=notes)
        write_report(path, html)

    write(None)
    if plainly is not None and output.finish_reason != "cancelled":
        write(compare(engine, prompt_ids, output, plainly))


# What a report says of names in `about`: key, and what it is called.
TOLD = {"model": "model", "draft": "drafter", "policy": "policy", "quantize": "weights"}


def described(engine: Engine, output: Output, about: Mapping[str, Any]) -> dict[str, str]:
    """Return what stands at a report's head: name and value."""
    dtype, device = str(engine.target.dtype).removeprefix("torch."), str(engine.target.device)
    lines = {
        **{called: about.get(key) for key, called in TOLD.items()},
        "dtype": f"{dtype} on {device}",
        "prompt": f"{output.prompt_len:,} tokens",
        "seed": str(output.seed),
        "longgraft": __version__,
    }
    return {name: str(value) for name, value in lines.items() if value is not None}


def texts_of(references: References | None) -> dict[str, str]:
    """Return the texts that an answer may have been copied from, by the names that outputs use."""
    if references is None:
        return {}
    given = {**references.documents, PREDICTION: references.prediction}
    return {name: text for name, text in given.items() if isinstance(text, str)}
