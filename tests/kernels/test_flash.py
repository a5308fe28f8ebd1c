"""The flash backend with stand-ins for its libraries: pages, folding, log-sum-exps, and everything left to others."""

import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longgraft.kernels import flash, flash_calls, reference
from longgraft.kernels.spec import AttentionSpec, TreeInput
from longgraft.kernels.tree_attention import tree_attention
from tests.kernels import flash_fakes
from tests.kernels.attention_cases import Case, make

NAMES = ("flash-attn 2", "flash-attn 4", "torch's varlen_attn")
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No library, no Triton, no memory of either; what fakes were asked is forgotten."""
    for name in ("flash_attn", "flash_attn.cute", "torch.nn.attention.varlen", "longgraft.kernels.triton"):
        monkeypatch.setitem(sys.modules, name, None)
    no_version(monkeypatch)
    flash_calls.provider.cache_clear()
    flash_fakes.calls.clear()
    yield
    flash_calls.provider.cache_clear()


def no_version(monkeypatch: pytest.MonkeyPatch, found: str | None = None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(flash_calls, "version", version)


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = flash_fakes
    if name == "flash-attn 2":
        made = fakes.module("flash_attn", flash_attn_with_kvcache=fakes.flash_attn_with_kvcache)
        monkeypatch.setitem(sys.modules, "flash_attn", made)
    elif name == "flash-attn 4":
        made = fakes.module("flash_attn.cute", flash_attn_varlen_func=fakes.flash_attn_varlen_func)
        monkeypatch.setitem(sys.modules, "flash_attn", fakes.module("flash_attn", cute=made))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", made)
        no_version(monkeypatch, "4.0.0b36")
    else:
        made = fakes.module("varlen", varlen_attn=fakes.varlen_attn, AuxRequest=fakes.AuxRequest)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", made)
    flash_calls.provider.cache_clear()


def pooled(case: Case, order: list[int]) -> TreeInput:
    """The case's prefix in chunks of one pool, in this order; every other row of the pool is NaN."""
    inputs = make(case).inputs
    pages = -(-case.prefix // 256)
    assert len(order) == pages
    if not pages:
        return inputs
    whole = [torch.cat([run[side] for run in inputs.prefix]) for side in (0, 1)]
    pools = [torch.full((max(order) * 256 + 512, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in whole]
    spans: list[list[int]] = []
    for i, page in enumerate(order):
        rows = slice(i * 256, min(i * 256 + 256, case.prefix))
        size = rows.stop - rows.start
        for pool, rows_of in zip(pools, whole):
            pool[page * 256 : page * 256 + size] = rows_of[rows]
        if spans and spans[-1][1] == page * 256:
            spans[-1][1] += size
        else:
            spans.append([page * 256, page * 256 + size])
    runs = [(pools[0][a:b], pools[1][a:b]) for a, b in spans]
    return replace(inputs, prefix=runs)


def assert_right(inputs: TreeInput) -> None:
    got, want = flash.attend(inputs), reference.attend(inputs)
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=8 * torch.finfo(got.dtype).eps)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", [0, 1, 255, 256, 257, 1541])
@pytest.mark.parametrize("rows", [1, 17, 65])
def test_sizes(name: str, rows: int, prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(name, monkeypatch)
    dtype = torch.float16 if rows == 17 else torch.bfloat16
    order = [4, 5, 1, 9, 2, 3, 7][: -(-prefix // 256)]
    assert_right(pooled(Case(rows, prefix, 2, 3, dtype=dtype), order))
    assert flash_fakes.calls == [name] * (prefix in (256, 257, 1541))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [1, 3, 40, 255, 256, 300, 513, 900, 5000])
def test_windows_and_sinks(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gets whole pages inside every row's window, others the edge."""
    install(name, monkeypatch)
    case = Case(13, 1541, 1, 2, window=window, sinks=True, dtype=torch.float16)
    assert_right(pooled(case, [4, 5, 1, 9, 2, 3, 7]))
    assert flash_fakes.calls == [name] * (window >= 300)


@pytest.mark.parametrize("name", NAMES[:2])
def test_softcap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(name, monkeypatch)
    assert_right(pooled(Case(5, 600, 2, 2, softcap=3.0, sinks=True, dtype=torch.float16), [2, 0, 1]))
    assert flash_fakes.calls == [name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim, group", [(64, 1), (80, 2), (96, 7), (128, 8), (256, 3)])
def test_heads(name: str, dim: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as heads too: [heads, rows] and [rows, heads] are then one shape."""
    install(name, monkeypatch)
    assert_right(pooled(Case(2, 300, 2 * group, group, dim, dtype=torch.bfloat16), [1, 0]))
    assert flash_fakes.calls == [name]


@pytest.mark.parametrize("name", NAMES)
def test_plain_decoding_has_no_tree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(name, monkeypatch)
    for prefix, pages in ((256, [3]), (300, [3, 1]), (40, [0])):
        for window in (None, 20, 280):
            case = Case(1, prefix, 2, 2, window=window, dtype=torch.float16)
            inputs = replace(pooled(case, pages), tree=None, mask=None, positions=[prefix - 1])
            assert_right(inputs)


def test_lanes_of_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    install("flash-attn 4", monkeypatch)
    assert_right(pooled(Case(3, 70 * 256 + 5, 1, 2, 64, dtype=torch.float16), [*range(70, 0, -1), 71]))
    for pages in (1, 31, 32, 33, 63, 64, 65, 512):
        lanes = flash_calls._lanes(torch.arange(pages, dtype=torch.int32)[None])
        assert lanes[lanes >= 0].tolist() == list(range(pages)) and len(lanes) <= 32
        assert (lanes[:, 0] >= 0).all() and lanes.dtype == torch.int32


def test_infinities_and_layouts_of_lse() -> None:
    query = torch.zeros(4, 3, 8)
    lse = torch.tensor([[1.0, float("inf"), float("-inf"), 2.0]] * 3)
    want = torch.tensor([[1.0, float("-inf"), float("-inf"), 2.0]] * 3)
    assert torch.equal(flash_calls._natural(lse, query), want)
    assert torch.equal(flash_calls._natural(lse.T, query), want)
    assert flash_calls._natural(lse.double(), query).dtype == torch.float32


def test_runs_that_are_not_pages_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    install("flash-attn 2", monkeypatch)
    pool, other = (torch.randn(2048, 1, 16, generator=torch.Generator().manual_seed(i)).half() for i in (1, 2))
    ragged = [(pool[:100], other[:100]), (pool[512:1024], other[512:1024])]
    crooked = [(pool[:256], other[:256]), (pool[500:800], other[500:800])]
    unlike = [(pool[:256], other[:256]), (pool[512:800], other[768:1056])]
    apart = [(pool[:256], other[:256]), (other[512:800], pool[512:800])]
    inputs = make(Case(3, 0, 1, 2, 16, dtype=torch.float16)).inputs
    for prefix in (ragged, crooked, unlike, apart):
        length = sum(len(keys) for keys, _ in prefix)
        assert flash.in_pages(prefix, 0, length // 256 * 256) is None
        assert_right(replace(inputs, prefix=prefix, positions=[length + i for i in range(3)]))
    assert flash_fakes.calls == []
    pages = flash.in_pages(
        [(pool[1024:1536], other[1024:1536]), (pool[:0], other[:0]), (pool[256:500], other[256:500])], 0, 512
    )
    assert pages is not None and pages.table.tolist() == [[3, 4]]


@pytest.mark.parametrize("first", [0, 256, 1024])
def test_pages_never_reach_behind_the_pool(first: int) -> None:
    """The pool ends right behind the last full page of the highest run."""
    pool = torch.zeros(1280 + 44, 1, 8)
    prefix = [(pool[1024:1280], pool[1024:1280]), (pool[256:512], pool[256:512]), (pool[1280:], pool[1280:])]
    if first:
        prefix = prefix[1:]
    length = sum(len(keys) for keys, _ in prefix)
    pages = flash.in_pages(prefix, 0, length // 256 * 256)
    assert pages is not None
    assert pages.keys.storage_offset() + pages.keys.numel() <= pool.numel()


def test_triton_takes_the_rest_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    install("flash-attn 2", monkeypatch)
    asked: list[int] = []

    def partial(inputs: TreeInput) -> tuple[Tensor, Tensor]:
        asked.append(inputs.prefix_len)
        query = flash.grouped(inputs.query, inputs.kv_heads)
        keys, values = (torch.cat(side) for side in zip(*inputs.prefix, inputs.tree))
        return next(flash.matmul(query, (keys, values), inputs.spec, reference.visible(inputs)))

    fake = flash_fakes.module("triton", partial=partial, why_not=lambda inputs: "")
    monkeypatch.setitem(sys.modules, "longgraft.kernels.triton", fake)
    assert_right(pooled(Case(9, 600, 2, 2, window=500, sinks=True, dtype=torch.float16), [2, 0, 1]))
    assert asked == [88] and flash_fakes.calls == ["flash-attn 2"]


def test_the_first_library_that_serves_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in reversed(NAMES):
        install(name, monkeypatch)
        found = flash_calls.provider(HOPPER)
        assert isinstance(found, flash_calls.Provider)
        if name != "flash-attn 4":  # the two share a package; each stand-in replaces the other's
            assert found.name == name


def test_reasons_name_every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = flash_calls.provider(HOPPER)
    assert isinstance(reason, str)
    for words in ("flash-attn 2 cannot be imported", "flash-attn 4 is not installed", "no torch.nn.attention.varlen"):
        assert words in reason
    install("flash-attn 4", monkeypatch)
    for capability in ((8, 0), (12, 0)):
        assert f"this is {capability[0]}.{capability[1]}" in str(flash_calls.provider(capability))
    no_version(monkeypatch, "5.1")
    flash_calls.provider.cache_clear()
    assert "flash-attn-4 is 5.1: expected 4" in str(flash_calls.provider(HOPPER))
    old = flash_fakes.module("varlen", varlen_attn=lambda query, key, value, cu_seq_q: None, AuxRequest=None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", old)
    flash_calls.provider.cache_clear()
    assert "varlen_attn lacks block_table, return_aux, scale, seqused_k" in str(flash_calls.provider(HOPPER))
    old = flash_fakes.module("flash_attn", flash_attn_with_kvcache=lambda q, k_cache, v_cache, block_table: None)
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    flash_calls.provider.cache_clear()
    assert "lacks return_softmax_lse, softcap: expected 2.6" in str(flash_calls.provider(HOPPER))


def test_it_says_what_it_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(dim: int = 64, value_dim: int = 64, dtype: torch.dtype = torch.bfloat16, spec: object = None) -> str:
        query, keys, values = (torch.zeros(2, 2, size, dtype=dtype) for size in (dim, dim, value_dim))
        monkeypatch.setattr(Tensor, "device", torch.device("cuda:0"), raising=False)
        inputs = TreeInput(query, [], (keys, values), spec or AttentionSpec(1.0), None, [0, 1])
        return flash.why_not(inputs)

    with pytest.raises(ValueError, match="flash: tensors are on cpu, it needs a CUDA device"):
        keys = torch.zeros(2, 2, 64)
        tree_attention(keys, [], keys, keys, AttentionSpec(1.0), None, [0, 1], "flash")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    monkeypatch.setattr(flash, "fault", lambda attend, device, dtype, dims: "")
    assert "float32 is not one of" in why(dtype=torch.float32)
    for dim, value_dim in ((64, 32), (20, 20), (264, 264)):
        assert f"head sizes are {dim} and {value_dim}, it needs one, a multiple of 8" in why(dim, value_dim)
    assert why().endswith("pip install 'longgraft[flash]'")
    install("torch's varlen_attn", monkeypatch)
    assert why() == ""
    assert why(spec=AttentionSpec(1.0, softcap=2.0)) == "torch's varlen_attn has no softcap"


def test_installed_torch_has_the_signature_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the real signature, whichever torch this is."""
    monkeypatch.delitem(sys.modules, "torch.nn.attention.varlen")
    found = flash_calls._torch_varlen(HOPPER)
    assert found.name == NAMES[2] if isinstance(found, flash_calls.Provider) else "torch" in found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, prefix, window", [(1, 256, None), (17, 1541, None), (17, 1541, 700), (64, 20000, None)])
def test_on_a_gpu(
    rows: int, prefix: int, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real libraries
    flash_calls.provider.cache_clear()
    found = flash_calls.provider(torch.cuda.get_device_capability())
    if isinstance(found, str):
        pytest.skip(found)
    inputs = pooled(Case(rows, prefix, 2, 4, 128, window=window, dtype=dtype), list(range(-(-prefix // 256)))[::-1])
    assert inputs.tree is not None and inputs.mask is not None
    prefix_runs = list(zip(*(_moved(side) for side in zip(*inputs.prefix))))
    args = (inputs.query.cuda(), prefix_runs, *(x.cuda() for x in inputs.tree), inputs.spec, inputs.mask.cuda())
    got, want = (tree_attention(*args, inputs.positions, name).float() for name in ("flash", "reference"))
    torch.testing.assert_close(got, want, rtol=0, atol=8 * torch.finfo(dtype).eps)


def _moved(views: tuple[Tensor, ...]) -> list[Tensor]:
    """Views of one pool as views of its copy on the GPU."""
    pool = views[0].as_strided((views[0].untyped_storage().nbytes() // views[0].element_size(),), (1,), 0).cuda()
    return [pool.as_strided(x.shape, x.stride(), x.storage_offset()) for x in views]
