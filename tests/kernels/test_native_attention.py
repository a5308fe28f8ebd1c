"""The native attention gives a row the same bits whatever surrounds it; `test_native` asks whether they are right."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longgraft.kernels import native, rows_linear
from longgraft.kernels.spec import AttentionSpec, Run, TreeInput

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BORDERS = (0, 1, 31, 32, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049)
ISAS = [name for name in ("avx512", "avx2") if name == rows_linear.KERNEL or rows_linear.KERNEL == "avx512"]
KINDS: dict[str, AttentionSpec] = {
    "plain": AttentionSpec(0.2),
    "window": AttentionSpec(0.2, window=70),
    "narrow": AttentionSpec(0.2, window=3),
    "softcap": AttentionSpec(0.2, softcap=1.5),
    "sinks": AttentionSpec(0.2, window=200, sinks=torch.linspace(-3, 3, 6)),
}

pytestmark = pytest.mark.skipif(
    not rows_linear.is_available(), reason="the native module is not built or not for this processor"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# What a text is, and two ways to compute it ---------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A committed prefix of P keys and a tree of T tokens behind it; `parents[0]` is -1."""

    keys: Tensor
    values: Tensor
    query: Tensor
    tree_keys: Tensor
    tree_values: Tensor
    parents: Sequence[int]

    @property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def mask(self) -> Tensor:
        mask = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def together(self, spec: AttentionSpec) -> Tensor:
        """Every node in one call, as verification does."""
        positions = [len(self.keys) + depth for depth in self.depths]
        tree = (self.tree_keys, self.tree_values)
        return native.attend(TreeInput(self.query, [(self.keys, self.values)], tree, spec, self.mask, positions))

    def alone(self, node: int, spec: AttentionSpec, rng: random.Random) -> Tensor:
        """One node as plain decoding does: ancestors in the prefix, which lies in pieces, and one row."""
        path = [i for i, on_path in enumerate(self.mask[node].tolist()) if on_path]
        keys = torch.cat([self.keys, self.tree_keys[path[:-1]]])
        values = torch.cat([self.values, self.tree_values[path[:-1]]])
        own = (self.tree_keys[node, None], self.tree_values[node, None])
        inputs = TreeInput(self.query[node, None], in_pieces(keys, values, rng), own, spec, None, [len(keys)])
        return native.attend(inputs)[0]


def in_pieces(keys: Tensor, values: Tensor, rng: random.Random) -> list[Run]:
    cuts = sorted(rng.randrange(len(keys) + 1) for _ in range(rng.randrange(4)))
    return [(keys[a:b].clone(), values[a:b].clone()) for a, b in zip([0, *cuts], [*cuts, len(keys)])]


def text(
    prefix: int, parents: Sequence[int], dtype: torch.dtype, dim: int = 32, heads: tuple[int, int] = (6, 2)
) -> Text:
    rng = torch.Generator().manual_seed(prefix * 31 + len(parents))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    hq, hk = heads
    rows = len(parents)
    return Text(
        randn(prefix, hk, dim),
        randn(prefix, hk, dim),
        randn(hq, rows, dim).transpose(0, 1),
        randn(hk, rows, dim).transpose(0, 1),
        randn(rows, hk, dim),
        parents,
    )


def grow(rows: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [-1] + [rng.randrange(max(0, i - 4), i) for i in range(1, rows)]


# The same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", BORDERS)
def test_a_tree_gives_every_node_the_bits_of_plain_decoding(prefix: int, kind: str, dtype: torch.dtype) -> None:
    case, rng = text(prefix, grow(64, prefix), dtype), random.Random(prefix)
    whole = case.together(KINDS[kind])
    for node in (0, 63, *rng.sample(range(1, 63), 6)):
        assert torch.equal(case.alone(node, KINDS[kind], rng), whole[node]), node


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.integers(0, 700),
    st.integers(1, 90),
    st.integers(0, 99),
    st.sampled_from([16, 24, 33, 64, 80, 128]),
    st.sampled_from([(1, 1), (7, 1), (9, 3), (16, 2)]),
    st.sampled_from(DTYPES),
    st.sampled_from([AttentionSpec(0.3), AttentionSpec(0.3, window=50), AttentionSpec(0.3, softcap=2.0)]),
)
def test_any_shape_gives_the_bits_of_plain_decoding(prefix, rows, seed, dim, heads, dtype, spec):
    case, rng = text(prefix, grow(rows, seed), dtype, dim, heads), random.Random(seed)
    whole, node = case.together(spec), seed % rows
    assert torch.equal(case.alone(node, spec, rng), whole[node])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_may_be_cut_anywhere(kind: str, dtype: torch.dtype) -> None:
    rows = 600
    case = text(0, range(-1, rows - 1), dtype)
    tree = (case.tree_keys, case.tree_values)
    whole = native.attend(TreeInput(case.query, [], tree, KINDS[kind], None, range(rows)))
    for size in (1, 7, 64, 130):
        for start in range(0, rows, size) if size > 7 else (0, 63, 64, 505, 511, 512, 593):
            rows_now = slice(start, min(start + size, rows))
            before, own = tuple(x[:start] for x in tree), tuple(x[rows_now] for x in tree)
            positions = range(start, rows_now.stop)
            part = native.attend(TreeInput(case.query[rows_now], [before], own, KINDS[kind], None, positions))
            assert torch.equal(part, whole[rows_now]), (size, start)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 64, 150])
def test_threads_change_nothing(rows: int, kind: str) -> None:
    case = text(3000, grow(rows), torch.bfloat16)
    alone = case.together(KINDS[kind])
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        assert torch.equal(case.together(KINDS[kind]), alone)


@pytest.mark.parametrize("threads", [1, 3])
def test_long_texts_merge_in_several_waves(threads: int) -> None:
    torch.set_num_threads(threads)
    case = text(70_000, grow(64), torch.float32, dim=16, heads=(16, 1))
    spec, rng = AttentionSpec(0.3), random.Random(1)
    whole = case.together(spec)
    for node in (0, 40):
        assert torch.equal(case.alone(node, spec, rng), whole[node])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chain_is_a_triangular_mask(dtype: torch.dtype) -> None:
    case = text(300, range(-1, 149), dtype)
    inputs = TreeInput(
        case.query,
        [(case.keys, case.values)],
        (case.tree_keys, case.tree_values),
        KINDS["window"],
        None,
        range(300, 450),
    )
    assert torch.equal(native.attend(inputs), case.together(KINDS["window"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", [0, 63, 64, 511, 512, 900])
def test_own_key_may_lie_in_the_prefix(prefix: int, kind: str) -> None:
    case = text(prefix, [-1], torch.bfloat16)
    runs = [(case.keys, case.values), (case.tree_keys, case.tree_values)]
    got = native.attend(TreeInput(case.query, runs, None, KINDS[kind], None, [prefix]))
    assert torch.equal(got, case.together(KINDS[kind]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim, value_dim", [(32, 32), (72, 40), (33, 7), (128, 128)])
def test_every_instruction_set_computes_the_plain_twins_bits(
    dim: int, value_dim: int, kind: str, dtype: torch.dtype, isa: str
) -> None:
    case = text(200, grow(5), dtype, dim)
    tree = (case.tree_keys, case.tree_values[..., :value_dim])
    runs = [(case.keys, case.values[..., :value_dim])]
    inputs = TreeInput(case.query, runs, tree, KINDS[kind], case.mask, [200 + depth for depth in case.depths])
    assert torch.equal(native.attend(inputs, isa), native.attend(inputs, "plain"))
