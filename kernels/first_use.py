"""Compares a backend with `reference` before its first use on a device: a wrong kernel is refused, not trusted.

Knows tensors only. The one idea: the answer is a function of backend, device, dtype and head sizes that cannot
change while the process lives, so it is a cached function, not a flag somebody must remember to set. The problems
are small but sharp: logits are large enough that every row looks at few keys, so that one key too many or too few
changes some row by far more than rounding does.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from longgraft.kernels import reference
from longgraft.kernels.spec import AttentionSpec, Run, TreeInput

# Roundings of the largest number in the result: weights and sums are rounded a few times, a lost key is far more.
_ROUNDINGS = 8
_CHUNK, _LENGTH, _ROWS, _KV_HEADS, _GROUP = 256, 600, 17, 2, 4


@cache
def fault(
    attend: Callable[[TreeInput], Tensor], device: torch.device, dtype: torch.dtype, dims: tuple[int, int]
) -> str:
    """Return how the backend's result differs from `reference`'s for heads of `dims` (D, Dv), or an empty string.

    Computed once per argument in a process. An error that the backend raises is its answer too.
    """
    for inputs in _problems(device, dtype, dims):
        expected = reference.attend(inputs).float()
        try:
            got = attend(inputs).float()
        except Exception as error:  # whatever compilers and drivers raise
            return f"its check before first use on {device} ended with {type(error).__name__}: {error}"
        allowed = _ROUNDINGS * max(torch.finfo(dtype).eps, 2e-6) * float(expected.abs().max())
        off = float((got - expected).abs().max())
        if not off <= allowed:
            return f"its check before first use on {device} found it {off:.2g} from `reference` ({allowed:.2g} allowed)"
    return ""


def _problems(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Iterator[TreeInput]:
    """Yield bushy trees, one with all options, a windowed chain and one row, behind chunks in no order."""
    rng = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(device, dtype)

    dim, value_dim = dims
    pools = randn(5 * _CHUNK, _KV_HEADS, dim), randn(5 * _CHUNK, _KV_HEADS, value_dim)
    spans = [(3 * _CHUNK, 5 * _CHUNK), (0, _LENGTH - 2 * _CHUNK)]
    prefix: list[Run] = [(pools[0][a:b], pools[1][a:b]) for a, b in spans]
    tree = (randn(_ROWS, _KV_HEADS, dim), randn(_ROWS, _KV_HEADS, value_dim))
    query, scale = randn(_ROWS, _KV_HEADS * _GROUP, dim), 4 * dim**-0.5
    mask = torch.eye(_ROWS, dtype=torch.bool)
    depths = [0] * _ROWS
    for row in range(1, _ROWS):
        parent = (row - 1) // 2
        mask[row] |= mask[parent]
        depths[row] = depths[parent] + 1
    positions = [_LENGTH + depth for depth in depths]
    narrow = AttentionSpec(scale, 3, 5.0, randn(_KV_HEADS * _GROUP))
    yield TreeInput(query, prefix, tree, AttentionSpec(scale), mask.to(device), positions)
    yield TreeInput(query, prefix, tree, narrow, mask.to(device), positions)
    yield TreeInput(query, prefix, tree, AttentionSpec(scale, 400), None, range(_LENGTH, _LENGTH + _ROWS))
    yield TreeInput(query[:1], prefix, None, AttentionSpec(scale), None, [_LENGTH - 1])
