"""Prefixes that survive a restart, and files that must not be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longgraft.config import EngineConfig, GraftError
from longgraft.engine import Engine
from longgraft.references import References
from tests import engines
from tests.engines import cost_of, engine_for
from tests.models import tiny_model
from tests.prefix_cases import (
    CHUNK,
    DOCUMENT,
    FIRST,
    GREEDY,
    HOT,
    SECOND,
    adapted,
    is_whole,
    trees_of,
)
from tests.test_lossless_drafters import MODELS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


@pytest.mark.parametrize("name", [None, "eagle_head", "block_drafter"])
def test_a_saved_prefix_survives_a_restart(name: str | None, tmp_path: Path) -> None:
    def fresh() -> Engine:
        drafter = MODELS[name]() if name else None
        return Engine(tiny_model("llama"), None, EngineConfig(), drafter=drafter, cost=cost_of(0.02))

    path = str(tmp_path / "document.safetensors")
    assert fresh().save_prefix(path, DOCUMENT) == 600
    engine = fresh()
    assert engine.load_prefix(path) == 600 and engine.load_prefix(path) == 600
    output, alone = engine.generate(SECOND, HOT), fresh().generate(SECOND, HOT)
    assert trees_of(output) == trees_of(alone)
    assert output.stats["prefix_rows"] == 600 and is_whole(engine)


def test_saving_reads_only_what_is_missing(tmp_path: Path) -> None:
    engine = engine_for()
    engine.generate(FIRST, GREEDY)
    rows: list[int] = []
    forward = engine.target.forward

    def counted(segments: Any, **options: Any) -> Any:
        rows.extend(len(segment.token_ids) for segment in segments)
        return forward(segments, **options)

    engine.target.forward = counted  # type: ignore[method-assign]
    engine.save_prefix(str(tmp_path / "p"), DOCUMENT)
    assert rows == [] and is_whole(engine)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "p")
    engine_for().save_prefix(path, DOCUMENT, tenant="a")
    cases: list[tuple[Callable[[], Engine], str | None, str]] = [
        (lambda: engine_for(), "b", "its tenant is another, expected this one's"),
        (lambda: engine_for(), None, "its tenant is another"),
        (lambda: engine_for("qwen2"), "a", "its model is 'LlamaForCausalLM"),
        (lambda: engine_for(model=tiny_model("llama", seed=1)), "a", "its weights is another"),
        (
            lambda: engine_for(model=tiny_model("llama", torch.float32)),
            "a",
            "its dtype is 'float64', expected 'float32'",
        ),
        (lambda: engine_for("llama_yarn"), "a", "its model is 'LlamaForCausalLM"),
        (lambda: engine_for(backend="reference"), "a", "its arithmetic is 'any, auto attention"),
    ]
    for make, tenant, message in cases:
        engine = make()
        with pytest.raises(GraftError, match=message):
            engine.load_prefix(path, tenant)
        assert len(engine.prefixes.store) == 0 and is_whole(engine)
    engine = engine_for()
    engine.load_prefix(path, "a")
    assert engine.generate(FIRST, GREEDY).stats["prefix_rows"] == 0
    assert engine.generate(FIRST, GREEDY, references=References(tenant="a")).stats["prefix_rows"] == 600


def test_an_adapters_file_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "p")
    engine_for(model=adapted("one")).save_prefix(path, DOCUMENT)
    with pytest.raises(GraftError, match="its adapter is 'one "):
        engine_for().load_prefix(path)


def test_low_precision_saves_whole_forwards(tmp_path: Path) -> None:
    engine = engine_for(model=tiny_model("llama", torch.float32), prefill_rows=96)
    path = str(tmp_path / "p")
    assert engine.save_prefix(path, DOCUMENT) == 576
    with pytest.raises(GraftError, match="a prompt of 51 tokens has no rows to save: expected more than 96"):
        engine.save_prefix(path, DOCUMENT[:50])
    other = engine_for(model=tiny_model("llama", torch.float32), prefill_rows=128)
    with pytest.raises(GraftError, match="its arithmetic is 'forwards of 96 rows"):
        other.load_prefix(path)
    assert is_whole(engine)


def test_no_room_is_one_clear_error(tmp_path: Path) -> None:
    path = str(tmp_path / "p")
    engine_for().save_prefix(path, DOCUMENT)
    small = engine_for(kv_bytes=2 * CHUNK)
    with pytest.raises(GraftError, match="needs 3 chunks of KV cache, 2 are free: raise kv_bytes"):
        small.load_prefix(path)
    with pytest.raises(GraftError, match="could not be written"):
        engine_for().save_prefix(str(tmp_path / "missing" / "p"), DOCUMENT)
    off = engine_for(prefix_cache=False)
    for call in (lambda: off.load_prefix(path), lambda: off.save_prefix(path, DOCUMENT)):
        with pytest.raises(GraftError, match="set prefix_cache of EngineConfig"):
            call()
