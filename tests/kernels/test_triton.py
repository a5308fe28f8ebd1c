"""The Triton kernels in Triton's interpreter, against a float64 oracle. Its compiler: `test_triton_compile`."""

import random
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from torch import Tensor

from longgraft.kernels import first_use, parts, reference, triton_plan
from longgraft.kernels.spec import AttentionSpec, TreeInput
from longgraft.kernels.tree_attention import tree_attention
from longgraft.sampler import SamplingParams
from tests.engines import engine_for, model_of, prompt_of
from tests.kernels.attention_cases import Case, assert_close, make

backend = pytest.importorskip("longgraft.kernels.triton", reason="triton is not installed", exc_type=ImportError)
# What Triton 3.6's interpreter does to numpy before 2.4, where it became an error.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 17, 63, 64, 65, 255, 256, 257, 1541)
OLD = metadata.version("triton") < "3.9" and tuple(map(int, metadata.version("numpy").split(".")[:2])) >= (2, 4)
interpreted = pytest.mark.skipif(
    not backend.INTERPRETED or OLD, reason="a GPU is there, or numpy is too new for this triton's interpreter"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(case: Case) -> None:
    inputs = make(case).inputs
    assert_close(case, backend.attend(inputs))
    if case.tree == "chain":
        assert_close(case, backend.attend(replace(inputs, mask=None)))


@interpreted
@pytest.mark.parametrize(
    "rows, prefix, tree, dtype",
    [
        (1, 0, "chain", torch.float32),
        (1, 1541, "chain", torch.bfloat16),
        (17, 1, "bushy", torch.float16),
        (17, 257, "bushy", torch.float32),
        (63, 63, "star", torch.float32),
        (64, 64, "chain", torch.bfloat16),
        (65, 255, "bushy", torch.float32),
        (17, 256, "chain", torch.float32),
        (257, 1, "bushy", torch.float16),
    ],
    ids=str,
)
def test_sizes(rows: int, prefix: int, tree: str, dtype: torch.dtype) -> None:
    check(Case(rows, prefix, 1, 2, tree=tree, dtype=dtype))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("prefix", [0, *SIZES])
@pytest.mark.parametrize("rows", SIZES)
def test_all_sizes(rows: int, prefix: int) -> None:
    """Every size meets every dtype and every tree, not every pair of sizes all of them."""
    for i, tree in enumerate(("chain", "bushy", "star")):
        if rows < 1541 or (tree == "chain" and prefix in (0, 1541)):
            dtype = DTYPES[(i + SIZES.index(rows) + [0, *SIZES].index(prefix)) % 3]
            check(Case(rows, prefix, 1, 2, tree=tree, dtype=dtype))


@interpreted
@pytest.mark.parametrize("dim, group", [(64, 1), (80, 5), (96, 8), (128, 3), (256, 2)])
def test_heads(dim: int, group: int) -> None:
    check(Case(9, 70, 2, group, dim, dtype=torch.bfloat16 if group % 2 else torch.float32))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 9))
def test_all_heads(dim: int, group: int, dtype: torch.dtype) -> None:
    check(Case(17, 300, 2, group, dim, dtype=dtype))
    check(Case(5, 0, 3, group, dim, tree="chain", dtype=dtype))


@interpreted
@pytest.mark.parametrize("window", [1, 3, 40, 255])
def test_windows(window: int) -> None:
    """Smaller than the tree is deep, than a block, than a chunk."""
    check(Case(13, 300, 1, 2, tree="chain" if window == 3 else "bushy", window=window, sinks=window == 40))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain", "bushy", "star"])
@pytest.mark.parametrize("window", [1, 3, 40, 64, 200, 255, 256, 257, 700, 5000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
def test_all_layer_kinds(window: int, tree: str, sinks: bool, softcap: float | None) -> None:
    for dtype, rows, prefix in zip(DTYPES, (13, 33, 1), (600, 20, 257)):
        check(Case(rows, prefix, 1, 2, tree=tree, window=window, sinks=sinks, softcap=softcap, dtype=dtype))


@interpreted
@pytest.mark.parametrize("softcap", [0.7, 30.0])
def test_softcap_and_sinks(softcap: float) -> None:
    check(Case(9, 20, 1, 3, softcap=softcap, sinks=True))
    check(Case(9, 300, 1, 3, 64, 40, softcap=softcap, sinks=True, dtype=torch.float16))


@interpreted
def test_rows_outside_every_window_are_not_read() -> None:
    inputs = make(Case(5, 300, 1, 1, window=50)).inputs
    want = reference.attend(inputs)
    for tensor in (*inputs.prefix[0], *(x[:-45] for x in inputs.prefix[1] if x.shape[0] > 45)):
        tensor[: max(0, 300 - 50 + 1)].fill_(float("nan"))
    torch.testing.assert_close(backend.attend(inputs), want, rtol=0, atol=1e-6)


@interpreted
def test_rows_that_see_nothing_give_zero() -> None:
    inputs = make(Case(4, 0, 1, 2)).inputs
    mask = torch.eye(4, dtype=torch.bool)
    mask[2] = False
    for sinks in (None, torch.tensor([1e4, -1e4])):
        out = backend.attend(replace(inputs, mask=mask, spec=AttentionSpec(0.3, sinks=sinks)))
        assert torch.equal(out[2], torch.zeros(2, 64))
    far = replace(make(Case(1, 40, 1, 2)).inputs, tree=None, mask=None, positions=[900], spec=AttentionSpec(0.3, 8))
    assert torch.equal(backend.attend(far), torch.zeros(1, 2, 64))
    out, lse = backend.partial(replace(inputs, mask=mask))
    assert (out.shape, out.dtype, lse.shape) == ((2, 4, 64), torch.float32, (2, 4))
    assert lse[:, 2].tolist() == [float("-inf")] * 2 and lse[:, [0, 1, 3]].isfinite().all()


@interpreted
def test_large_logits_do_not_overflow() -> None:
    inputs = make(Case(5, 70, 1, 2)).inputs
    for scale in (30.0, 1e4):
        sharp = replace(inputs, spec=AttentionSpec(scale))
        torch.testing.assert_close(backend.attend(sharp), reference.attend(sharp), rtol=0, atol=2e-2)


@interpreted
def test_parts_merge_with_those_of_others() -> None:
    """lse is natural: the prefix by this backend and the tree by matrix products are one softmax."""
    inputs = make(Case(9, 300, 2, 3, sinks=True)).inputs
    assert inputs.tree is not None
    far, _ = inputs.prefix[0], inputs.prefix[1:]
    rest = backend.partial(replace(inputs, prefix=inputs.prefix[1:]))
    query = parts.grouped(inputs.query, 2)
    out, _ = parts.merge([rest, *parts.matmul(query, far, inputs.spec, None)], inputs.spec.sinks)
    torch.testing.assert_close(out.transpose(0, 1), reference.attend(inputs), rtol=0, atol=1e-6)


@interpreted
def test_cuts_and_layouts_do_not_matter() -> None:
    """Runs of any length, none at all included, in one allocation or many, whatever their strides."""
    inputs = make(Case(5, 256, 2, 2)).inputs
    want = reference.attend(inputs)
    keys, values = inputs.prefix[0]
    cuts = [0, 0, 1, 40, 40, 255]
    runs = [(keys[a:b], values[a:b]) for a, b in zip([0, *cuts], [*cuts, 256])]
    scattered = [(k.clone(), v.clone()) for k, v in runs]
    strange = [(k.transpose(0, 2).contiguous().transpose(0, 2), v) for k, v in runs]
    for prefix in (runs, scattered, strange, [runs[-1], *runs[:-1]]):
        got = backend.attend(replace(inputs, prefix=prefix))
        expected = want if prefix[-1][0].shape[0] == 1 else reference.attend(replace(inputs, prefix=prefix))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    query = inputs.query.transpose(0, 2).contiguous().transpose(0, 2)
    torch.testing.assert_close(backend.attend(replace(inputs, query=query)), want, rtol=0, atol=1e-6)


@interpreted
def test_one_plan_serves_every_layer() -> None:
    first, second = (make(Case(17, 300, kv_heads=2, group=2)).inputs for _ in range(2))
    shift = [(k + 1.0, v * 2.0) for k, v in second.prefix]
    for (k, v), (new_k, new_v) in zip(second.prefix, shift):
        k.copy_(new_k)
        v.copy_(new_v)
    plan = triton_plan.make_plan(first)
    torch.testing.assert_close(backend.attend_planned(second, plan), reference.attend(second), rtol=0, atol=2e-6)
    others = (Case(17, 300, 2, 2, window=9), Case(16, 300, 2, 2), Case(17, 299, 2, 2), Case(17, 300, 4, 2))
    kinds = [triton_plan.kind_of(inputs) for inputs in (first, second, *(make(other).inputs for other in others))]
    assert kinds[0] == kinds[1] and len(set(kinds)) == 5


@interpreted
def test_layers_of_one_forward_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TreeInput] = []
    plan = backend.make_plan
    monkeypatch.setattr(backend, "make_plan", lambda inputs: (made.append(inputs), plan(inputs))[1])
    monkeypatch.setattr(backend, "why_not", lambda inputs: "")
    memo: dict[object, object] = {}
    for window in (None, 40, None, 40):
        inputs = make(Case(5, 70, 1, 2, window=window)).inputs
        args = (inputs.query, inputs.prefix, *inputs.tree, inputs.spec, inputs.mask, inputs.positions)
        got = tree_attention(*args, "triton", memo)
        torch.testing.assert_close(got, reference.attend(inputs), rtol=0, atol=2e-6)
    assert [inputs.spec.window for inputs in made] == [None, 40]


def test_the_table_names_every_row_once() -> None:
    pool = torch.arange(6 * 256 * 2.0).reshape(6 * 256, 1, 2)
    runs = [(pool[512:1024], pool[512:1024]), (pool[0:0], pool[0:0]), (pool[0:301], pool[0:301])]
    for first in (0, 3, 256, 600, 812, 813):
        table, align = triton_plan.piece_table(runs, first)
        rows, at = [], []
        for key, value, position, count in table.tolist():
            assert key == value and key % align == 0 and 0 < count <= 256
            rows += [512 + key // 2 + i for i in range(count)]
            at += range(position, position + count)
        assert rows == [*range(512, 1024), *range(301)][first:]
        assert at == list(range(first, 813))
    assert triton_plan.piece_table([(pool[:, :, :1], pool[:, :, :1])], 0)[1] == 16
    assert triton_plan.piece_table([(pool[0:3], pool[0:3]), (pool[4:9], pool[4:9])], 0)[1] == 8


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 100])
def test_ancestor_words(rows: int) -> None:
    rng = random.Random(rows)
    mask = torch.tensor([[rng.random() < 0.5 for _ in range(rows)] for _ in range(rows)])
    mask[:, -1] = True  # the sign bit, where rows are a multiple of 32
    words = triton_plan.ancestor_words(mask)
    assert words.dtype == torch.int32 and words.shape == (rows, -(-rows // 32))
    seen = [[(word >> (j % 32)) & 1 for j in range(rows) for word in [int(row[j // 32])]] for row in words]
    assert seen == mask.int().tolist()


def test_splits_cover_the_keys_and_follow_the_sizes_alone() -> None:
    inputs = make(Case(17, 0, 2, 3, dtype=torch.bfloat16)).inputs
    for blocks in (1, 4, 5, 25, 2048):
        for programs in (1, 8, 264):
            cut = backend.tiles(inputs, blocks, programs)
            assert cut.splits * cut.split_blocks >= blocks > (cut.splits - 1) * cut.split_blocks
            assert 256 % cut.block_keys == 0 and cut.splits <= max(1, programs)
    assert backend.tiles(inputs, 2048, 264).splits == 128


@interpreted
def test_by_name_it_is_checked_before_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(Case(3, 20, 1, 2)).inputs
    assert inputs.tree is not None
    args = (inputs.query, inputs.prefix, *inputs.tree, inputs.spec, inputs.mask, inputs.positions)
    torch.testing.assert_close(tree_attention(*args, "triton"), reference.attend(inputs), rtol=0, atol=1e-6)
    hits = first_use.fault.cache_info().hits
    tree_attention(*args, "triton")
    assert first_use.fault.cache_info().hits == hits + 1
    monkeypatch.setattr(backend, "attend", lambda inputs: reference.attend(inputs) * 1.01)
    with pytest.raises(ValueError, match=r"triton: its check before first use on cpu found it .* from `reference`"):
        tree_attention(*args, "triton")


@interpreted
def test_it_says_what_it_cannot_take() -> None:
    def why(query: Tensor) -> str:
        keys = query.detach()
        return backend.why_not(TreeInput(query, [], (keys, keys), AttentionSpec(1.0), None, range(len(query))))

    assert "float64 is not one of" in why(torch.zeros(2, 2, 8, dtype=torch.float64))
    assert "head sizes are 300 and 300, it takes up to 256" in why(torch.zeros(2, 2, 300))
    assert "no gradients" in why(torch.zeros(2, 2, 8, requires_grad=True))
    assert "on meta, it needs the CPU" in why(torch.zeros(2, 2, 8, device="meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, prefix", [(1, 0), (1, 1541), (17, 257), (64, 20000), (65, 255), (1541, 1541)])
@pytest.mark.parametrize("dim, window, softcap", [(64, None, None), (128, 200, 30.0), (80, 3, None), (256, None, None)])
def test_on_a_gpu(
    rows: int, prefix: int, dim: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    inputs = make(Case(rows, prefix, 2, 4, dim, window=window, softcap=softcap, sinks=True, dtype=dtype)).inputs
    assert inputs.tree is not None and inputs.mask is not None and inputs.spec.sinks is not None
    prefix_runs = [(k.cuda(), v.cuda()) for k, v in inputs.prefix]
    tree, spec = tuple(x.cuda() for x in inputs.tree), replace(inputs.spec, sinks=inputs.spec.sinks.cuda())
    args = (inputs.query.cuda(), prefix_runs, *tree, spec, inputs.mask.cuda(), inputs.positions)
    got, want = (tree_attention(*args, name).float() for name in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=0, atol=max(8 * torch.finfo(dtype).eps, 1e-5))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss"])
def test_a_whole_engine_gives_the_same_tokens(arch: str) -> None:
    """Full and sliding layers, softcaps, sinks; chunks of the prompt, bushy trees, plain rounds."""
    model, prompt = model_of(arch, torch.float32), prompt_of(40, arch=arch)
    params = SamplingParams(max_new_tokens=8)
    plain = engine_for(arch, model=model, backend="cpu", policy="plain").generate(prompt, params)
    truth = prompt + list(plain.token_ids)
    for source in ("right", "random"):
        engine = engine_for(arch, model=model, backend="triton", source=source, truth=truth)
        assert engine.generate(prompt, params).token_ids == plain.token_ids
