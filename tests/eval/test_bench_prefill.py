"""Reading a long prompt, measured: operations are counted as they are, estimates and memory are told."""

import json
import sys

import pytest
import torch

from longgraft.eval import bench_prefill
from tests.models import tiny_model


def test_operations_are_counted() -> None:
    linear, attention = bench_prefill.multiply_adds(bench_prefill.built(64, "float32"), 64)
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024  # queries and output, keys and values, the gated block
    assert linear == 2 * layer * 64
    assert attention == 2 * 2 * 4 * 64 * (64 * 64 / 2)  # layers x (logits and sums) x heads x size x pairs


def test_a_window_bounds_what_is_attended_to() -> None:
    model = tiny_model("gemma3")
    config = model.config.get_text_config()
    config.sliding_window = 8
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    _, attention = bench_prefill.multiply_adds(model, 100)
    dim = config.head_dim
    assert attention == 2 * config.num_attention_heads * dim * config.num_hidden_layers * 8 * (100 - 4)


def test_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_prefill", "--tokens", "1500"])
    monkeypatch.setattr(bench_prefill, "multiply_rate", lambda: 1e9)
    bench_prefill.main()
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["tokens"] == 1499 and len(found["estimates"]) == 2 and "s to go" in said.err
    assert all(one["left_s"] > 0 for one in found["estimates"])
    assert found["floor_s"] == (found["linear"] + found["attention"]) / 1e9
    assert found["kv_gib"] == pytest.approx(6 * 256 * 2 * 2 * 2 * 64 * torch.float32.itemsize / 2**30)
