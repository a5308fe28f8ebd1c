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

from longgraft.config import EngineConfig, GraftError
from longgraft.options import (
    Corpora,
    CostTable,
    Device,
    Draft,
    Dtype,
    MaxContext,
    Model,
    Policy,
    Quantize,
    make,
    mendable,
    open_engine,
)

if TYPE_CHECKING:
    from longgraft.server.settings import ServerSettings

PARTS = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "starlette")

Names = Annotated[
    list[str] | None, typer.Option("--name", help="What clients call the model; may be repeated. Default: --model.")
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
KvMib = Annotated[int | None, typer.Option("--kv", metavar="MIB", help="Most memory for the KV cache.")]
History = Annotated[int, typer.Option(help="Tokens of earlier answers kept, to copy from for the same tenant.")]


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
    chosen = locals()
    with mendable():
        config = make(EngineConfig, chosen | {"kv_bytes": None if kv is None else kv << 20})
        with needed():
            from longgraft.server.run import serve as run
        settings = _settings(chosen)
        run(settings, host, port, lambda: open_engine(model, config, chosen), lambda line: typer.echo(line, err=True))


def _settings(chosen: dict[str, Any]) -> ServerSettings:
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
