"""RMS norm: the kernels are the twin, bit for bit, rows are strangers to one another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.kernels import rms_norm, rows_linear
from longgraft.kernels.rms_norm import Style, norm, norm_twin, takes
from longgraft.kernels.rows_linear import DTYPES

ORDER = ["avx512", "avx2", "plain"]
KERNELS = ORDER[ORDER.index(rows_linear.KERNEL) :] if rows_linear.KERNEL else []
native = pytest.mark.skipif(not rows_linear.is_available(), reason="the native kernels are not built")
SIZES = [1, 16, 63, 64, 65, 127, 896, 4864]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def rows(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(count, size) * torch.logspace(-6, 3, count)[:, None]).to(dtype)


def same(ours: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits, any NaN equal to any other."""
    held = ours.isnan()
    return torch.equal(held, other.isnan()) and torch.equal(ours.masked_fill(held, 0), other.masked_fill(held, 0))


@native
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_instruction_set_computes_the_twins_bits(size, dtype, kernel):
    x, weight = rows(9, size, dtype), torch.randn(size).to(dtype)
    for style in Style:
        expected = norm_twin(x, weight, 1e-6, style)
        assert same(norm(x, weight, 1e-6, style, kernel), expected), style
        assert same(norm(x[4:5], weight, 1e-6, style, kernel), expected[4:5]), style


@native
@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from(list(DTYPES)), st.sampled_from(list(Style)))
def test_any_size_agrees_with_one_row_at_a_time(count, size, dtype, style):
    x, weight = rows(count, size, dtype), torch.randn(size).to(dtype)
    together = norm(x, weight, 1e-5, style)
    assert same(together, torch.cat([norm(row[None], weight, 1e-5, style) for row in x]))
    assert same(together, norm_twin(x, weight, 1e-5, style))


@native
def test_threads_change_nothing():
    x, weight = rows(600, 128, torch.bfloat16), torch.randn(128).bfloat16()
    expected = norm(x, weight, 1e-6, Style.INNER)
    torch.set_num_threads(2)
    assert same(norm(x, weight, 1e-6, Style.INNER), expected)


@native
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_torch(dtype):
    unit = torch.finfo(dtype).eps
    x, weight = torch.randn(5, 100).to(dtype), torch.rand(100).to(dtype)
    scaled = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    for style, factor in ((Style.INNER, weight), (Style.OUTER, weight), (Style.SHIFTED, 1 + weight.double())):
        ours = norm(x, weight, 1e-5, style).double()
        assert torch.allclose(ours, scaled * factor.double(), rtol=2 * unit, atol=1e-7), style


@native
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite_stays_in_its_row(kernel):
    inf, nan = float("inf"), float("nan")
    x = torch.randn(4, 70)
    x[1, 3], x[2, 69] = nan, -inf
    y = norm(x, torch.ones(70), 1e-6, Style.OUTER, kernel)
    assert y[1].isnan().all()
    assert same(y, norm_twin(x, torch.ones(70), 1e-6, Style.OUTER))
    assert y[0].isfinite().all() and y[3].isfinite().all()


@native
def test_other_layouts_are_copied():
    heads = torch.randn(1, 5, 4, 16).bfloat16().transpose(1, 2)
    weight = torch.randn(16).bfloat16()
    assert torch.equal(norm(heads, weight, 1e-6, Style.INNER), norm_twin(heads, weight, 1e-6, Style.INNER))
    assert norm(heads[:, :0], weight, 1e-6, Style.INNER).shape == (1, 0, 5, 16)


@native
def test_what_is_taken():
    x = torch.randn(3, 4)
    assert takes(x, x.clone())
    assert not takes(x.double())
    assert not takes(x, x.bfloat16())
    assert not takes(x.to("meta"))
    asks = x.clone().requires_grad_()
    assert takes(asks)
    with torch.enable_grad():
        assert not takes(x, asks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes(x)


@native
def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"weight \(4,\)"):
        norm(torch.randn(2, 3), torch.ones(4), 1e-6, Style.INNER)
    with pytest.raises(ValueError, match="no such kernel"):
        norm(torch.randn(2, 3), torch.ones(3), 1e-6, Style.INNER, "sse")


def test_without_a_native_module_nothing_is_taken(monkeypatch):
    monkeypatch.setattr(rows_linear, "KERNEL", None)
    assert not rms_norm.takes(torch.randn(2))
