"""A backend is compared with `reference` once per device, dtype and head sizes, and small faults are found."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longgraft.kernels import cpu, reference
from longgraft.kernels.first_use import fault
from longgraft.kernels.spec import TreeInput

CPU, DIMS = torch.device("cpu"), (64, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 40), (80, 80)], ids=str)
def test_a_right_backend_passes(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    assert fault(cpu.attend, CPU, dtype, dims) == ""


def lost_key(inputs: TreeInput) -> Tensor:
    """The last cached row is not read: a bound off by one."""
    runs = [*inputs.prefix[:-1], tuple(x[:-1] for x in inputs.prefix[-1])]
    return reference.attend(replace(inputs, prefix=runs))


def wrong_order(inputs: TreeInput) -> Tensor:
    """Chunks taken in the order of the pool; shows only where positions matter."""
    return reference.attend(replace(inputs, prefix=inputs.prefix[::-1]))


def no_ancestors(inputs: TreeInput) -> Tensor:
    return reference.attend(replace(inputs, mask=None))


def window_off_by_one(inputs: TreeInput) -> Tensor:
    window = inputs.spec.window
    return reference.attend(replace(inputs, spec=replace(inputs.spec, window=window and window + 1)))


def forgotten_sinks(inputs: TreeInput) -> Tensor:
    return reference.attend(replace(inputs, spec=replace(inputs.spec, sinks=None)))


def not_a_number(inputs: TreeInput) -> Tensor:
    return reference.attend(inputs) * float("nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "broken", [lost_key, wrong_order, no_ancestors, window_off_by_one, forgotten_sinks, not_a_number]
)
def test_small_faults_are_found(broken, dtype: torch.dtype) -> None:
    assert "from `reference`" in fault(broken, CPU, dtype, DIMS)


def test_an_error_is_an_answer_and_given_once() -> None:
    calls = []

    def raises(inputs: TreeInput) -> Tensor:
        calls.append(inputs)
        raise RuntimeError("no kernel image")

    for _ in range(2):
        assert fault(raises, CPU, torch.float32, DIMS).endswith("ended with RuntimeError: no kernel image")
    assert len(calls) == 1


def test_the_callers_random_numbers_are_left_alone() -> None:
    before = torch.random.get_rng_state()
    fault(lambda inputs: reference.attend(inputs), CPU, torch.float32, (16, 16))
    assert torch.equal(torch.random.get_rng_state(), before)
