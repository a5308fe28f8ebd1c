"""`longgraft serve`: options of the server. What it does lies in `longgraft.server`.

Heavy things are imported inside the command, so that --help answers at once and without the extra.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longgraft.config import POLICIES, EngineConfig, GraftError

if TYPE_CHECKING:
    from longgraft.server.settings import ServerSettings

PARTS = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "starlette")

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id, folder, FILE.gguf or hub/id:FILE.gguf.")]
Names = Annotated[
    list[str] | None, typer.Option("--name", help="What clients call the model; may be repeated. Default: --model.")
]
Draft = Annotated[str | None, typer.Option(metavar="NAME", help="A drafter for it; hub id or folder.")]
Corpora = Annotated[
    list[str] | None, typer.Option("--corpus", metavar="NAME", help="A corpus for everybody; may be repeated.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option("--api-key", metavar="KEY", envvar="LONGGRAFT_API_KEY", help="A key; may be repeated."),
]
KeysFile = Annotated[
    str | None, typer.Option("--keys", metavar="FILE", help="Lines with a tenant and its key; tenants share nothing.")
]
MaxRequests = Annotated[int, typer.Option(help="Answers on their way at a time; one more is refused (429).")]
MaxBatch = Annotated[int, typer.Option(help="Answers computed at a time; others wait.")]
MaxBody = Annotated[int, typer.Option(metavar="MIB", help="Largest body of a request.")]
NewTokens = Annotated[int, typer.Option(help="Longest answer of a chat that names no length.")]
Seconds = Annotated[float | None, typer.Option(help="End an answer with what it has after so long.")]
Drain = Annotated[float, typer.Option(help="Seconds that answers have to end when the server is stopped.")]
NoCorpora = Annotated[bool, typer.Option("--no-corpora", help="Clients may not bring corpora of their own.")]
VllmMetrics = Annotated[bool, typer.Option("--vllm-metrics", help="/metrics under vLLM's names too.")]
Policy = Annotated[str, typer.Option(help=f"How tokens are proposed: {', '.join(POLICIES)}.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Default: CUDA if there is one.")]
Quantize = Annotated[str | None, typer.Option(metavar="int8", help="8-bit weights, on the CPU.")]
MaxContext = Annotated[int | None, typer.Option(help="Longest prompt + answer in tokens. Default: the model's limit.")]
KvMib = Annotated[int | None, typer.Option("--kv", metavar="MIB", help="Most memory for the KV cache.")]
History = Annotated[int, typer.Option(help="Tokens of earlier answers kept, to copy from for the same tenant.")]
CostTable = Annotated[str | None, typer.Option(help="JSON file with frozen round costs.")]


def serve(
    *,
    model: Model,
    name: Names = None,
    draft: Draft = None,
    corpus: Corpora = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    keys: KeysFile = None,
    max_requests: MaxRequests = 64,
    max_batch: MaxBatch = 16,
    max_body: MaxBody = 16,
    new_tokens: NewTokens = 4096,
    request_seconds: Seconds = None,
    drain_seconds: Drain = 30.0,
    no_corpora: NoCorpora = False,
    vllm_metrics: VllmMetrics = False,
    policy: Policy = "adaptive",
    dtype: Dtype = "auto",
    device: Device = None,
    quantize: Quantize = None,
    max_context: MaxContext = None,
    kv: KvMib = None,
    history_tokens: History = 0,
    cost_table: CostTable = None,
) -> None:
    """Serve a model to clients of OpenAI's API and of llama.cpp's, until Ctrl-C."""
    from longgraft.cli import make, mendable, open_engine

    chosen = locals()
    with mendable():
        config = make(EngineConfig, chosen | {"kv_bytes": None if kv is None else kv << 20})
        with needed():
            from longgraft.server.run import serve as run
        settings = _settings(chosen)
        run(settings, host, port, lambda: open_engine(model, config, chosen), lambda line: typer.echo(line, err=True))


def _settings(chosen: dict[str, Any]) -> ServerSettings:
    from longgraft.cli import make
    from longgraft.index.corpus_home import home
    from longgraft.server.keys import read_keys
    from longgraft.server.settings import MIB, ServerSettings

    made: dict[str, Any] = {
        "names": tuple(chosen["name"] or [chosen["model"].rstrip(os.sep)]),
        "keys": read_keys(chosen["api_key"] or (), chosen["keys"]),
        "corpora": tuple(chosen["corpus"] or ()),
        "shelf": None if chosen["no_corpora"] else Path(home()) / "served",
        "max_body_bytes": chosen["max_body"] * MIB,
    }
    settings = make(ServerSettings, chosen | made)
    assert isinstance(settings, ServerSettings)
    return settings


@contextmanager
def needed() -> Iterator[None]:
    """Make a missing part of the extra one clear sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in PARTS:
            raise
        raise GraftError(f"the server needs {error.name}: pip install 'longgraft[server]'") from error
