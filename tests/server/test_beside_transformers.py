"""The same requests through `transformers serve` and ours, greedy in float32: the same text. Slow; needs a real model.

`LONGGRAFT_SERVE_MODEL` is a folder or hub id with a chat template.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import openai
import pytest

from tests.server.process import free_port, running

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


def sender(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600, max_retries=0)


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
    with running(command, f"http://127.0.0.1:{ours}", tmp_path / "ours"):
        found = answers(sender(ours))
    other = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", MODEL]
    other += ["--port", str(theirs), "--dtype", "float32", "--device", "cpu"]
    with running(other, f"http://127.0.0.1:{theirs}", tmp_path / "theirs"):
        expected = answers(sender(theirs))
    assert found == expected
