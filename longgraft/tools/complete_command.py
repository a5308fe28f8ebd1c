"""`longgraft complete`: its options, and what is written where.

Knows options alone; the work is done in `completing` and `completion_loop`, which are imported inside the command, so
that --help answers at once. The completion goes to stdout, everything about it to stderr.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longgraft.config import GraftError, SamplingParams
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
    from longgraft.engine import Engine

Repo = Annotated[str, typer.Option("--repo", "-r", metavar="DIR", help="The repository's folder.")]
PlaceFile = Annotated[str | None, typer.Option("--file", "-f", metavar="FILE", help="The file.")]
Line = Annotated[int | None, typer.Option("--line", "-l", help="The cursor's line, from 1 on.")]
Column = Annotated[
    int | None, typer.Option("--column", "-c", help="The character it stands before. Default: line's end.")
]
Buffer = Annotated[bool, typer.Option("--stdin", help="Take the file's text from stdin, as it is in an editor.")]
SingleLine = Annotated[bool, typer.Option("--single-line", help="End with the line.")]
RelatedTokens = Annotated[int, typer.Option(min=0, help="Tokens of related files that the model sees.")]
FileTokens = Annotated[int, typer.Option(min=1, help="Tokens round the cursor that it sees.")]
Loop = Annotated[bool, typer.Option("--loop", help="Answer places on stdin, each a JSON object on a line; the model stays loaded.")]  # fmt: skip  # noqa: E501
NoCorpus = Annotated[bool, typer.Option("--no-corpus", help="Do not index the repository to copy from.")]


def complete(
    *,
    model: Model,
    repo: Repo,
    file: PlaceFile = None,
    line: Line = None,
    column: Column = None,
    stdin: Buffer = False,
    loop: Loop = False,
    single_line: SingleLine = False,
    related_tokens: RelatedTokens = 2048,
    file_tokens: FileTokens = 4096,
    no_corpus: NoCorpus = False,
    max_new_tokens: MaxNewTokens = 128,
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
    """Complete code at a place of a file, with what its repository says."""
    chosen = locals()
    with mendable():
        if loop and (file, line, column, stdin) != (None, None, None, False):
            raise GraftError("with --loop the places come on stdin: leave out --file, --line, --column and --stdin")
        if not loop and (file is None or line is None):
            raise GraftError("--file and --line are needed: say where to complete, or --loop to be told on stdin")
        if loop:
            _complete_all(chosen)
        elif not _complete_one(chosen):
            raise typer.Exit(130)


def _complete_one(chosen: dict[str, Any]) -> bool:
    """Complete at the place that the options name; False if that was interrupted."""
    from longgraft.prompts import read_file
    from longgraft.show import LONG_PROMPT
    from longgraft.tools.completing import cursor_at, references_for, request_for

    text = read_file("-") if chosen["stdin"] else None
    cursor = cursor_at(Path(chosen["repo"]), chosen["file"], chosen["line"], chosen["column"], text)
    engine, params, budget = _completer(chosen)
    request = request_for(engine, cursor, params, budget)
    if request.note:
        say(request.note)
    if (count := len(request.prompt_ids)) >= LONG_PROMPT and not chosen["as_json"]:
        say(f"reading {count:,} tokens, {len(request.related)} related files among them; see --related-tokens")
    output = _completed(engine, request, references_for(_corpus(chosen, engine)), chosen["as_json"])
    return bool(output.finish_reason != "cancelled")


def _complete_all(chosen: dict[str, Any]) -> None:
    """Complete at every place that stdin names, to its end."""
    from longgraft.render import json_line
    from longgraft.tools.completing import folder_of
    from longgraft.tools.completion_loop import completions, followed

    root = folder_of(Path(chosen["repo"]))
    engine, params, budget = _completer(chosen)
    corpus = _corpus(chosen, engine)
    say("one JSON object a line, please")
    with followed(corpus, engine.tokenizer, say):
        for found in completions(iter(sys.stdin.buffer.readline, b""), engine, root, corpus, params, budget):
            print(json_line(found), flush=True)


def _completer(chosen: dict[str, Any]) -> tuple[Engine, SamplingParams, Any]:
    from longgraft.tools.completing import Budget

    params = make(SamplingParams, chosen | {"stop": ("\n",) if chosen["single_line"] else ()})
    return open_chosen(chosen), params, Budget(chosen["file_tokens"], chosen["related_tokens"])


def _corpus(chosen: dict[str, Any], engine: Engine) -> Path | None:
    from longgraft.tools.completing import folder_of, repository_corpus

    if chosen["plain"] or chosen["no_corpus"]:
        return None
    return repository_corpus(folder_of(Path(chosen["repo"])), engine.tokenizer, chosen["model"])


def _completed(engine: Engine, request: Any, references: Any, as_json: bool) -> Any:
    """Generate a completion on stdout."""
    from longgraft.render import json_line, report
    from longgraft.show import show

    out = io.StringIO() if as_json else sys.stdout
    output = show(engine, request.prompt_ids, request.params, in_colour=False, references=references, out=out)
    if as_json:
        print(json_line(report(output) | {"related": list(request.related), "note": request.note}))
    return output
