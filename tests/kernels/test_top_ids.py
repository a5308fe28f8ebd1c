import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.kernels.top_ids import BLOCK, top_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 8, BLOCK, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1, 40 * BLOCK + 77])
def test_values_equal_topk(size: int, dtype: torch.dtype) -> None:
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    k = min(8, size)
    found = top_ids(rows, k)
    assert torch.equal(rows.gather(1, found), rows.topk(k, dim=-1).values)
    assert all(len(set(row)) == k for row in found.tolist())


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 2**20), st.integers(1, 12))
def test_large_entries_anywhere_are_found(seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(2, 20 * BLOCK + 5)
    columns = torch.randperm(rows.shape[1], generator=generator)[:k]
    rows[1, columns] = 1.0 + torch.arange(k, dtype=torch.float32)
    assert top_ids(rows, k)[1].tolist() == columns.flip(0).tolist()
