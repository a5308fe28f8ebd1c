"""Ctrl-C keeps what exists, wherever it comes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import longgraft
import longgraft.audit
import longgraft.demo
import longgraft.engine
import longgraft.show
from tests.saved_model import PROMPT, calm, invoke, last_json


@pytest.fixture(autouse=True)
def calmly() -> Iterator[None]:
    with calm():
        yield


def press_after(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Press Ctrl-C while the given round is shown."""
    true_push, count = longgraft.show.Screen.push, iter(range(1, 10**6))

    def push(self: Any, *arguments: Any) -> None:
        true_push(self, *arguments)
        if next(count) == rounds:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(longgraft.show.Screen, "push", push)


def test_ctrl_c_keeps_what_exists(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    press_after(monkeypatch, 5)
    result = invoke("generate", "-m", folder, "-p", PROMPT, "-n", "200", "--policy", "plain", "--json")
    values = last_json(result.stdout)
    assert (result.exit_code, values["finish_reason"], len(values["token_ids"])) == (130, "cancelled", 5)
    assert result.stdout.startswith(values["text"].rstrip("\ufffd"))
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_the_prompt_is_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from longgraft.target import Target

    true_forward = Target.forward

    def forward(self: Target, segments: Any, *arguments: Any, **options: Any) -> Any:
        if not segments[0].wants_logits:
            signal.raise_signal(signal.SIGINT)
        return true_forward(self, segments, *arguments, **options)

    monkeypatch.setattr(Target, "forward", forward)
    result = invoke("generate", "-m", folder, "-p", PROMPT, "--policy", "plain", "--json")
    values = last_json(result.stdout)
    assert (result.exit_code, values["finish_reason"], values["token_ids"]) == (130, "cancelled", [])


def test_a_second_ctrl_c_does_not_wait() -> None:
    with longgraft.show.CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.is_pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_from_outside(folder: str) -> None:
    command = [sys.executable, "-m", "longgraft", "generate", "-m", folder, "-p", PROMPT, "--policy", "plain", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "-n", "1900"], stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    values = last_json((first + rest).decode())
    assert process.returncode == 130 and errors == b""
    assert values["finish_reason"] == "cancelled" and 0 < len(values["token_ids"]) < 1900
