"""The command line. Text goes to stdout, everything about it to stderr; with --json the last line of stdout is JSON.

Knows how to read options and report mistakes; generation is the engine's, looks are `render`'s. Torch and
transformers are imported inside commands, so that --help and mistakes in options answer at once.

Exit codes: 0, 1 (`verify` found a mismatch, `edit` no file it may write), 2 (something the user can mend, in one
sentence), 130 (Ctrl-C), 141 (the reader of stdout went away).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from longgraft import __version__, corpora, evaluate
from longgraft.bench import bench
from longgraft.config import EngineConfig, Output, SamplingParams
from longgraft.options import (
    Corpora,
    CostTable,
    Device,
    Draft,
    Dtype,
    Exact,
    Json,
    MaxContext,
    MaxNewTokens,
    Model,
    Policy,
    Quantize,
    Seed,
    make,
    mendable,
    open_engine,
    quieten,
)
from longgraft.prompts import encode, read_prompt, read_references, refuse_stdin_twice, refuse_unshown
from longgraft.serve import serve
from longgraft.tools.commands import ask, edit
from longgraft.tools.complete_command import complete

if TYPE_CHECKING:
    from longgraft.engine import Engine

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Faster long-context generation with Hugging Face causal LMs, without changing the output.",
)

app.add_typer(corpora.app, name="index")
app.add_typer(evaluate.app, name="eval")
for command in (bench, ask, edit, complete, serve):
    app.command()(command)

Prompt = Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt itself.")]
PromptFile = Annotated[str | None, typer.Option("--prompt-file", "-f", help="Read the prompt from a file; - is stdin.")]
Chat = Annotated[str | None, typer.Option(help='JSON file with messages: [{"role": "user", "content": ...}].')]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: as the model's generation config.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 is off.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens of at least this share of the best one's probability.")]
Penalty = Annotated[float | None, typer.Option(help="Divide the scores of tokens that occurred; 1 is off.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
]
MaxNodes = Annotated[int, typer.Option(help="Most proposed tokens a round.")]
PrefillRows = Annotated[int, typer.Option(help="Prompt tokens in one forward.")]
Prediction = Annotated[str | None, typer.Option(metavar="FILE", help="What the output will probably look like.")]
Documents = Annotated[
    list[str] | None,
    typer.Option("--document", metavar="FILE", help="A text to copy from; may be repeated."),
]
Report = Annotated[str | None, typer.Option(metavar="FILE", help="Write a page: every token's source, round, tree.")]
ComparePlain = Annotated[bool, typer.Option("--compare-plain", help="With --report: decode plainly too, and compare.")]


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Print the version, or leave it to a command."""
    if version:
        typer.echo(f"longgraft {__version__}")
        raise typer.Exit()


@app.command()
def generate(
    *,
    model: Model,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    chat: Chat = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    dtype: Dtype = "auto",
    device: Device = None,
    policy: Policy = "adaptive",
    draft: Draft = None,
    quantize: Quantize = None,
    exact: Exact = False,
    max_nodes: MaxNodes = 60,
    prefill_rows: PrefillRows = 512,
    max_context: MaxContext = None,
    cost_table: CostTable = None,
    prediction: Prediction = None,
    document: Documents = None,
    corpus: Corpora = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities, and 0-20 alternatives.")] = None,
    color: Annotated[bool, typer.Option("--color", help="Show where each token came from.")] = False,
    report: Report = None,
    compare_plain: ComparePlain = False,
    as_json: Json = False,
) -> None:
    """Generate text and print it as it comes."""
    chosen = locals()
    with mendable():
        refuse_unshown(chosen)
        output = _generate(chosen)
    if output.finish_reason == "cancelled":
        raise typer.Exit(130)


def _generate(chosen: dict[str, Any]) -> Output:
    """Read what is to be read, load the model, generate, and print as the options say."""
    asked = chosen | {"stop": tuple(chosen["stop"] or ()), "trace": chosen["report"] is not None}
    params, config = make(SamplingParams, asked), make(EngineConfig, chosen)
    documents = chosen["document"]
    refuse_stdin_twice(chosen["prompt_file"], chosen["chat"], chosen["prediction"], *documents or ())
    source = read_prompt(chosen["prompt"], chosen["prompt_file"], chosen["chat"])
    references = read_references(chosen["prediction"], documents, chosen["corpus"])
    engine = open_engine(chosen["model"], config, chosen)
    output = _shown(engine, encode(engine, source), params, references, chosen)
    if chosen["as_json"]:
        print_json(engine, output)
    return output


@app.command()
def verify(
    *,
    model: Model,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    chat: Chat = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = None,
    policy: Policy = "adaptive",
    draft: Draft = None,
    quantize: Quantize = None,
    exact: Exact = False,
    max_nodes: MaxNodes = 60,
    prefill_rows: PrefillRows = 512,
    max_context: MaxContext = None,
    cost_table: CostTable = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on behind each tie and count them.")] = False,
) -> None:
    """Check losslessness: grafted against plain decoding; the last line is JSON."""
    chosen = locals()
    with mendable():
        # Both read the whole prompt, or the one would be timed with what the other has read.
        params, config = make(SamplingParams, chosen), make(EngineConfig, chosen | {"prefix_cache": False})
        source = read_prompt(prompt, prompt_file, chat)
        engine = open_engine(model, config, chosen)
        verdict = print_audit(engine, encode(engine, source), params, keep_going)
    raise typer.Exit(1 if verdict == "MISMATCH" else 0)


@app.command()
def demo(
    *,
    max_new_tokens: MaxNewTokens = 256,
    dtype: Annotated[str, typer.Option(help="auto chooses what this processor is built for.")] = "auto",
    as_json: Json = False,
) -> None:
    """Let a small model quote a document, with and without longgraft. Needs no network."""
    with mendable():
        quieten()
        from longgraft.demo import run_demo
        from longgraft.render import json_line

        values = run_demo(max_new_tokens, dtype)
        if as_json:
            typer.echo(json_line(values))


def _shown(engine: Engine, prompt_ids: list[int], params: SamplingParams, references: Any, chosen: Any) -> Output:
    """Generate, print as it comes, and write the report if one is wanted."""
    from longgraft.show import show

    looks = {"in_colour": chosen["color"], "sums": not chosen["as_json"]}
    output = show(engine, prompt_ids, params, references=references, **looks)
    if path := chosen["report"]:
        from longgraft.report.make import save_report

        plainly = params if chosen["compare_plain"] else None
        save_report(path, engine, prompt_ids, output, about=chosen, references=references, plainly=plainly)
        typer.echo(f"report: {path}", err=True)
    return output


def print_json(engine: Engine, output: Output) -> None:
    """Print an output as the last line, in exact mode with what its kernels cost."""
    from longgraft.render import json_line, report

    values = report(output)
    if engine.config.exact:
        from longgraft.audit import exact_cost

        values["exact"] = exact_cost(engine, output.prompt_len + len(output.token_ids))
    typer.echo(json_line(values))


def print_audit(engine: Engine, prompt_ids: list[int], params: SamplingParams, keep_going: bool) -> str:
    """Audit, print a sentence for people and JSON as the last line, and return the verdict."""
    from longgraft.audit import audit, exact_cost, sentence
    from longgraft.render import json_line

    result = audit(engine, prompt_ids, params, keep_going=keep_going)
    values = result.summary() | {"dtype": str(engine.target.dtype).removeprefix("torch.")}
    if engine.config.exact:
        values["exact_mode"] = exact_cost(engine, len(prompt_ids))
    typer.echo(sentence(result, engine.tokenizer))
    typer.echo(json_line(values))
    return result.verdict


def main() -> None:
    """Run the command line."""
    app(prog_name="longgraft")
