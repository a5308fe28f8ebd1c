"""A bounded load test of `longgraft serve` beside `transformers serve`: same model, same requests, one after the other.

    python -m longgraft.eval.bench_server MODEL [--seconds 180] [--clients 32] [--out FILE]

Every client asks, reads the stream to its end and asks again, until the time is up; answers under way are finished and
counted. Requests are chats of mixed lengths: some quote a text that stands in them, some have nothing to copy. Reports
errors, answers, tokens a second, and p50 and p99 of the time to the first text and between texts (milliseconds); the
last line is JSON. A chunk of ours holds all tokens of a round, theirs one; `between` is the time from chunk to chunk,
`token` that time by the chunk's tokens, estimated from the answer's length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

SENTENCES = (
    "The cache keeps the rows of every prompt that was read.",
    "A round proposes tokens and the model agrees with some of them.",
    "Nobody had opened the window since the clock stopped.",
    "Every third request asks for the same paragraph again.",
    "Prices rose in spring, fell in summer and were forgotten in autumn.",
)
ASKS = ("Repeat the text word for word:", "Write a short story about a lighthouse.", "Summarise the text:")
LENGTHS = (2, 8, 24)  # sentences in a prompt
TOKENS = (16, 48, 96)  # longest answers
START_SECONDS = 300.0
THEIRS = "from transformers.cli.transformers import main; main()"


@dataclass
class Tally:
    """What all clients of one server saw."""

    errors: list[str] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return plain numbers; times in milliseconds."""
        values: dict[str, Any] = {"errors": len(self.errors), "first_error": self.errors[0] if self.errors else None}
        values |= {"answers": self.answers, "seconds": round(self.seconds, 1)}
        values["tokens_per_s"] = round(self.tokens / self.seconds, 2) if self.seconds else 0.0
        for name, times in (("first", self.firsts), ("between", self.gaps), ("token", self.per_token)):
            for percent in (50, 99):
                values[f"{name}_p{percent}_ms"] = (
                    round(1000 * float(np.percentile(times, percent)), 1) if times else None
                )
        return values


def requests_of(client: int) -> Iterator[dict[str, Any]]:
    """Yield one client's requests, the same for every server."""
    chance = random.Random(client)
    while True:
        text = " ".join(chance.choice(SENTENCES) for _ in range(chance.choice(LENGTHS)))
        content = f"{chance.choice(ASKS)}\n\n{text}"
        yield {"messages": [{"role": "user", "content": content}], "max_tokens": chance.choice(TOKENS)}


async def ask(client: httpx.AsyncClient, body: dict[str, Any], tally: Tally) -> None:
    """Send one request and take its stream in."""
    begin, last, times, usage = time.perf_counter(), None, list[float](), None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[len("data: ") :])
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"])[:200])
            usage = chunk.get("usage") or usage
            if any(choice.get("delta", {}).get("content") for choice in chunk.get("choices", ())):
                now = time.perf_counter()
                times.append(now - (last or begin))
                last = now
    written = usage["completion_tokens"] if usage else len(times)
    tally.answers, tally.tokens = tally.answers + 1, tally.tokens + written
    tally.firsts += times[:1]  # an answer without text has none
    tally.gaps += times[1:]
    if written > 1:
        tally.per_token.append(sum(times[1:]) / (written - 1))


async def load(url: str, model: str, clients: int, seconds: float) -> Tally:
    """Ask from many clients until the time is up."""
    tally, begin = Tally(), time.perf_counter()
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, verify=False, trust_env=False) as sender:

        async def keep_asking(number: int) -> None:
            for body in requests_of(number):
                more = {"model": model, "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
                try:
                    await ask(sender, body | more, tally)
                except Exception as error:
                    tally.errors.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.5)
                if time.perf_counter() - begin > seconds:
                    return

        await asyncio.gather(*(keep_asking(number) for number in range(clients)))
    tally.seconds = time.perf_counter() - begin
    return tally


@contextmanager
def running(command: list[str], url: str) -> Iterator[None]:
    """Run a server until the block ends; raises `RuntimeError` with its log if it does not begin."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ)) as process:
            try:
                _wait(process, url, log)
                yield
            finally:
                process.terminate()
                process.wait(120)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    with httpx.Client(verify=False, trust_env=False, timeout=30) as asker:  # certificates take long to read
        while time.monotonic() < end and process.poll() is None:
            try:
                if asker.get(f"{url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
    raise RuntimeError(f"the server did not begin: {log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def servers(model: str, dtype: str, clients: int) -> dict[str, list[str]]:
    """Return the commands to compare, without their ports."""
    ours = ["-m", "longgraft", "serve", "--model", model, "--dtype", dtype, "--max-requests", str(clients)]
    return {
        "longgraft": [sys.executable, *ours, "--max-batch", str(clients)],
        "transformers": [sys.executable, "-c", THEIRS, "serve", model, "--dtype", dtype],
        "transformers batched": [
            sys.executable,
            "-c",
            THEIRS,
            "serve",
            model,
            "--dtype",
            dtype,
            "--continuous-batching",
        ],
    }


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="*", default=["longgraft", "transformers"], help="also: 'transformers batched'")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.only:
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        command = [*servers(args.model, args.dtype, args.clients)[name], "--port", str(port)]
        with running(command, url):
            asyncio.run(load(url, args.model, 1, 1.0))  # the first request pays for what is only done once
            results[name] = asyncio.run(load(url, args.model, args.clients, args.seconds)).summary()
        print(f"{name}: {results[name]}", flush=True)
    about = {"model": args.model, "dtype": args.dtype, "clients": args.clients, "seconds": args.seconds}
    line = json.dumps(about | {"servers": results})
    if args.out:
        Path(args.out).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
