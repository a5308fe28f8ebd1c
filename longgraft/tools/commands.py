"""`longgraft ask` and `edit`: their options, and what is written where.

Knows options alone; the work is done in the files beside this one, which are imported inside commands, so that --help
answers at once. The answer goes to stdout, everything about it to stderr.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longgraft.config import GraftError, Output, SamplingParams
from longgraft.options import (
    CostTable,
    Device,
    Draft,
    Dtype,
    JsonAlone,
    MaxContext,
    MaxNewTokens,
    Model,
    Plain,
    Quantize,
    Seed,
    Temperature,
    make,
    mendable,
    open_chosen,
    say,
)

if TYPE_CHECKING:
    from longgraft.tools.asking import Desk

NewIfAny = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate. Default: what the file may need.")
]

Words = Annotated[list[str], typer.Argument(metavar="FILE [QUESTION]", help="Documents (text, Markdown, HTML, PDF; - is stdin), then a question.")]  # fmt: skip  # noqa: E501
Questions = Annotated[list[str] | None, typer.Option("--question", "-q", metavar="TEXT", help="A question; may be repeated.")]  # fmt: skip  # noqa: E501
Fit = Annotated[bool, typer.Option("--fit", help="Read as much of the documents as the model takes.")]
SavePrefix = Annotated[str | None, typer.Option(metavar="FILE", help="Keep what was read of the documents in a file.")]
Prefix = Annotated[str | None, typer.Option(metavar="FILE", help="Use what --save-prefix kept, in place of reading.")]
PrefillRows = Annotated[int, typer.Option(help="Prompt tokens in one forward; what is reused is a multiple of it.")]
NoMarks = Annotated[bool, typer.Option("--no-marks", help="Do not mark what is quoted.")]

Instruction = Annotated[str, typer.Argument(metavar="INSTRUCTION", help="What to change.")]
File = Annotated[str, typer.Option("--file", "-f", metavar="FILE", help="The file.")]
Write = Annotated[bool, typer.Option("--write", "-w", help="Write the new file, too.")]


def ask(
    *,
    model: Model,
    words: Words,
    question: Questions = None,
    fit: Fit = False,
    save_prefix: SavePrefix = None,
    prefix: Prefix = None,
    prefill_rows: PrefillRows = 128,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = None,
    draft: Draft = None,
    quantize: Quantize = None,
    max_context: MaxContext = None,
    cost_table: CostTable = None,
    plain: Plain = False,
    no_marks: NoMarks = False,
    as_json: JsonAlone = False,
) -> None:
    """Answer questions about documents, quotations marked with file and page or line.

    Without a question they are read first, then asked for one by one until Ctrl-D.
    """
    chosen = locals()
    with mendable():
        _ask(chosen, *split_words(words, question or []))


def _ask(chosen: dict[str, Any], names: list[str], questions: list[str]) -> None:
    """Lay the documents out and answer; after an interruption no further question, unless they are typed."""
    if "-" in names and not questions:
        raise GraftError("- is stdin, where questions would be typed: give a question with --question")
    from longgraft.tools.asking import bring_back, lay_out, read, typed_questions
    from longgraft.tools.documents import read_documents

    documents = read_documents(names)
    desk = lay_out(open_chosen(chosen), documents, questions, make(SamplingParams, chosen), chosen["fit"])
    if chosen["prefix"] is not None:
        bring_back(desk, chosen["prefix"])
    if chosen["save_prefix"] is not None or not questions:
        read(desk, chosen["save_prefix"])
    for one in questions or typed_questions():
        is_whole = _answered(desk, one, chosen["as_json"], chosen["no_marks"], is_typed=not questions)
        if questions and not is_whole:
            raise typer.Exit(130)


def split_words(words: list[str], questions: list[str]) -> tuple[list[str], list[str]]:
    """Return files and questions: the last word is a question unless there are others, or it names a file."""
    last = words[-1]
    is_file = last == "-" or Path(last).exists() or re.fullmatch(r"\S*\.[A-Za-z]\w{0,4}", last) or len(words) == 1
    if questions or is_file:
        return words, questions
    return words[:-1], [last]


def _answered(desk: Desk, question: str, as_json: bool, no_marks: bool, *, is_typed: bool) -> bool:
    """Answer one question on stdout; False if that was interrupted. Of a mistake in a typed one the user is told."""
    from longgraft.render import json_line, summary_line
    from longgraft.tools.asking import answer
    from longgraft.tools.marked_screen import NO_MARKS, marks_for

    marks = NO_MARKS if no_marks else marks_for(sys.stdout)
    try:
        found = answer(desk, question, io.StringIO() if as_json else sys.stdout, marks)
    except GraftError as error:
        if not is_typed:
            raise
        say(str(error))
        return True
    if as_json:
        print(json_line(found.values()), flush=True)
    elif found.output.finish_reason in ("length", "context"):
        say(f"the answer was cut after {len(found.output.token_ids)} tokens: raise --max-new-tokens")
    if sys.stderr.isatty():
        print(summary_line(found.output), file=sys.stderr)
    return found.output.finish_reason != "cancelled"


def edit(
    *,
    model: Model,
    file: File,
    instruction: Instruction,
    write: Write = False,
    max_new_tokens: NewIfAny = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = None,
    draft: Draft = None,
    quantize: Quantize = None,
    max_context: MaxContext = None,
    cost_table: CostTable = None,
    plain: Plain = False,
    as_json: JsonAlone = False,
) -> None:
    """Rewrite a file as told and print the change as a diff; --write puts it in place.

    Exit code 1: the answer was cut or cannot be trusted, and nothing was written.
    """
    chosen = locals()
    with mendable():
        if not instruction.strip():
            raise GraftError("the instruction is empty: say what to change")
        output, is_whole = _edit(chosen)
    if not is_whole:
        raise typer.Exit(130 if output.finish_reason == "cancelled" else 1)


def _edit(chosen: dict[str, Any]) -> tuple[Output, bool]:
    """Rewrite the file, say what came of it, and return the answer and whether it is a whole file."""
    from longgraft.render import json_line, summary_line
    from longgraft.tools.editing import rewrite
    from longgraft.tools.source_file import read_source, write_source

    file, source = chosen["file"], read_source(chosen["file"])
    params = SamplingParams(temperature=chosen["temperature"], seed=chosen["seed"])
    found = rewrite(open_chosen(chosen), source, chosen["instruction"], params, chosen["max_new_tokens"])
    is_written = chosen["write"] and found.raw is not None and found.raw != source.raw
    if is_written and found.raw is not None:
        write_source(source, found.raw)
    if chosen["as_json"]:
        print(json_line(found.values() | {"written": is_written}))
    else:
        print(found.diff, end="", flush=True)
    if found.raw is None:
        say(f"{file}: {found.reason}; nothing was written")
    elif not found.diff:
        say(f"{file}: the answer changes nothing")
    if sys.stderr.isatty():
        print(summary_line(found.output), file=sys.stderr)
    return found.output, found.raw is not None
