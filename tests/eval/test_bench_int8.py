"""The comparison with 8-bit weights: both sides are measured in turn, predictions are compared position by position."""

import pytest
import torch

from longgraft.eval.bench_int8 import HEADER, agreement, layer_lines, line, main
from longgraft.kernels import packed_linear, rows_linear


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_sides_take_turns():
    calls: list[str] = []
    result = line("x", 3, (lambda: calls.append("a"), lambda: calls.append("b")), 2)
    assert calls == ["a", "b", "a", "b"]
    assert len(str(result).split()) == len(HEADER.split()) - 1 - 1


def test_agreement_counts_positions_and_weighs_probabilities():
    one = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    other = torch.tensor([[0.6, 0.4], [0.7, 0.3]]).log()
    assert agreement(one, one) == (1.0, 0.0)
    same, divergence = agreement(one, other)
    assert same == 0.5
    expected = 0.9 * torch.tensor(0.9 / 0.6).log() + 0.1 * torch.tensor(0.1 / 0.4).log()
    expected += 0.2 * torch.tensor(0.2 / 0.7).log() + 0.8 * torch.tensor(0.8 / 0.3).log()
    assert divergence == pytest.approx(float(expected) / 2)


@pytest.mark.parametrize("bits", ["8", "4"])
def test_layers_are_compared(monkeypatch, capsys, bits):
    for module in ("longgraft.eval.bench_int8", "longgraft.eval.bench_linear"):
        monkeypatch.setattr(f"{module}.POOL_BYTES", 1 << 16)
    assert [one.rows for one in layer_lines("64x32", [1, 3], 1)] == [1, 3]
    assert main(["--bits", bits, "--shapes", "64x32", "--rows", "2", "--repeats", "1", "--threads", "1"]) == 0
    assert '"64x32 2"' in capsys.readouterr().out
    assert rows_linear.KERNEL is None or packed_linear.KERNEL is not None
