"""What a call may look like: every misfit is refused in one sentence that names it."""

from typing import Any

import pytest
import torch

from longgraft.kernels.spec import AttentionSpec, TreeInput


def call(**changes: Any) -> TreeInput:
    """Three rows of four query heads behind five cached rows of two key heads; head sizes 8 and 6."""
    fields: dict[str, Any] = {
        "query": torch.zeros(3, 4, 8),
        "prefix": [(torch.zeros(5, 2, 8), torch.zeros(5, 2, 6))],
        "tree": (torch.zeros(3, 2, 8), torch.zeros(3, 2, 6)),
        "spec": AttentionSpec(1.0),
        "mask": torch.ones(3, 3, dtype=torch.bool),
        "positions": [5, 6, 6],
    }
    return TreeInput(**{**fields, **changes})


def test_what_it_knows() -> None:
    inputs = call()
    assert (inputs.prefix_len, inputs.kv_heads, inputs.value_dim) == (5, 2, 6)
    assert inputs.position_list() == call(positions=torch.tensor([5, 6, 6])).position_list() == [5, 6, 6]
    assert call(prefix=[], mask=None).prefix_len == 0


def test_one_row_may_go_without_a_tree() -> None:
    one = {"query": torch.zeros(1, 4, 8), "tree": None, "mask": None, "positions": [4]}
    assert call(**one).value_dim == 6
    with pytest.raises(ValueError, match="1 rows without tree keys"):
        call(**one, prefix=[])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": torch.zeros(0, 4, 8)}, "at least one row"),
        ({"query": torch.zeros(1, 3, 4, 8)}, "expected .rows, heads, head size"),
        ({"query": torch.zeros(3, 4, 8).half()}, "expected one dtype"),
        ({"query": torch.zeros(3, 5, 8)}, "key heads that divide 5"),
        ({"query": torch.zeros(3, 4, 7)}, "do not fit"),
        ({"tree": None}, "3 rows without tree keys"),
        ({"tree": (torch.zeros(2, 2, 8), torch.zeros(2, 2, 6))}, "2 tree keys for 3 rows"),
        ({"tree": (torch.zeros(3, 2, 8), torch.zeros(3, 2, 5))}, "do not fit"),
        ({"prefix": [(torch.zeros(5, 2, 8), torch.zeros(4, 2, 6))]}, "do not fit"),
        ({"prefix": [(torch.zeros(5, 1, 8), torch.zeros(5, 1, 6))]}, "do not fit"),
        ({"prefix": [(torch.zeros(5, 2, 8), torch.zeros(5, 2, 6).double())]}, "expected one dtype"),
        ({"mask": torch.ones(3, 8, dtype=torch.bool)}, "expected bool .3, 3"),
        ({"mask": torch.zeros(3, 3)}, "mask is torch.float32"),
        ({"positions": [5, 6]}, "2 positions for 3 rows"),
        ({"spec": AttentionSpec(1.0, sinks=torch.zeros(2))}, "expected .4., one per query head"),
    ],
)
def test_a_misfit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_bad_constants_are_refused() -> None:
    with pytest.raises(ValueError, match="window is 0: expected 1 or more"):
        AttentionSpec(1.0, window=0)
    with pytest.raises(ValueError, match=r"softcap is 0.0: expected above 0"):
        AttentionSpec(1.0, softcap=0.0)
