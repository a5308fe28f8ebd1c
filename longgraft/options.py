"""What the commands share: options that mean the same everywhere, and what is made of them: settings, models, mistakes.

Knows typer and settings; no command, so that each command's file imports it and none imports another. Torch and
transformers are imported inside functions, so that --help and mistakes in options answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longgraft.config import POLICIES, EngineConfig, GraftError, check_quantize

if TYPE_CHECKING:
    from longgraft.engine import Engine

MODEL = typer.Option("--model", "-m", help="Hub id, folder, FILE.gguf or hub/id:FILE.gguf.")
Model = Annotated[str, MODEL]
ModelIfAny = Annotated[str | None, MODEL]
Draft = Annotated[
    str | None,
    typer.Option("--draft", metavar="NAME", help="A drafter: smaller LM, EAGLE-3 head or DFlash; hub id or folder."),
]
Policy = Annotated[
    str, typer.Option("--policy", help=f"How tokens are proposed: {', '.join(POLICIES)}. plain: one a pass.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Ordinary decoding, one token a pass, to compare with.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Default: CUDA if there is one.")]
Quantize = Annotated[
    str | None,
    typer.Option(metavar="int8|int4", help="Weights of 8 or 4 bits, on the CPU: fewer bytes, a slightly other model."),
]
Exact = Annotated[
    bool, typer.Option("--exact", help="Kernels whose rows are independent: bitwise plain decoding in bfloat16 too.")
]
MaxContext = Annotated[int | None, typer.Option(help="Longest prompt + output in tokens. Default: the model's limit.")]
CostTable = Annotated[
    str | None, typer.Option("--cost-table", help="JSON file with frozen round costs. Default: measured.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same output. Default: one is drawn and reported.")]
Corpora = Annotated[
    list[str] | None,
    typer.Option("--corpus", metavar="NAME", help="A corpus (see index) to copy from; may be repeated."),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
JsonAlone = Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")]

# Options that say how a model is loaded.
LOADING = ("dtype", "device", "draft", "quantize")
MOST_NUMBERS = 10_000


@contextmanager
def mendable() -> Iterator[None]:
    """Turn what the user can mend, Ctrl-C and a closed pipe into a sentence and an exit code."""
    try:
        yield
    except GraftError as error:
        typer.echo(f"longgraft: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # Nobody reads any more; the interpreter's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None


def make(kind: type[Any], chosen: dict[str, Any]) -> Any:
    """Return a settings object from the options that are named as its fields."""
    return kind(**{field.name: chosen[field.name] for field in fields(kind) if field.name in chosen})


def quieten() -> None:
    """Keep other libraries' logs and, off a terminal, their progress bars out of the way."""
    import logging

    is_shown = sys.stderr.isatty()
    if not is_shown:
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if not is_shown:
        transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


def open_engine(model: str, config: EngineConfig, chosen: dict[str, Any]) -> Engine:
    """Load a model as the options `LOADING` of `chosen` say; what else is wrong is reported before the long part."""
    from longgraft.cost import CostTable
    from longgraft.index.corpus_home import folder_of
    from longgraft.index.corpus_manifest import read_manifest

    check_quantize(chosen.get("quantize"))
    for name in chosen.get("corpus") or ():
        read_manifest(folder_of(name), name)
    cost = CostTable.load(config.cost_table) if config.cost_table else None
    quieten()
    from longgraft.engine import Engine

    return Engine.from_pretrained(model, config, cost=cost, **{name: chosen[name] for name in LOADING})


def open_chosen(chosen: dict[str, Any]) -> Engine:
    """Load the model that the options of `ask`, `edit` or `complete` name; `plain` stands for a policy."""
    config = make(EngineConfig, chosen | {"policy": "plain" if chosen["plain"] else "adaptive"})
    return open_engine(chosen["model"], config, chosen)


def words(text: str) -> list[str]:
    """Split a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(name: str, text: str) -> list[int]:
    """Split a list of whole numbers, `0-3` being four of them; raises `GraftError` for anything else."""
    found: list[int] = []
    try:
        for word in words(text):
            first, dash, last = word.partition("-")
            found += range(int(first), min(int(last if dash else first), int(first) + MOST_NUMBERS) + 1)
    except ValueError:
        raise GraftError(f"--{name} {text!r}: expected whole numbers with commas between them") from None
    return found


def say(line: str) -> None:
    """Tell the user something about the answer, on stderr."""
    print(f"longgraft: {line}", file=sys.stderr)
