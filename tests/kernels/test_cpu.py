"""What the CPU backend does inside: merging parts, lanes, blocks and the kernel's traps."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longgraft.kernels import cpu, reference
from longgraft.kernels.parts import Part, merge
from longgraft.kernels.spec import AttentionSpec, Run, TreeInput

NEVER = float("-inf")


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        yield
    torch.set_num_threads(threads)


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def call(rows: int, prefix: list[int], heads: tuple[int, int], dtype: torch.dtype = torch.float64) -> TreeInput:
    hq, hk = heads
    runs: list[Run] = [(randn(n, hk, 16, dtype=dtype), randn(n, hk, 16, dtype=dtype)) for n in prefix]
    tree = (randn(rows, hk, 16, dtype=dtype), randn(rows, hk, 16, dtype=dtype))
    positions = [sum(prefix) + i for i in range(rows)]
    return TreeInput(randn(rows, hq, 16, dtype=dtype), runs, tree, AttentionSpec(0.3), None, positions)


def part(logits: Tensor, values: Tensor) -> Part:
    """[H, T, n] logits and [H, n, D] values as one partial result."""
    return torch.softmax(logits, dim=-1) @ values, torch.logsumexp(logits, dim=-1)


def test_merge_is_one_softmax() -> None:
    logits, values = randn(3, 5, 30) * 4, randn(3, 30, 8)
    cuts = [slice(0, 1), slice(1, 17), slice(17, 30)]
    out, lse = merge([part(logits[..., cut], values[:, cut]) for cut in cuts])
    want, want_lse = part(logits, values)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-13)


def test_merge_survives_large_logits_and_empty_rows() -> None:
    outs = [randn(1, 3, 2).float(), randn(1, 3, 4).float()[..., :2]]
    lses = [torch.tensor([[900.0, NEVER, NEVER]]), torch.tensor([[-900.0, -5.0, NEVER]])]
    outs[0][0, 1:] = 0
    outs[1][0, 2] = 0
    out, lse = merge(list(zip(outs, lses)))
    assert torch.equal(out[0, 0], outs[0][0, 0])
    assert torch.equal(out[0, 1], outs[1][0, 1])
    assert torch.equal(out[0, 2], torch.zeros(2))
    assert lse.tolist() == [[900.0, -5.0, NEVER]]


@pytest.mark.parametrize("sink", [-1e4, 0.0, 3.0, 1e4])
def test_a_sink_takes_its_share_once(sink: float) -> None:
    logits, values = randn(1, 2, 6), randn(1, 6, 4)
    parts = [part(logits[..., :2], values[:, :2]), part(logits[..., 2:], values[:, 2:])]
    out, _ = merge(parts, torch.tensor([sink], dtype=torch.float64))
    with_sink = torch.cat([logits, torch.full((1, 2, 1), sink, dtype=torch.float64)], dim=-1)
    want = torch.softmax(with_sink, dim=-1)[..., :6] @ values
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_lanes_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = call(1, [5003], (4, 2), dtype)
    whole = cpu.attend(inputs)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    query = cpu.grouped(inputs.query, 2)
    assert len(list(cpu._flash_folded(query, inputs.prefix[0], 0.3))) == 5  # 4 lanes, and 3 keys left over
    torch.testing.assert_close(cpu.attend(inputs), whole, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_of_keys_change_nothing(softcap: float | None) -> None:
    """Long enough for several blocks of matrix products, masked from the left by a window."""
    inputs = call(300, [700, 600], (16, 1))
    spec = replace(inputs.spec, softcap=softcap, window=900)
    inputs = replace(inputs, spec=spec)
    want = reference.attend(inputs)
    torch.testing.assert_close(cpu.attend(inputs), want, rtol=0, atol=1e-14)
    query, mask = cpu.grouped(inputs.query, 1), torch.ones(300, 700, dtype=torch.bool)
    blocks = list(cpu.matmul(query, inputs.prefix[0], spec, mask))
    assert len(blocks) == 2


def test_many_runs_are_merged_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = call(3, [7] * 50, (4, 2))
    most = 0

    def counted(parts: list[Part], sinks: Tensor | None = None) -> Part:
        nonlocal most
        most = max(most, len(parts))
        return merge(parts, sinks)

    monkeypatch.setattr(cpu, "merge", counted)
    torch.testing.assert_close(cpu.attend(inputs), reference.attend(inputs), rtol=0, atol=1e-14)
    assert 1 < most <= 16


def test_a_row_that_sees_nothing_gives_zero() -> None:
    inputs = call(4, [], (4, 2))
    mask = torch.eye(4, dtype=torch.bool)
    mask[2] = False
    inputs = replace(inputs, mask=mask)
    for backend in (cpu, reference):
        out = backend.attend(inputs)
        assert torch.equal(out[2], torch.zeros(4, 16, dtype=torch.float64))
        assert torch.equal(out[3, 0], inputs.tree[1][3, 0])
        sinks = replace(inputs, spec=AttentionSpec(0.3, sinks=randn(4)))
        assert torch.equal(backend.attend(sinks)[2], out[2])


def test_a_row_outside_its_own_window_gives_zero() -> None:
    """Positions that lie far behind the prefix: nothing is read, and the kernel is not called without keys."""
    inputs = call(1, [40], (4, 2))
    inputs = replace(inputs, tree=None, spec=AttentionSpec(0.3, window=8), positions=[900])
    for backend in (cpu, reference):
        assert torch.equal(backend.attend(inputs), torch.zeros(1, 4, 16, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_blocks_of_the_kernel_may_be_masked(dtype: torch.dtype) -> None:
    """The kernel walks 512 keys at a time; here some rows see nothing in the first of them."""
    inputs = call(900, [1300], (2, 1), dtype)
    inputs = replace(inputs, spec=AttentionSpec(0.3, window=1000))
    atol = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(cpu.attend(inputs), reference.attend(inputs), rtol=0, atol=atol)


def test_rows_choose_the_way_in_fp32_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    for name in ("matmul", "_flash_folded"):
        way = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *args, name=name, way=way: (ways.append(name), way(*args))[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for rows in (1, 11, 12, 95, 96):
            cpu.attend(call(rows, [600], (4, 2), dtype))
    plain, short = ["_flash_folded"] * 5, ["_flash_folded", "_flash_folded", "matmul", "matmul", "_flash_folded"]
    assert ways == plain + short + plain


@pytest.mark.parametrize("window", [None, 150])
def test_the_cuts_between_runs_do_not_matter(window: int | None) -> None:
    """Runs of any length, none at all included: zero keys would kill the kernel, and the process with it."""
    inputs = call(9, [400], (4, 2))
    inputs = replace(inputs, spec=AttentionSpec(0.3, window=window))
    cuts = [0, 0, 1, 40, 40, 40, 255, 256, 399, 400]
    keys, values = inputs.prefix[0]
    runs = [(keys[a:b], values[a:b]) for a, b in zip([0, *cuts], [*cuts, 400])]
    for backend in (cpu, reference):
        got = backend.attend(replace(inputs, prefix=runs))
        torch.testing.assert_close(got, reference.attend(inputs), rtol=0, atol=1e-14)


def test_layouts_do_not_matter() -> None:
    """The kernel answers NaN, in silence, where the last dimension is not contiguous."""

    def strange(x: Tensor) -> Tensor:
        return x.transpose(0, 2).contiguous().transpose(0, 2)

    inputs = call(9, [300, 20], (4, 2))
    runs = [tuple(map(strange, run)) for run in inputs.prefix]
    tree = tuple(map(strange, inputs.tree))
    other = replace(inputs, query=strange(inputs.query), prefix=runs, tree=tree)
    torch.testing.assert_close(cpu.attend(other), cpu.attend(inputs), rtol=0, atol=1e-14)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_outside_every_window_are_not_read(softcap: float | None) -> None:
    inputs = call(17, [100, 500], (4, 2))
    inputs = replace(inputs, spec=AttentionSpec(0.3, window=50, softcap=softcap))
    want = reference.attend(inputs)
    for x in (*inputs.prefix[0], *(x[: 500 - 50 + 1] for x in inputs.prefix[1])):
        x.fill_(float("nan"))
    torch.testing.assert_close(cpu.attend(inputs), want, rtol=0, atol=1e-14)
