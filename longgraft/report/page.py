"""The report of one generation as one HTML file: colours, origins, trees, a timeline, sums. Needs no network.

Owns the template. Knows outputs, traces and an audit; no engine. Everything that comes from a model, a prompt or a
file name is escaped by the template engine or by `script_json`, and the page forbids itself every script but its own
by that script's hash: a text that slipped through could still not run.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib import resources
from pathlib import Path
from typing import Any

from longgraft.audit import Audit
from longgraft.config import GraftError, Output
from longgraft.report.checks import require_jinja
from longgraft.report.places import Places
from longgraft.report.totals import headline, rows_of, shares_of, verdict_of
from longgraft.report.values import DRAWN, LETTERS, script_json, values_of
from longgraft.report.words import pieces, seen, whole

# Of the prompt so many characters are shown at either end.
PROMPT_SHOWN = 2000
SCRIPTS = ("base.js", "tree.js", "line.js", "page.js")


def report_html(
    output: Output,
    tokenizer: Any,
    prompt_ids: Seq[int],
    *,
    about: Mapping[str, str] | None = None,
    audit: Audit | None = None,
    texts: Mapping[str, str] | None = None,
    notes: Mapping[int, str] | None = None,
) -> str:
    """Return the page of an output that was generated with `SamplingParams(trace=True)`.

    `about`: what to say at its head, by name. `audit`: plain decoding of the same (`longgraft.audit.compare`).
    `texts`: documents by name as in `Output.documents`, to show the lines that were copied from. `notes`: where tokens
    came from in better words than the output has, by token number.
    """
    if output.trace is None:
        raise GraftError("this output has no trace: generate it with SamplingParams(trace=True)")
    if tokenizer is None:
        raise GraftError("a report needs the tokenizer: pass the one the output was generated with")
    places = Places(output, tokenizer, prompt_ids, texts or {}, notes or {})
    return _rendered(
        script_json(values_of(output, output.trace, places)),
        headline=headline(output, audit),
        verdict=verdict_of(audit),
        why=output.stats["why"],
        is_mismatch=audit is not None and audit.verdict == "MISMATCH",
        about={name: seen(value) for name, value in (about or {}).items()},
        rows=rows_of(output, audit.plain if audit is not None else None),
        shares=shares_of(output),
        drawn=DRAWN,
        tokens=marked(output, tokenizer, prompt_ids),
        prompt=_ends(seen(whole(tokenizer, prompt_ids))),
        num_prompt=len(prompt_ids),
        finish=output.finish_reason,
    )


def _rendered(data: str, **shown: Any) -> str:
    """Return the page with its style, script and policy; all of `shown` is escaped, `data` is safe in a script."""
    require_jinja()
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    script = "".join(_part(name) for name in SCRIPTS)
    unescaped = {"style": Markup(_part("page.css")), "script": Markup(script), "data": Markup(data)}
    return environment.from_string(_part("page.html.j2")).render(policy=_policy(script), **unescaped, **shown)


def marked(output: Output, tokenizer: Any, prompt_ids: Seq[int]) -> list[tuple[str, str]]:
    """Return (classes, text) of every token: its source's letter, `b` where a run of a source begins.

    `e`: it has no text of its own. `n`: it is nothing but a line break. `cut`: it is behind the end of the text, part
    of a stop string. Of a token that is partly behind it the rest is its own entry, with class `rest`.
    """
    found, left, before = list[tuple[str, str]](), len(output.text), DRAWN
    for source, text in zip(output.sources, pieces(tokenizer, prompt_ids, output.token_ids)):
        letter = LETTERS[source]
        inside, outside, left = text[:left], text[left:], max(0, left - len(text))
        marks = [letter] if letter != DRAWN else []
        marks += ["b"] if letter not in (DRAWN, before) else []
        marks += ["e"] if not text else ["n"] if "\n" in text and not text.strip() else []
        marks += ["cut"] if outside and not inside else []
        found.append((" ".join(marks), seen(inside or outside)))
        found += [("rest cut", seen(outside))] if inside and outside else []
        before = letter
    return found


def write_report(path: str | os.PathLike[str], html: str) -> None:
    """Write a page so that the file is either the old or the new one, whole; `GraftError` if it cannot be."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(html, encoding="utf-8", newline="\n")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise GraftError(f"{target}: the report cannot be written ({error.strerror or error})") from error


def _part(name: str) -> str:
    return resources.files("longgraft.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return the page's content security policy: nothing from outside, and no script but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"


def _ends(text: str) -> tuple[str, int, str]:
    """Return the beginning of a long text, how many characters are left out, and its end."""
    left_out = len(text) - 2 * PROMPT_SHOWN
    return (text, 0, "") if left_out <= 0 else (text[:PROMPT_SHOWN], left_out, text[-PROMPT_SHOWN:])
