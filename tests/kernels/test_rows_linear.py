"""The linear kernel: a row's bits do not depend on its company, and its value is right."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longgraft.kernels import rows_linear as module
from longgraft.kernels.rows_linear import DTYPES, is_available, rows_linear

native = pytest.mark.skipif(not is_available(), reason="the native kernels are not built or not for this processor")
FAST = [name for name in ("avx512", "avx2") if name == module.KERNEL or module.KERNEL == "avx512"]
SHAPES = [(1, 1), (31, 5), (33, 3), (64, 48), (576, 100), (1000, 53), (1055, 7), (2100, 51), (4864, 17)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    inputs, outputs = shape
    generator = torch.Generator().manual_seed(rows + inputs)
    sizes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return x, weight, bias


def tolerance(x: Tensor, weight: Tensor, bias: Tensor, exact: Tensor) -> Tensor:
    """Half a unit in the last place of the output, and what summing in fp32 may lose."""
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    return exact.abs() * torch.finfo(x.dtype).eps / 2 + magnitude * 2**-24 * (x.shape[1] / 16 + 8)


@native
@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_in_every_batch_and_place(shape, dtype, kernel):
    x, weight, bias = problem(513, shape, dtype)
    whole = rows_linear(x, weight, bias, kernel)
    for rows in (*range(1, 71), 256):
        start = (rows * 37) % (513 - rows)
        part = rows_linear(x[start : start + rows], weight, bias, kernel)
        assert torch.equal(part, whole[start : start + rows]), rows


@native
@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_every_instruction_set_computes_the_plain_twins_bits(shape, dtype, kernel):
    x, weight, bias = problem(9, shape, dtype)
    assert torch.equal(rows_linear(x, weight, bias, kernel), rows_linear(x, weight, bias, "plain"))
    assert torch.equal(rows_linear(x, weight, None, kernel), rows_linear(x, weight, None, "plain"))


@native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_exact_up_to_one_rounding(shape, dtype):
    x, weight, bias = problem(13, shape, dtype)
    exact = x.double() @ weight.double().T + bias.double()
    error = (rows_linear(x, weight, bias).double() - exact).abs()
    assert (error <= tolerance(x, weight, bias, exact)).all()


@native
@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 1300), st.integers(1, 70), st.sampled_from(list(DTYPES)), st.booleans())
def test_any_size_agrees_with_one_row_at_a_time(rows, inputs, outputs, dtype, with_bias):
    x, weight, bias = problem(rows, (inputs, outputs), dtype)
    chosen = bias if with_bias else None
    together = rows_linear(x, weight, chosen)
    alone = torch.cat([rows_linear(row[None], weight, chosen) for row in x])
    assert torch.equal(together, alone)


@native
@pytest.mark.parametrize("rows", [1, 7, 70, 200])
def test_threads_change_nothing(rows):
    x, weight, bias = problem(rows, (600, 301), torch.bfloat16)
    alone = rows_linear(x, weight, bias)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(rows_linear(x, weight, bias), alone)


@native
@pytest.mark.parametrize("kernel", [*FAST, "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torchs_own(dtype, kernel):
    """Sums of two numbers, so that fp32 is exact or nearly so: ties, subnormals, overflow, infinities."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    pairs = torch.stack([every, every.roll(12345)], dim=1)
    pairs = pairs[(pairs[:, 0].float() + pairs[:, 1].float()).isfinite()]
    weight = torch.ones(17, 2, dtype=dtype)
    expected = pairs.float().sum(dim=1).to(dtype)
    result = rows_linear(pairs, weight, None, kernel)
    assert all(torch.equal(result[:, column], expected) for column in (0, 8, 16))


@native
@pytest.mark.parametrize("kernel", [*FAST, "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_stay_in_their_row(dtype, kernel):
    x, weight, bias = problem(8, (64, 20), dtype)
    clean = rows_linear(x, weight, bias, kernel)
    x[2, 5], x[6, 63] = torch.inf, torch.nan
    result = rows_linear(x, weight, bias, kernel)
    assert result[6].isnan().all()
    assert result[2].isinf().all()
    assert torch.equal(result[[0, 1, 3, 4, 5, 7]], clean[[0, 1, 3, 4, 5, 7]])


@native
def test_shapes_and_strides():
    x, weight, bias = problem(24, (100, 33), torch.bfloat16)
    whole = rows_linear(x, weight, bias)
    assert torch.equal(rows_linear(x.view(2, 3, 4, 100), weight, bias), whole.view(2, 3, 4, 33))
    assert torch.equal(rows_linear(x[0], weight, bias), whole[0])
    assert rows_linear(x[:0], weight, bias).shape == (0, 33)
    spread = torch.full((24, 200), 7.0, dtype=torch.bfloat16)
    spread[:, ::2] = x
    assert torch.equal(rows_linear(spread[:, ::2], weight, bias), whole)
    wide_weight = torch.full((33, 130), 7.0, dtype=torch.bfloat16)
    wide_weight[:, 3:103] = weight
    assert torch.equal(rows_linear(x, wide_weight[:, 3:103], bias), whole)
    assert torch.equal(rows_linear(x, weight.T.contiguous().T, bias), torch.nn.functional.linear(x, weight, bias))


def test_what_the_kernel_cannot_take_goes_to_torch():
    x, weight, bias = problem(3, (20, 10), torch.float32)
    double = rows_linear(x.double(), weight.double(), bias.double())
    assert torch.equal(double, torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rows_linear(x, weight, bias).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        rows_linear(x[:, :5], weight, bias)
    with pytest.raises(RuntimeError):
        rows_linear(x.bfloat16(), weight, bias)
    assert rows_linear(x[:, :0], weight[:, :0], bias).equal(bias.expand(3, 10))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_gradients_flow(place):
    inputs = list(problem(3, (20, 10), torch.float32))
    inputs[place].requires_grad_()
    rows_linear(*inputs).sum().backward()
    assert inputs[place].grad.abs().sum() > 0
    with torch.no_grad():
        assert not rows_linear(*inputs).requires_grad


def test_without_a_native_kernel_torch_serves(monkeypatch):
    monkeypatch.setattr(module, "KERNEL", None)
    assert not is_available()
    x, weight, bias = problem(3, (20, 10), torch.bfloat16)
    assert torch.equal(rows_linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
