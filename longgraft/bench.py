"""`longgraft bench`: options of the policy benchmark. What it measures lies in `longgraft.eval.policy_bench`.

Heavy things are imported inside the command, so that --help answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from longgraft.config import POLICIES, GraftError

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id, folder, FILE.gguf or hub/id:FILE.gguf.")]
Draft = Annotated[str | None, typer.Option(metavar="NAME", help="A drafter for it; hub id or folder.")]
Policies = Annotated[str | None, typer.Option(help=f"Some of {','.join(POLICIES)}. Default: all this drafter allows.")]
Tasks = Annotated[str, typer.Option(help="Some of rewrite,new_file,quote,chat.")]
Contexts = Annotated[str, typer.Option(help="Prompt lengths in tokens.")]
Out = Annotated[str, typer.Option(metavar="DIR", help="Where cells and report go; finished cells are not redone.")]
New = Annotated[int, typer.Option(help="Most new tokens a run, up to 256.")]
Seeds = Annotated[str, typer.Option(help="Each seed is another prompt of the same kind.")]
Pairs = Annotated[int, typer.Option(help="Interleaved repeats of every cell; 7 or more for small differences.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Default: CUDA if there is one.")]
Quantize = Annotated[str | None, typer.Option(metavar="int8", help="8-bit weights for the model, on the CPU.")]
Costs = Annotated[str | None, typer.Option(help="JSON file with frozen round costs. Default: measured once.")]
Gates = Annotated[str | None, typer.Option(metavar="FILE", help="A drafter's thresholds, for pruned and paper.")]
Peers = Annotated[str, typer.Option(help="What else to measure: some of transformers,lookup,assistant,llama.")]
Gguf = Annotated[str | None, typer.Option(metavar="FILE", help="The model as one GGUF file, for the peer llama.")]
Traces = Annotated[list[str] | None, typer.Option(metavar="FILE", help="Trace files to take prompts from.")]


def bench(
    *,
    model: Model,
    out: Out,
    draft: Draft = None,
    policies: Policies = None,
    tasks: Tasks = "rewrite,new_file,quote,chat",
    contexts: Contexts = "1024,4096,16384",
    new: New = 128,
    seeds: Seeds = "0",
    pairs: Pairs = 1,
    dtype: Dtype = "auto",
    device: Device = None,
    quantize: Quantize = None,
    cost_table: Costs = None,
    gates: Gates = None,
    peers: Peers = "",
    gguf: Gguf = None,
    traces: Traces = None,
) -> None:
    """Measure policies against plain decoding, task by task, beside what else could be used; writes a report."""
    from longgraft.cli import make, mendable, quieten

    chosen = locals()
    with mendable():
        quieten()
        from longgraft.eval.policy_bench import run
        from longgraft.eval.policy_report import summary
        from longgraft.eval.policy_settings import BenchSettings

        chosen |= {"contexts": tuple(numbers("contexts", contexts)), "seeds": tuple(numbers("seeds", seeds))}
        chosen |= {"traces": tuple(traces or ()), "policies": tuple(words(policies or ""))}
        settings = make(BenchSettings, chosen | {"tasks": tuple(words(tasks)), "peers": tuple(words(peers))})
        report = run(settings, out, lambda line: typer.echo(line, err=True))
        typer.echo(summary(report, out))


def words(text: str) -> list[str]:
    """Split a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(name: str, text: str) -> list[int]:
    """Split a list of whole numbers; raises `GraftError` for anything else."""
    try:
        return [int(word) for word in words(text)]
    except ValueError:
        raise GraftError(f"--{name} {text!r}: expected whole numbers with commas between them") from None
