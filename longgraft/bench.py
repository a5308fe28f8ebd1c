"""`longgraft bench`: options of the benchmark. What it measures lies in `longgraft.eval.policy_bench`.

Heavy things are imported inside the command, so that --help answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from longgraft.config import POLICIES, GraftError
from longgraft.options import (
    CostTable,
    Device,
    Draft,
    Dtype,
    ModelIfAny,
    Quantize,
    make,
    mendable,
    numbers,
    quieten,
    words,
)

Policies = Annotated[str | None, typer.Option(help=f"Some of {','.join(POLICIES)}. Default: all this drafter allows.")]
TASKS = (
    "Some of rewrite,new_file,quote,chat,needle,needles,chain,common, and suites: specbench:FOLDER, longbench:FOLDER, "
    "longspec:FOLDER, git:DIR (a hub id for FOLDER; without any, our samples)."
)
Tasks = Annotated[str, typer.Option(help=TASKS)]
Contexts = Annotated[str, typer.Option(help="Most tokens of a prompt; several lengths with commas.")]
Out = Annotated[
    str | None, typer.Option(metavar="DIR", help="Where cells and report go; finished cells are not redone.")
]
New = Annotated[int, typer.Option(help="Most new tokens a run, up to 256.")]
Seeds = Annotated[str, typer.Option(help="Each seed is another prompt of the same kind; 0-9 is ten of them.")]
Pairs = Annotated[int, typer.Option(help="Interleaved repeats of every cell; 7 or more for small differences.")]
Gates = Annotated[str | None, typer.Option(metavar="FILE", help="A drafter's thresholds, for pruned and paper.")]
Peers = Annotated[str, typer.Option(help="What else to measure: some of transformers,lookup,assistant,llama.")]
Gguf = Annotated[str | None, typer.Option(metavar="FILE", help="The model as one GGUF file, for the peer llama.")]
Traces = Annotated[list[str] | None, typer.Option(metavar="FILE", help="Trace files to take prompts from.")]
Compare = Annotated[
    tuple[str, str] | None, typer.Option(metavar="A B", help="Measure nothing: compare two result folders, B over A.")
]


def bench(
    *,
    model: ModelIfAny = None,
    out: Out = None,
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
    cost_table: CostTable = None,
    gates: Gates = None,
    peers: Peers = "",
    gguf: Gguf = None,
    traces: Traces = None,
    compare: Compare = None,
) -> None:
    """Measure policies against plain decoding, task by task, beside what else could be used; writes a report."""
    chosen = locals()
    with mendable():
        if compare is not None:
            from longgraft.eval.policy_compare import compare as compared

            typer.echo(compared(*compare), nl=False)
            return
        if model is None or out is None:
            raise GraftError("bench: expected --model and --out, or --compare A B")
        quieten()
        from longgraft.eval.policy_bench import run
        from longgraft.eval.policy_report import summary
        from longgraft.eval.policy_settings import BenchSettings

        chosen |= {"contexts": tuple(numbers("contexts", contexts)), "seeds": tuple(numbers("seeds", seeds))}
        chosen |= {"traces": tuple(traces or ()), "policies": tuple(words(policies or ""))}
        settings = make(BenchSettings, chosen | {"tasks": tuple(words(tasks)), "peers": tuple(words(peers))})
        report = run(settings, out, lambda line: typer.echo(line, err=True))
        typer.echo(summary(report, out))
