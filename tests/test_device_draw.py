"""Noise and draws on a device have the host's bits; here the device is the CPU, and runs the same code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft import device_draw, noise
from longgraft.config import GraftError, SamplingParams
from longgraft.device_draw import Drawing, gumbel, winners
from longgraft.resolve import resolve
from longgraft.sampler import Sampler
from tests.host_reads import no_host_reads

FEW = settings(deadline=None, max_examples=25, derandomize=True)


@FEW
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    st.integers(0, 2**20),
)
def test_noise_has_the_hosts_bits(seed: int, sample_index: int, positions: list[int], block: int) -> None:
    ours = gumbel((seed, sample_index), torch.tensor(positions), 4 * block, 23)
    for row, position in zip(ours, positions):
        theirs = noise.gumbel(seed, sample_index, position, np.arange(4 * block, 4 * block + 23))
        assert np.array_equal(row.numpy(), theirs)


def test_logarithm_has_the_hosts_bits() -> None:
    x = np.random.default_rng(1).random(20_000) * np.exp2(np.arange(20_000) % 200 - 100.0)
    edges = np.array(
        [2.0**-33, 1 - 2.0**-33, 1.0, 0.7071067811865476, 0.7071067811865475, 22.9, 2.2250738585072014e-308]
    )
    x = np.concatenate([x[x > 1e-300], edges])
    assert np.array_equal(device_draw.log(torch.from_numpy(x)).numpy(), noise.log(x))


@pytest.mark.parametrize("vocab", [5, 1003, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "sample_index": 3},
        {"temperature": 1.3, "top_k": 4},
        {"temperature": 0.3, "top_k": 900},
    ],
)
def test_draws_are_the_samplers(vocab: int, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    params = resolve(SamplingParams(**{"seed": 9, "top_k": 0, **fields}), None, vocab)
    logits = (torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    logits[3, 1:3] = -torch.inf
    positions = torch.arange(40) * 7 % 60
    drawing = Drawing.of(params, dtype, torch.device("cpu"))
    with no_host_reads():
        token_ids, is_usable = drawing.draw(logits, positions)
    sampler = Sampler(params, [1], vocab)
    expected = [sampler.draw(row, range(1 + at)).token_id for row, at in zip(logits, positions.tolist())]
    assert token_ids.tolist() == expected
    assert is_usable.all()


def test_blocks_of_the_vocabulary_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(3, 999, generator=torch.Generator().manual_seed(1))
    whole = winners(scores, torch.arange(3), (5, 0))
    monkeypatch.setattr(device_draw, "BLOCK_CELLS", 100)
    assert winners(scores, torch.arange(3), (5, 0)).tolist() == whole.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_sampler_refuses_is_unusable(temperature: float) -> None:
    params = resolve(SamplingParams(temperature=temperature, seed=1, top_k=0), None, 8)
    logits = torch.zeros(4, 8)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 2] = torch.inf
    usable = Drawing.of(params, torch.float32, torch.device("cpu")).draw(logits, torch.arange(4))[1]
    assert usable.tolist() == [False, False, temperature == 0.0, True]
    sampler = Sampler(params, [1], 8)
    for row, is_usable in zip(logits, usable.tolist()):
        if not is_usable:
            with pytest.raises(GraftError):
                sampler.draw(row, [1])


def test_doors() -> None:
    with pytest.raises(GraftError, match="not resolved"):
        Drawing.of(SamplingParams(), torch.float32, torch.device("cpu"))
    params = resolve(SamplingParams(temperature=1.0, min_p=0.1, seed=1), None, 8)
    with pytest.raises(GraftError, match="min_p"):
        Drawing.of(params, torch.float32, torch.device("cpu"))
    assert device_draw.why_not(params, True).startswith("a logits processor")


@pytest.mark.gpu
def test_a_gpu_has_the_hosts_bits() -> None:
    """Also `scripts/gpu_check.py --only noise`."""
    positions = torch.tensor([0, 3, 10**6])
    ours = gumbel((2**63 + 5, 2), positions.cuda(), 0, 200_000).cpu()
    for row, position in zip(ours, positions.tolist()):
        assert np.array_equal(row.numpy(), noise.gumbel(2**63 + 5, 2, position, np.arange(200_000)))
