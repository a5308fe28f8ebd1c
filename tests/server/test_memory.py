"""A server that clients treat badly needs no more memory for it in the end. Slow, and for Linux."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.saved_model import save
from tests.server.process import free_port, running
from tests.server.test_faults import malformed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")]
MIB = 1 << 20
JSON = {"Content-Type": "application/json"}
# What allocators keep for good grows for a while, by less with every storm; three storms are 360 requests.
MOST_GROWTH = 16 * MIB


def held(pid: int) -> int:
    """Return the bytes of memory that a process holds."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def storm(sender: httpx.Client) -> None:
    """Send what is malformed, what is too large, what is left in the middle, and what is in order."""
    for body in malformed(60):
        assert sender.post("/v1/completions", content=body, headers=JSON).status_code == 400
    for _ in range(10):
        assert sender.post("/v1/completions", content=b" " * (17 * MIB), headers=JSON).status_code == 413
    endless = {"prompt": "one two three", "max_tokens": 200, "temperature": 1.0, "stream": True, "ignore_eos": True}
    for _ in range(30):
        with sender.stream("POST", "/v1/completions", json=endless) as answer:
            assert answer.status_code == 200
            with suppress(StopIteration):
                next(answer.iter_raw(64))
    for seed in range(20):
        body = json.dumps({"prompt": "one two three", "max_tokens": 16, "seed": seed, "temperature": 1.0})
        answer = sender.post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]


def test_memory_comes_back(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "longgraft", "serve", "--model", save(tmp_path), "--port", str(port)]
    with running(command, url, tmp_path / "log") as process, httpx.Client(base_url=url, trust_env=False) as sender:
        sender.timeout = httpx.Timeout(120)
        storm(sender)
        before = held(process.pid)
        for _ in range(3):
            storm(sender)
        grown = held(process.pid) - before
        metrics = sender.get("/metrics").text
    assert grown < MOST_GROWTH, f"{grown / MIB:.1f} MiB more after three storms"
    print(f"{before / MIB:.0f} MiB after one storm, {grown / MIB:+.1f} after three more")
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    running_now = [float(value) for name, value in values.items() if "requests_running" in name]
    assert running_now and not any(running_now)
