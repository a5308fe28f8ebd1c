"""Linear layers with 8-bit weights: the kernels are their twin bit for bit, rows are strangers to one another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longgraft.kernels import int8_linear as module
from longgraft.kernels import packed_linear
from longgraft.kernels.int8_linear import Packed, dequantized, int8_linear, pack, twin, unpack
from longgraft.kernels.rows_linear import DTYPES

ORDER = ["vnni", "avx512", "avx2", "plain"]
KERNELS = ORDER[ORDER.index(packed_linear.KERNEL) :] if packed_linear.KERNEL else []
native = pytest.mark.skipif(not KERNELS, reason="the native kernels are not built")
SHAPES = [(1, 1), (3, 5), (4, 64), (63, 65), (127, 3), (129, 130), (256, 64), (515, 70), (896, 33), (4096, 17)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def problem(rows: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Packed, Tensor]:
    inputs, outputs = shape
    generator = torch.Generator().manual_seed(rows + inputs)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((rows, inputs), (outputs, inputs), (outputs,)))
    return x.to(dtype), pack(weight.to(dtype)), bias


@native
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_computes_the_twins_bits(shape, dtype, kernel):
    x, packed, bias = problem(70, shape, dtype)
    expected = twin(x, packed, bias)
    for rows in (*range(1, 15), 31, 70):
        assert torch.equal(int8_linear(x[:rows], packed, bias, kernel), expected[:rows]), rows
    assert torch.equal(int8_linear(x[:7], packed, None, kernel), twin(x[:7], packed))


@native
@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 70), st.integers(1, 700), st.integers(1, 140), st.sampled_from(list(DTYPES)), st.booleans())
def test_any_size_agrees_with_one_row_at_a_time(rows, inputs, outputs, dtype, with_bias):
    x, packed, bias = problem(rows, (inputs, outputs), dtype)
    chosen = bias if with_bias else None
    together = int8_linear(x, packed, chosen)
    assert torch.equal(together, torch.cat([int8_linear(row[None], packed, chosen) for row in x]))
    assert torch.equal(together, twin(x, packed, chosen))


@native
@pytest.mark.parametrize("kernel", KERNELS)
def test_more_rows_than_a_pass_takes(kernel):
    x, packed, bias = problem(1100, (40, 20))
    whole = int8_linear(x, packed, bias, kernel)
    assert torch.equal(whole, twin(x, packed, bias))
    for start, rows in ((0, 1), (511, 2), (512, 64), (1030, 70)):
        assert torch.equal(int8_linear(x[start : start + rows], packed, bias, kernel), whole[start : start + rows])


@native
@pytest.mark.parametrize("rows", [1, 7, 70, 200])
def test_threads_change_nothing(rows):
    x, packed, bias = problem(rows, (600, 301))
    alone = int8_linear(x, packed, bias)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(int8_linear(x, packed, bias), alone)


@pytest.mark.parametrize("kernel", [*KERNELS, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_stay_in_their_row(dtype, kernel):
    compute = twin if kernel is None else (lambda *args: int8_linear(*args, kernel))
    x, packed, bias = problem(9, (300, 70), dtype)
    clean = compute(x, packed, bias)
    x[2, 5], x[4, 299], x[6, 140] = torch.inf, -torch.inf, torch.nan
    result = compute(x, packed, bias)
    assert result[[2, 4, 6]].isnan().all()
    others = [0, 1, 3, 5, 7, 8]
    assert torch.equal(result[others], clean[others])


@native
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_agree_with_the_twin(dtype, kernel):
    x, packed, bias = problem(12, (260, 65), dtype)
    limits = torch.finfo(dtype)
    x[0], x[1], x[2] = 0.0, limits.max, limits.smallest_normal
    x[3], x[4] = -limits.max, limits.smallest_normal / 2
    x[5, ::2], x[5, 1::2] = limits.max, limits.tiny
    x[6, :128] = 0.0
    x[7] = torch.arange(260).to(dtype) - 130  # many ties between two whole numbers
    x[8] = -0.0
    result, expected = int8_linear(x, packed, bias, kernel), twin(x, packed, bias)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(), expected.nan_to_num())
    assert torch.equal(result[0], bias.to(dtype))
    assert torch.equal(result[8], bias.to(dtype))


@native
def test_the_largest_sums_do_not_wrap():
    weight = torch.full((3, 70000), -2.0)
    for sign in (1.0, -1.0):
        x = torch.full((2, 70000), 3.0 * sign)
        for kernel in KERNELS:
            assert torch.allclose(int8_linear(x, pack(weight), None, kernel), torch.tensor(-420000.0 * sign), rtol=1e-4)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_weight_is_kept_to_half_a_unit(dtype):
    weight = torch.randn(130, 77, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[7], weight[9, 3] = 0.0, 50.0
    packed = pack(weight)
    unit = weight.float().abs().amax(1) / 127
    assert ((dequantized(packed) - weight.float()).abs() <= (unit * 0.5001)[:, None]).all()
    assert int(unpack(packed).abs().max()) == 127
    assert packed.values.numel() == 192 * 80
    assert not dequantized(packed)[7].any()


def test_the_error_is_bounded_by_the_units():
    """Every rounded factor is off by half a unit of its output or group at most."""
    x, packed, _ = problem(20, (300, 40), torch.float32)
    x[:, 3] = 300  # an outlier costs its own group precision, no other
    exact = x.double() @ dequantized(packed).double().T
    groups = torch.nn.functional.pad(x, (0, 84)).view(20, 3, 128)
    unit = groups.abs().amax(-1).repeat_interleave(128, dim=1)[:, :300] / 127
    bound = (unit.double() * 0.5001) @ dequantized(packed).double().abs().T + exact.abs() * 1e-5
    assert ((int8_linear(x, packed).double() - exact).abs() <= bound).all()
    small = (unit[:, 128:].double() * 0.5001).amax()
    assert small < unit[:, 0].min() * 0.05


def test_shapes_and_strides():
    x, packed, bias = problem(24, (100, 33))
    whole = int8_linear(x, packed, bias)
    assert torch.equal(int8_linear(x.view(2, 3, 4, 100), packed, bias), whole.view(2, 3, 4, 33))
    assert torch.equal(int8_linear(x[0], packed, bias), whole[0])
    assert int8_linear(x[:0], packed, bias).shape == (0, 33)
    assert torch.equal(int8_linear(x.T.contiguous().T, packed, bias), whole)
    spread = torch.zeros(24, 200, dtype=x.dtype)
    spread[:, ::2] = x
    assert torch.equal(int8_linear(spread[:, ::2], packed, bias), whole)
    assert torch.equal(int8_linear(x, packed, torch.stack([bias, bias], 1)[:, 0]), whole)


def test_what_cannot_be_computed_is_refused():
    x, packed, bias = problem(3, (20, 10), torch.float32)
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 20\] on the CPU"):
        int8_linear(x[:, :5], packed, bias)
    with pytest.raises(ValueError, match="on meta"):
        int8_linear(x.to("meta"), packed, bias)
    with torch.enable_grad(), pytest.raises(ValueError, match="no gradients"):
        int8_linear(x.requires_grad_(), packed, bias)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="infinite or undefined"):
            pack(torch.full((2, 3), bad))
    with pytest.raises(ValueError, match="at least one"):
        pack(torch.zeros(0, 3))


def test_float64_and_missing_native_code_go_to_the_twin(monkeypatch):
    x, packed, bias = problem(5, (150, 10), torch.float32)
    expected = twin(x, packed, bias)
    assert torch.equal(int8_linear(x.double(), packed, bias), expected.double())
    monkeypatch.setattr(packed_linear, "KERNEL", None)
    assert torch.equal(int8_linear(x, packed, bias), expected)


def test_packing_in_slices_changes_nothing(monkeypatch):
    weight = torch.randn(300, 50, generator=torch.Generator().manual_seed(3))
    whole = pack(weight)
    monkeypatch.setattr(module, "_SLICE", 128)
    parts = pack(weight)
    assert torch.equal(parts.values, whole.values)
    assert torch.equal(parts.scale, whole.scale)
