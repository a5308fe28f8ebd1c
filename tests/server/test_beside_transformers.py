"""The same requests through `transformers serve` and ours, greedy in float32: the same text. Slow; needs a real model.

`LONGGRAFT_SERVE_MODEL` is a folder or hub id with a chat template.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

MODEL = os.environ.get("LONGGRAFT_SERVE_MODEL", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL, reason="LONGGRAFT_SERVE_MODEL names no model"),
]
pytest.importorskip("accelerate")
CHATS = [
    "Name three colours.",
    "Repeat this line twice: the lazy dog sleeps under the old bridge.",
    "Write a Python function that adds two numbers.",
    "What is the capital of France?",
]
PROMPTS = ["def fib(n):", "Once upon a time", "1 2 3 4 5 6 7"]
TOKENS = 48


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(command: Sequence[str], url: str, log: Path) -> Iterator[openai.OpenAI]:
    """Run a server until the block ends."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()[-2000:]
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.5)
            yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
        finally:
            process.terminate()
            process.wait(60)


def answers(client: openai.OpenAI) -> list[str | None]:
    found: list[str | None] = []
    for text in CHATS:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=TOKENS, temperature=0
        )
        found.append(answer.choices[0].message.content)
    for text in PROMPTS:
        found.append(
            client.completions.create(model=MODEL, prompt=text, max_tokens=TOKENS, temperature=0).choices[0].text
        )
    return found


def test_the_same_text(tmp_path: Path) -> None:
    ours, theirs = free_port(), free_port()
    command = [sys.executable, "-m", "longgraft", "serve", "--model", MODEL, "--dtype", "float32", "--port", str(ours)]
    with running(command, f"http://127.0.0.1:{ours}", tmp_path / "ours") as client:
        found = answers(client)
    other = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", MODEL]
    other += ["--port", str(theirs), "--dtype", "float32", "--device", "cpu"]
    with running(other, f"http://127.0.0.1:{theirs}", tmp_path / "theirs") as client:
        expected = answers(client)
    assert found == expected
