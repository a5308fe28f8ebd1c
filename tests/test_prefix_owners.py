"""Rows of other tenants, weights, adapters and regimes are never reused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from longgraft.config import GraftError, SamplingParams
from longgraft.quantize import quantized
from longgraft.references import References
from tests import engines
from tests.cases import plain_generate
from tests.engines import engine_for, model_of, prompt_of
from tests.models import LONGROPE_FROM
from tests.prefix_cases import (
    DOCUMENT,
    FIRST,
    GREEDY,
    NEW,
    adapted,
    truth,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def test_tenants_do_not_share() -> None:
    engine = engine_for()
    hits = []
    for tenant in ("a", "b", None, "a", "b", None):
        references = References(tenant=tenant) if tenant else None
        output = engine.generate(FIRST, GREEDY, references=references)
        assert list(output.token_ids) == truth(FIRST)
        hits.append(output.stats["prefix_rows"] > 0)
    assert hits == [False] * 3 + [True] * 3


def test_regimes_of_rope_do_not_share() -> None:
    engine = engine_for("phi3_longrope")
    prompt = prompt_of(400, arch="phi3_longrope")
    short, long = (SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in (4, LONGROPE_FROM))
    engine.generate(prompt, short)
    seq = engine.open(prompt, long)
    for _ in zip(range(4), engine.run([seq])):
        pass
    assert seq.long_rope and seq.stats.prefix_rows == 0
    want = plain_generate(model_of("phi3_longrope"), prompt, n=3, long_rope=True)
    assert seq.new_token_ids[:3] == want
    assert engine.generate(prompt, short).stats["prefix_rows"] == 399


def test_weights_written_to_are_another_model() -> None:
    model = copy.deepcopy(model_of())
    engine = engine_for(model=model)
    engine.generate(FIRST, GREEDY)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    output = engine.generate(FIRST, GREEDY)
    assert output.stats["prefix_rows"] == 0
    assert list(output.token_ids) == plain_generate(model, FIRST, n=NEW)
    model.model.layers[1].self_attn.v_proj.weight = nn.Parameter(torch.zeros(32, 64, dtype=torch.float64))
    assert engine.generate(FIRST, GREEDY).stats["prefix_rows"] == 0
    assert engine.generate(FIRST, GREEDY).stats["prefix_rows"] == 639


def test_what_changes_while_a_request_runs_is_not_published() -> None:
    model = copy.deepcopy(model_of())
    engine = engine_for(model=model)
    seq = engine.open(FIRST, GREEDY)
    rounds = engine.run([seq])
    next(rounds)
    before = len(engine.prefixes.store)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    rounds.close()
    assert len(engine.prefixes.store) == before == 2


def test_adapters_do_not_share() -> None:
    model = adapted("a", "b")
    engine = engine_for(model=model)
    layers = [layer for layer in model.modules() if hasattr(layer, "merged_adapters")]
    hits = []

    def ask() -> None:
        output = engine.generate(FIRST, GREEDY)
        assert list(output.token_ids) == plain_generate(model, FIRST, n=NEW)
        hits.append(output.stats["prefix_rows"] > 0)

    for name in "abab":
        for layer in layers:
            layer.set_adapter(name)
        ask()
    for is_on in (False, False, True):
        for layer in layers:
            layer.enable_adapters(is_on)
        ask()
    layers[0].scale_layer(2.0)
    ask()
    layers[0].merge()
    ask()
    assert hits == [False, False, True, True, False, True, True, False, False]


def test_a_quantised_model_is_another_model(tmp_path: Path) -> None:
    whole, small = engine_for(), engine_for(model=quantized(copy.deepcopy(model_of())))
    whole.save_prefix(str(tmp_path / "p"), DOCUMENT)
    with pytest.raises(GraftError, match="its quantisation is 'none', expected 'int8'"):
        small.load_prefix(str(tmp_path / "p"))
    assert len(small.prefixes.store) == 0
