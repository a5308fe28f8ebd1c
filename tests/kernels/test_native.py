"""The native attention backend's values, masks and layouts; `test_native_attention` asks for equal bits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longgraft.kernels import native, reference, rows_linear
from longgraft.kernels.spec import AttentionSpec, TreeInput
from tests.kernels.attention_cases import Case, check, make, oracle
from tests.kernels.test_native_attention import DTYPES, KINDS, Text, grow, text

pytestmark = pytest.mark.skipif(
    not rows_linear.is_available(), reason="the native module is not built or not for this processor"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The right values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 63, 255, 256, 257, 1541])
def test_sizes(dtype: torch.dtype, prefix: int) -> None:
    for rows, tree in ((1, "chain"), (2, "chain"), (17, "bushy"), (64, "star"), (65, "chain")):
        if prefix < 1541 or rows in (1, 17, 65):
            check(Case(rows, prefix, kv_heads=1, group=2, tree=tree, dtype=dtype), "native")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_heads, group", [(3, 1), (2, 2), (1, 4), (2, 7)])
def test_heads(dtype: torch.dtype, dim: int, kv_heads: int, group: int) -> None:
    check(Case(9, 300, kv_heads, group, dim, dtype=dtype), "native")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", ["chain", "bushy", "star"])
@pytest.mark.parametrize("window", [1, 3, 40, 200, 700, 5000])
def test_windows(dtype: torch.dtype, tree: str, window: int) -> None:
    check(Case(13, 600, 1, 2, tree=tree, window=window, dtype=dtype), "native")
    check(Case(33, 20, 1, 2, tree=tree, window=window, dtype=dtype), "native")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("softcap, sinks", [(None, True), (1.5, False), (30.0, True)])
def test_sinks_and_softcap(dtype: torch.dtype, window: int | None, softcap: float | None, sinks: bool) -> None:
    case = Case(17, 600, 1, 3, window=window, softcap=softcap, sinks=sinks, dtype=dtype)
    check(case, "native")
    check(replace(case, rows=1, tree="chain"), "native")
    check(replace(case, prefix=0, tree="chain"), "native")


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("value_dim", [7, 40, 100])
def test_values_of_another_size(softcap: float | None, value_dim: int) -> None:
    call = make(Case(9, 300, dim=64, value_dim=value_dim, softcap=softcap, window=100))
    torch.testing.assert_close(call.attend("native").double(), oracle(call), rtol=0, atol=2e-6)


def test_large_logits_and_their_ends() -> None:
    """Weights from 1 down to nothing: logits of +-300, and softcap where tanh is 1."""
    case = text(130, grow(9), torch.float32)
    for spec in (AttentionSpec(20.0), AttentionSpec(20.0, softcap=50.0), AttentionSpec(1e-6, softcap=50.0)):
        positions = [130 + depth for depth in case.depths]
        tree = (case.tree_keys, case.tree_values)
        inputs = TreeInput(case.query, [(case.keys, case.values)], tree, spec, case.mask, positions)
        wide = TreeInput(
            case.query.double(),
            [(case.keys.double(), case.values.double())],
            (case.tree_keys.double(), case.tree_values.double()),
            spec,
            case.mask,
            positions,
        )
        torch.testing.assert_close(native.attend(inputs).double(), reference.attend(wide), rtol=0, atol=4e-4)


# Masks, layouts, company ------------------------------------------------------------------------------------------


def test_any_mask_will_do() -> None:
    """Rows that see nothing, not themselves, or later rows: no tree has them, the function takes them."""
    case, rng = text(70, grow(90), torch.float32), torch.Generator().manual_seed(3)
    mask = torch.rand(90, 90, generator=rng) < 0.3
    inputs = TreeInput(
        case.query, [(case.keys, case.values)], (case.tree_keys, case.tree_values), KINDS["plain"], mask, range(70, 160)
    )
    torch.testing.assert_close(native.attend(inputs), reference.attend(inputs), rtol=0, atol=2e-6)
    mask[5], mask[88] = False, False
    for sinks in (None, torch.ones(6)):
        bare = replace(inputs, prefix=[], spec=AttentionSpec(0.2, sinks=sinks), mask=mask)
        got = native.attend(bare)
        torch.testing.assert_close(got, reference.attend(bare), rtol=0, atol=2e-6)
        assert torch.equal(got[[5, 88]], torch.zeros(2, 6, 32))


def test_windows_go_by_the_positions_given() -> None:
    case = text(70, grow(12), torch.float32)
    positions = [70 + 9 * i for i in range(12)]
    inputs = TreeInput(
        case.query,
        [(case.keys, case.values)],
        (case.tree_keys, case.tree_values),
        KINDS["window"],
        case.mask,
        positions,
    )
    torch.testing.assert_close(native.attend(inputs), reference.attend(inputs), rtol=0, atol=2e-6)
    far = replace(inputs, positions=torch.tensor([900] * 12), spec=KINDS["narrow"])
    torch.testing.assert_close(native.attend(far), reference.attend(far), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_do_not_matter(dtype: torch.dtype) -> None:
    def strange(x: Tensor) -> Tensor:
        return x.transpose(0, 2).contiguous().transpose(0, 2)

    case = text(300, grow(9), dtype)
    other = Text(
        *(strange(x) for x in (case.keys, case.values, case.query, case.tree_keys, case.tree_values)), case.parents
    )
    assert torch.equal(other.together(KINDS["plain"]), case.together(KINDS["plain"]))
    backwards = case.mask.T.contiguous().T
    tree = (case.tree_keys, case.tree_values)
    inputs = TreeInput(case.query, [(case.keys, case.values)], tree, KINDS["plain"], backwards, [300] * 9)
    assert torch.equal(native.attend(inputs), case.together(KINDS["plain"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "window"])
def test_what_a_row_does_not_see_cannot_touch_it(kind: str, dtype: torch.dtype) -> None:
    case = text(190, grow(40), dtype)
    clean = case.together(KINDS[kind])
    for bad in (float("nan"), float("inf")):
        keys, values = case.tree_keys.clone(), case.tree_values.clone()
        keys[7], values[7] = bad, bad
        got = replace(case, tree_keys=keys, tree_values=values).together(KINDS[kind])
        away = ~case.mask[:, 7]
        assert torch.equal(got[away], clean[away])
        assert got[~away].isnan().all()
    hidden = replace(case, keys=case.keys.clone(), values=case.values.clone())
    hidden.keys[: 190 - 69], hidden.values[: 190 - 69] = torch.nan, torch.nan
    assert torch.equal(hidden.together(KINDS["window"]), case.together(KINDS["window"]))


def test_it_says_why_it_cannot() -> None:
    case = text(5, [-1], torch.float32)
    inputs = TreeInput(
        case.query, [(case.keys, case.values)], (case.tree_keys, case.tree_values), KINDS["plain"], None, [5]
    )
    assert native.why_not(inputs) == ""
    assert "gradients" in native.why_not(replace(inputs, query=case.query.clone().requires_grad_()))
    wide = TreeInput(
        case.query.double(), [], (case.tree_keys.double(), case.tree_values.double()), KINDS["plain"], None, [0]
    )
    assert "float64" in native.why_not(wide)
    meta = torch.zeros(1, 2, 8, device="meta")
    assert "meta" in native.why_not(TreeInput(meta, [], (meta, meta), KINDS["plain"], None, [0]))
