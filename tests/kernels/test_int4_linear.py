"""Linear layers with 4-bit weights: the kernels are their twin bit for bit, rows are strangers to one another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longgraft.kernels import int4_linear as module
from longgraft.kernels import packed_linear, rows_linear
from longgraft.kernels.int4_linear import Packed4, dequantized, int4_linear, pack, twin, unpack
from longgraft.kernels.rows_linear import DTYPES

ORDER = ["vnni", "avx512", "avx2", "plain"]
KERNELS = ORDER[ORDER.index(packed_linear.KERNEL) :] if packed_linear.KERNEL else []
native = pytest.mark.skipif(not KERNELS, reason="the native kernels are not built")
SHAPES = [(1, 1), (3, 5), (31, 64), (33, 65), (127, 3), (129, 130), (256, 64), (515, 70), (896, 33)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def problem(rows: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Packed4, Tensor]:
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
    for rows in (*range(1, 21), 31, 70):
        assert torch.equal(int4_linear(x[:rows], packed, bias, kernel), expected[:rows]), rows
    assert torch.equal(int4_linear(x[:7], packed, None, kernel), twin(x[:7], packed))


@native
@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 70), st.integers(1, 700), st.integers(1, 140), st.sampled_from(list(DTYPES)), st.booleans())
def test_any_size_agrees_with_one_row_at_a_time(rows, inputs, outputs, dtype, with_bias):
    x, packed, bias = problem(rows, (inputs, outputs), dtype)
    chosen = bias if with_bias else None
    together = int4_linear(x, packed, chosen)
    assert torch.equal(together, torch.cat([int4_linear(row[None], packed, chosen) for row in x]))
    assert torch.equal(together, twin(x, packed, chosen))


@native
@pytest.mark.parametrize("kernel", KERNELS)
def test_more_rows_than_a_pass_takes(kernel):
    x, packed, bias = problem(1100, (40, 20))
    whole = int4_linear(x, packed, bias, kernel)
    assert torch.equal(whole, twin(x, packed, bias))
    for start, rows in ((0, 1), (511, 2), (512, 64), (1030, 70)):
        assert torch.equal(int4_linear(x[start : start + rows], packed, bias, kernel), whole[start : start + rows])


@native
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_threads_change_nothing(rows):
    x, packed, bias = problem(rows, (600, 301))
    alone = int4_linear(x, packed, bias)
    weight = torch.randn(301, 600)
    values = pack(weight).values
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(int4_linear(x, packed, bias), alone)
        assert torch.equal(pack(weight).values, values)


@pytest.mark.parametrize("kernel", [*KERNELS, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_stay_in_their_row(dtype, kernel):
    compute = twin if kernel is None else (lambda *args: int4_linear(*args, kernel))
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
    x, packed, bias = problem(9, (260, 65), dtype)
    limits = torch.finfo(dtype)
    x[0], x[1], x[2] = 0.0, limits.max, limits.smallest_normal
    x[3], x[4] = -limits.max, limits.smallest_normal / 2
    x[5, ::2], x[5, 1::2] = limits.max, limits.tiny
    x[6, :128] = 0.0
    x[7] = torch.arange(260).to(dtype) - 130  # many ties between two whole numbers
    x[8] = -0.0
    result, expected = int4_linear(x, packed, bias, kernel), twin(x, packed, bias)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(), expected.nan_to_num())
    assert torch.equal(result[0], bias.to(dtype))
    assert torch.equal(result[8], bias.to(dtype))


@native
@pytest.mark.parametrize("size", [2.0**99, 2.0**-60, 2.0**-120, 2.0**-140])
def test_the_largest_sums_are_exact_and_so_are_tiny_ones(size):
    """All products of a block at their greatest: what a fused multiply-add must not notice."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, 320, generator=generator).clamp(-1.9, 1.9) * size
    weight[0], weight[1], weight[2, ::2] = size, -size, size  # d = 0, and the greatest range
    x = torch.full((3, 320), 127.0)
    x[1] *= -1
    x[2] = torch.randint(-127, 128, (320,), generator=generator)
    packed = pack(weight)
    expected = twin(x, packed)
    assert expected.isfinite().all()
    for kernel in KERNELS:
        assert torch.equal(int4_linear(x, packed, None, kernel), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("inputs", [320, 77])
def test_a_weight_is_kept_to_half_a_step(dtype, inputs):
    """The squared error of a block is at most that of 15 equal steps over its range, d and m rounded to 8 bits."""
    weight = torch.randn(130, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[7], weight[9, 3] = 0.0, 50.0
    packed = pack(weight)
    lost = (dequantized(packed) - weight.float()).square()
    for number, block in enumerate(weight.float().split(32, dim=1)):
        low, high = block.aminmax(dim=1)
        off = (high - low) * (0.5 / 15 + 2**-9) + low.abs() * 2**-9
        assert (lost[:, 32 * number : 32 * number + 32].mean(1).sqrt() <= off * 1.01).all()
    assert not dequantized(packed)[7].any()
    assert packed.nbytes == 3 * -(-inputs // 32) * 1280
    assert int(unpack(packed)[0].max()) == 15


@pytest.mark.parametrize("top", [15, 14, 13, 11, 8, 6, 3, 1])
def test_weights_on_a_grid_stay_there(top):
    generator = torch.Generator().manual_seed(top)
    q = torch.randint(0, top + 1, (66, 5, 32), generator=generator)
    q[..., 0], q[..., 9] = 0, top
    d = (torch.rand(66, 5, generator=generator) + 0.1).bfloat16().float()
    m = (-8 * d + torch.randn(66, 5, generator=generator)).bfloat16().float()
    weight = (q * d[..., None] + m[..., None]).view(66, 160)
    off = (dequantized(pack(weight)) - weight).view(66, 5, 32).abs()
    assert (off <= 0.01 * d[..., None]).all()


def test_more_tries_are_never_worse(monkeypatch):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    best = (dequantized(pack(weight)) - weight).norm()
    monkeypatch.setattr(module, "LINES", 0)
    tried = (dequantized(pack(weight)) - weight).norm()
    monkeypatch.setattr(module, "TRIES", module.TRIES[:1])
    assert best < 0.97 * tried and tried < 0.97 * (dequantized(pack(weight)) - weight).norm()


def test_what_fills_up_counts_as_nothing():
    weight = torch.randn(70, 40, generator=torch.Generator().manual_seed(2)) + 3
    filled = pack(weight).values[1, :, 1024:].view(torch.bfloat16).view(2, 2, 64)
    assert filled[..., :6].any() and not filled[..., 6:].any()
    q, d, m = unpack(pack(weight))
    assert q.shape == (70, 2, 32) and d.shape == m.shape == (70, 2)
    assert not q[:, 1, 8:].any() and (m > 0).any()


def test_shapes_and_strides():
    x, packed, bias = problem(24, (100, 33))
    whole = int4_linear(x, packed, bias)
    assert torch.equal(int4_linear(x.view(2, 3, 4, 100), packed, bias), whole.view(2, 3, 4, 33))
    assert torch.equal(int4_linear(x[0], packed, bias), whole[0])
    assert int4_linear(x[:0], packed, bias).shape == (0, 33)
    assert torch.equal(int4_linear(x.T.contiguous().T, packed, bias), whole)
    assert torch.equal(int4_linear(x, packed, torch.stack([bias, bias], 1)[:, 0]), whole)


def test_what_cannot_be_computed_is_refused():
    x, packed, bias = problem(3, (20, 10), torch.float32)
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 20\] on the CPU"):
        int4_linear(x[:, :5], packed, bias)
    with torch.enable_grad(), pytest.raises(ValueError, match="4-bit linear layers have no gradients"):
        int4_linear(x.requires_grad_(), packed, bias)
    for bad in (torch.nan, torch.inf, 2.0**100):
        with pytest.raises(ValueError, match="infinite or undefined"):
            pack(torch.full((2, 3), bad))
    with pytest.raises(ValueError, match="0 x 3; expected at least one"):
        pack(torch.zeros(0, 3))


def test_float64_and_missing_native_code_go_to_the_twin(monkeypatch):
    x, packed, bias = problem(5, (150, 10), torch.float32)
    expected = twin(x, packed, bias)
    assert torch.equal(int4_linear(x.double(), packed, bias), expected.double())
    monkeypatch.setattr(packed_linear, "KERNEL", None)
    assert torch.equal(int4_linear(x, packed, bias), expected)


@pytest.mark.skipif(rows_linear._native is None, reason="the native kernels are not built")
@pytest.mark.parametrize("size", [1.0, 1e-3, 2.0**98, 2.0**-60, 2.0**-118, 2.0**-126, 2.0**-140])
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_packing_writes_the_twins_bytes(size, dtype, monkeypatch):
    size = min(size, 2.0**14) if dtype is torch.float16 else size
    for outputs, inputs in ((1, 1), (70, 77), (130, 320)):
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).clamp(-1.9, 1.9)
        weight[0, ::2] = 0.0
        weight[0, 1::2] = -0.0
        weight[-1] = weight[-1].mul(4).round() / 4  # ties
        weight = (weight * size).to(dtype)
        here = pack(weight)
        with monkeypatch.context() as patch:
            patch.setattr(rows_linear, "_native", None)
            assert torch.equal(here.values, pack(weight).values)


def test_packing_in_slices_changes_nothing(monkeypatch):
    weight = torch.randn(300, 50, generator=torch.Generator().manual_seed(3))
    whole = pack(weight)
    monkeypatch.setattr(module, "_SLICE", 1)
    assert torch.equal(pack(weight).values, whole.values)
