"""How a generation looks: text as it comes, coloured by source, progress and one-line sums, and its JSON.

Knows tokens, sources and a text stream; no engine and no model. Every token has one source, so text is a list of
runs. A run is painted by what is written at its two ends: escape codes on a terminal, brackets with the
source's letter where colours are unwanted or cannot be shown.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, TextIO

from longgraft.config import Output
from longgraft.stream import TextStream
from longgraft.tree import Source

# Source: letter, escape code, what it is called.
LOOKS: dict[int, tuple[str, str, str]] = {
    Source.ROOT: ("", "", "drawn by the model"),
    Source.PROMPT: ("P", "32", "copied from the prompt"),
    Source.HISTORY: ("H", "36", "copied from the answer so far"),
    Source.SUCCESSOR: ("S", "33", "usual successor of the last token"),
    Source.DRAFT: ("D", "35", "drafted"),
    Source.DENSE: ("V", "4;35", "found by meaning"),
    Source.CORPUS: ("C", "4;32", "copied from a corpus"),
    Source.PREDICTION: ("X", "4;33", "copied from the prediction"),
    Source.DOCUMENT: ("F", "4;36", "copied from a document given with the request"),
    Source.GRAMMAR: ("G", "34", "the only choice the grammar left"),
}
# Texts from outside the prompt and the answer are underlined, so that four colours serve for eight of them.
COLOURS = {"32": "green", "33": "yellow", "34": "blue", "35": "magenta", "36": "cyan"}
Paint = Callable[[int], tuple[str, str]]


def no_paint(source: int) -> tuple[str, str]:
    """Mark nothing."""
    return "", ""


def colours(source: int) -> tuple[str, str]:
    """Mark a run by terminal colour."""
    code = LOOKS[source][1]
    return (f"\x1b[{code}m", "\x1b[0m") if code else ("", "")


def brackets(source: int) -> tuple[str, str]:
    """Mark a run by brackets and the letter of its source."""
    letter = LOOKS[source][0]
    return (f"⟦{letter}:", "⟧") if letter else ("", "")


def paint_for(stream: TextIO, environ: Mapping[str, str] | None = None) -> Paint:
    """Return colours where `stream` shows them and NO_COLOR does not forbid it, else brackets."""
    environ = os.environ if environ is None else environ
    if environ.get("NO_COLOR"):
        return brackets
    if environ.get("FORCE_COLOR") or (stream.isatty() and environ.get("TERM") != "dumb"):
        return colours
    return brackets


class Screen:
    """Writes one generation to a text stream as it becomes final, painted by source."""

    def __init__(
        self, out: TextIO, tokenizer: Any, prompt_ids: Seq[int], stop: Seq[str] = (), paint: Paint = no_paint
    ) -> None:
        self._out, self._paint = out, paint
        self._text = TextStream(tokenizer, prompt_ids, stop)
        # A second reader without stop strings tells how many characters each single token adds.
        self._lengths = TextStream(tokenizer, prompt_ids)
        self._owners: deque[tuple[int, int]] = deque()
        self._source = int(Source.ROOT)
        self._last = "\n"

    def push(self, token_ids: Seq[int], sources: Seq[int]) -> None:
        """Take newly committed tokens and their sources, and show the text that is final now."""
        if self._paint is not no_paint:
            self._owners += [(len(self._lengths.push([token])), int(s)) for token, s in zip(token_ids, sources)]
        self._show(self._text.push(token_ids))

    def finish(self) -> None:
        """Show the rest, close the last run, and end the line if text was shown and it is open."""
        self._show(self._text.finish())
        self._switch(int(Source.ROOT))
        self._out.write("" if self._last == "\n" else "\n")
        self._out.flush()

    def _show(self, piece: str) -> None:
        for part, source in self._runs(piece):
            self._switch(source)
            self._out.write(part)
            self._last = part[-1]
        self._out.flush()

    def _runs(self, piece: str) -> Iterator[tuple[str, int]]:
        """Split text among the tokens it came from; text of no known token (an open character) is drawn."""
        while piece:
            length, source = self._owners.popleft() if self._owners else (len(piece), int(Source.ROOT))
            if length > len(piece):
                self._owners.appendleft((length - len(piece), source))
            if length:
                yield piece[:length], source
            piece = piece[length:]

    def _switch(self, source: int) -> None:
        if source != self._source:
            self._out.write(self._paint(self._source)[1] + self._paint(source)[0])
            self._source = source


def legend(sources: Seq[int], paint: Paint, *, in_words: bool = False) -> str:
    """Return one line that explains the marks of the sources that occur, with their numbers of tokens.

    `in_words`: colours by name, for a place that does not show them.
    """
    counts = sorted(Counter(int(s) for s in sources).items(), key=lambda item: -item[1])
    return " · ".join(f"{_explained(source, paint, in_words)} {count}" for source, count in counts)


def _explained(source: int, paint: Paint, in_words: bool) -> str:
    (_, code, name), (begin, end) = LOOKS[source], paint(source)
    if paint is not colours or not in_words or not code:
        return f"{begin}{name}{end}"
    return f"{'underlined ' if code.startswith('4;') else ''}{COLOURS[code.removeprefix('4;')]}: {name}"


def spans(output: Output) -> list[dict[str, Any]]:
    """Return runs of tokens `begin <= i < end` with one source and neighbouring origins.

    `document`, `offset`, `file` and `line` say where the run was copied from (None: from nowhere); `file` is "" for
    the prompt and the answer themselves, `line` counts from 1 in it.
    """
    found: list[dict[str, Any]] = []
    for i, (source, (document, offset)) in enumerate(zip(output.sources, output.origins)):
        origin = (document, offset) if offset >= 0 else (None, None)
        name = Source(source).name.lower() if source != Source.ROOT else "drawn"
        last = found[-1] if found else None
        follows = None if last is None or last["offset"] is None else last["offset"] + i - last["begin"]
        if last and (last["source"], last["document"], follows) == (name, *origin):
            last["end"] = i + 1
        else:
            is_known = origin[0] is not None and document < len(output.documents)
            file = output.documents[document] if is_known else None
            line = output.lines[i] if i < len(output.lines) and output.lines[i] else None
            place = {"document": origin[0], "offset": origin[1], "file": file, "line": line}
            found.append({"begin": i, "end": i + 1, "source": name, **place})
    return found


def citations(output: Output, shortest: int = 8) -> list[str]:
    """Return one line for each file that runs of at least `shortest` tokens were copied from.

    It names the lines that the runs begin on, as far as they are known. Two files of one name are two lines.
    """
    lines: dict[int, set[int]] = {}
    tokens: Counter[int] = Counter()
    for span in spans(output):
        if span["file"] and span["end"] - span["begin"] >= shortest:
            lines.setdefault(span["document"], set()).update([span["line"]] if span["line"] else [])
            tokens[span["document"]] += span["end"] - span["begin"]
    return [
        f"{tokens[number]} tokens from {output.documents[number]}"
        + (f", lines {', '.join(map(str, sorted(at)))}" if at else "")
        for number, at in lines.items()
    ]


def report(output: Output) -> dict[str, Any]:
    """Return an output as JSON-ready values."""
    values: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "prompt_tokens": output.prompt_len,
        "spans": spans(output),
        "stats": output.stats,
    }
    if output.logprobs:
        values["logprobs"] = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
            for one in output.logprobs
        ]
    return values


def json_line(values: Any) -> str:
    """Return one line of strict JSON; NaN and infinities, which it cannot hold, become null."""
    return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def summary_line(output: Output) -> str:
    """Return one line for people: how much, how fast, why not faster."""
    stats = output.stats
    line = (
        f"{stats['new_tokens']} tokens ({output.finish_reason}), {stats['decode_tokens_per_s']:.1f} tokens/s, "
        f"{stats['acceptance_length']:.2f} tokens a pass, {stats['end_to_end_s']:.1f} s in all"
    )
    return f"{line}; {stats['why']}" if stats["why"] else line


@contextmanager
def reading_progress(out: TextIO, is_shown: bool) -> Iterator[Callable[[int, int, float], None]]:
    """Return a function of (tokens read, tokens in all, seconds left) that draws a bar on `out` meanwhile."""
    if not is_shown:
        yield lambda done, total, seconds: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    tokens, left = TextColumn("{task.completed}/{task.total} tokens"), TextColumn("{task.fields[left]} left")
    columns = (TextColumn("reading the prompt"), BarColumn(), tokens, left)
    with Progress(*columns, console=Console(file=out), transient=True) as bar:
        task = bar.add_task("", total=None, left="")

        def show(done: int, total: int, seconds: float) -> None:
            bar.update(task, completed=done, total=total, left=f"{int(seconds) // 60}:{int(seconds) % 60:02}")
            if done >= total:
                bar.stop()

        yield show
