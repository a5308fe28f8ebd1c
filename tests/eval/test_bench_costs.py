"""Round costs, measured: what bounds a pass is counted as it is, and every backend has its line."""

import argparse

import pytest
import torch

from longgraft.eval import bench
from longgraft.target import Target
from tests.models import tiny_model
from tests.saved_model import save

RATES = (1e9, 1e9)


def test_a_pass_reads_every_weight_and_row_once_or_multiplies_all() -> None:
    model = tiny_model("llama")
    target = Target(model)
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    row = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in target.layers)
    small = sum(p.numel() for p in model.parameters()) - sum(linear)  # norms, and embeddings where they are apart
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    small -= embeddings.numel() if embeddings is not head else 0
    cells, size = sum(linear) + small + 100 * row, target.dtype.itemsize
    assert bench.bound_of(target, 1, 100, (1e9, 1e15)) == pytest.approx(cells * size / 1e9)
    heads = target.config.num_attention_heads
    pairs = 100 * heads * sum(shape.key_dim + shape.value_dim for shape in target.layers)
    assert bench.bound_of(target, 8, 100, (1e15, 1e9)) == pytest.approx(8 * (sum(linear) + pairs) / 1e9)
    assert bench.bound_of(target, 1, 100, (1e9, 1e15), "int8") < bench.bound_of(target, 1, 100, (1e9, 1e15))


def test_every_backend_has_a_line(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_rate", lambda: 1e9)
    monkeypatch.setattr(bench, "multiply_rate", lambda: 1e9)
    args = argparse.Namespace(
        model=save(tmp_path_factory.mktemp("model")),
        dtype="float32",
        quantize=None,
        contexts=[20, 60],
        rows=[1, 4],
        repeats=1,
        backends=["cpu", "reference"],
    )
    rows = bench.bench_costs(args)["rows"]
    assert [(row["context"], row["backend"]) for row in rows] == [
        (context, name) for context in (20, 60) for name in ("cpu", "reference", "bound")
    ]
    assert all(row["1"] > 0 and row["4"] > 0 for row in rows[:2])
