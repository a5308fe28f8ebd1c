"""The sampler: filters like transformers', draws like the exact distribution, one argmax when greedy."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longgraft.config import GraftError, SamplingParams
from longgraft.sampler import Sampler, resolve, survivors, survivors_plain

CASES = [
    (0, 1.0, 0.0), (5, 1.0, 0.0), (50, 0.9, 0.0), (0, 0.95, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.1), (0, 0.9999, 0.0),
    (20, 0.8, 0.05), (0, 1e-9, 0.0), (0, 1.0, 1.0), (1, 1.0, 0.0), (10**6, 0.7, 0.0),
]  # fmt: skip


def made(vocab_size: int, prompt: Sequence[int] = (1, 2), **fields: Any) -> Sampler:
    fields = {"seed": 5, "top_k": 0, **fields}
    return Sampler(resolve(SamplingParams(**fields), None, vocab_size), prompt, vocab_size)


def draws(sampler: Sampler, logits: Tensor, count: int) -> list[int]:
    """Draw at many output positions from the same logits."""
    return [sampler.draw(logits, range(2 + position)).token_id for position in range(count)]


def random_scores(rng: np.random.Generator, n: int, dtype: Any = np.float32) -> Any:
    scores = rng.normal(size=n) * rng.choice([0.01, 1.0, 3.0, 12.0])
    if rng.random() < 0.5:
        scores = np.round(scores * 4) / 4  # many ties, as in bf16
    if rng.random() < 0.3:
        scores[rng.random(n) < 0.6] = -np.inf
        scores[n // 2] = 0.5
    return scores.astype(dtype)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 2, 7, 100, 3000]),
    st.sampled_from([1.0, 0.999999, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_survivors_are_those_of_a_full_sort(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    rng = np.random.default_rng(seed)
    n, dtype = int(rng.integers(1, 3000)), rng.choice([np.float32, np.float64])
    scores = random_scores(rng, n, dtype)
    fast = survivors(scores, top_k, top_p, min_p)
    assert np.array_equal(fast, survivors_plain(scores, top_k, top_p, min_p))
    assert scores.argmax() in fast and np.isfinite(scores[fast]).all() and np.all(np.diff(fast) > 0)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CASES)
def test_survivors_are_those_of_transformers(top_k: int, top_p: float, min_p: float) -> None:
    rng = np.random.default_rng(8)
    for n in (7, 300, 5000):
        scores = (rng.normal(size=n) * 3).astype(np.float32)
        warped = torch.from_numpy(scores)[None]
        if top_k:
            warped = hf.TopKLogitsWarper(top_k)(None, warped)
        if top_p < 1:
            warped = hf.TopPLogitsWarper(top_p)(None, warped)
        if min_p:
            warped = hf.MinPLogitsWarper(min_p)(None, warped)
        want = np.flatnonzero(np.isfinite(warped[0].numpy()))
        assert np.array_equal(survivors(scores, top_k, top_p, min_p), want)


def test_ties_are_kept_as_transformers_keeps_them() -> None:
    scores = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], np.float32)
    assert survivors(scores, 2, 1.0, 0.0).tolist() == [1, 2, 3, 4]
    equal = np.zeros(4, np.float32)
    assert survivors(equal, 0, 0.5, 0.0).tolist() == [0, 1]
    assert survivors(equal, 0, 0.51, 0.0).tolist() == [0, 1, 2]


def test_a_nucleus_wider_than_every_pool() -> None:
    rng = np.random.default_rng(1)
    flat = np.concatenate([[0.0], -20 - rng.random(20000) * 30, np.full(20000, -7.0)]).astype(np.float32)
    for top_p in (0.01, 0.9, 0.9999999):
        assert np.array_equal(survivors(flat, 0, top_p, 0.0), survivors_plain(flat, 0, top_p, 0.0))


def chi_square(counts: Any, probabilities: Any) -> tuple[float, float]:
    """Return the statistic and its bound for p = 0.0005 (Wilson-Hilferty)."""
    possible = probabilities > 0
    assert not counts[~possible].any(), "a forbidden token was drawn"
    expected = probabilities[possible] * counts.sum()
    freedom = max(int(possible.sum()) - 1, 1)
    bound = freedom * (1 - 2 / (9 * freedom) + 3.29 * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((counts[possible] - expected) ** 2 / expected).sum()), bound


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.8, 0.0), (6, 0.9, 0.05)])
def test_draws_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([1.0, 0.2, -1.0, 2.0, 0.0, -0.4, 1.1, -2.0, 0.5, 0.9])
    kept = survivors_plain((logits / temperature).numpy(), top_k, top_p, min_p)
    weights = np.zeros(10)
    weights[kept] = np.exp(logits.double().numpy()[kept] / temperature)
    sampler = made(10, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=2024)
    counts = np.bincount(draws(sampler, logits, 1200), minlength=10)
    statistic, bound = chi_square(counts, weights / weights.sum())
    assert statistic < bound


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 300}, {"min_p": 0.001}, {"temperature": 0.4}])
def test_screening_and_filters_draw_what_the_plain_way_draws(fields: dict[str, Any]) -> None:
    """Against argmax of score + noise over the survivors of a full sort, on a vocabulary that is screened."""
    from longgraft.noise import winner_plain

    rng = np.random.default_rng(3)
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
    sampler = made(20001, **fields)
    for position in range(15):
        logits = torch.from_numpy(random_scores(rng, 20001))
        scores = logits.numpy() / np.float32(fields["temperature"])
        kept = survivors_plain(scores, fields["top_k"], fields["top_p"], fields["min_p"])
        want = winner_plain(scores[kept], kept, (5, 0, position))
        assert sampler.draw(logits, range(2 + position)).token_id == want


def test_filters_do_not_change_the_noise() -> None:
    """A draw that survives a filter is the same without it."""
    logits = torch.from_numpy(random_scores(np.random.default_rng(0), 2000))
    free = draws(made(2000, temperature=1.0), logits, 60)
    limited = draws(made(2000, temperature=1.0, top_k=200), logits, 60)
    kept = set(survivors(logits.numpy(), 200, 1.0, 0.0).tolist())
    same = [a for a, b in zip(free, limited) if a in kept and a == b]
    assert len(same) == sum(a in kept for a in free) > 0


def test_a_draw_depends_on_seed_sample_and_position_only() -> None:
    logits = torch.zeros(1000)
    base = draws(made(1000, temperature=1.0), logits, 40)
    assert draws(made(1000, temperature=1.0), logits, 40) == base
    assert draws(made(1000, temperature=1.0, prompt=(9, 9)), logits, 40) == base
    assert draws(made(1000, temperature=1.0, seed=6), logits, 40) != base
    assert draws(made(1000, temperature=1.0, sample_index=1), logits, 40) != base
    assert len(set(base)) > 20
    sampler = made(1000, temperature=1.0)
    assert [sampler.draw(logits, range(2 + p)).token_id for p in (7, 3, 7)] == [base[7], base[3], base[7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_is_argmax_with_the_lowest_id_of_a_tie(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 8, 17, 1000, 4099):
        logits = (torch.randn(n, generator=generator) * 4).round().to(dtype)
        token_id = made(n).draw(logits, [1, 2]).token_id
        assert token_id == int(torch.argmax(logits.float()[None], dim=-1))
        assert token_id == int((logits == logits.max()).nonzero()[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_low_precision_logits_draw_as_their_fp32_values(temperature: float) -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    assert draws(made(500, temperature=temperature), logits, 30) == draws(
        made(500, temperature=temperature), logits.float(), 30
    )


def test_float64_is_not_rounded() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert made(3).draw(logits, [1, 2]).token_id == 2
    assert made(3).draw(logits.float(), [1, 2]).token_id == 1


def test_logits_are_left_alone() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3), requires_grad=True)
    before = logits.detach().clone()
    for fields in ({}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 2.0}):
        made(300, logprobs=3, **fields).draw(logits, [1, 2])
        assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_unusable_logits_are_named(temperature: float) -> None:
    sampler = made(5, temperature=temperature)
    broken = torch.zeros(5)
    broken[3] = float("nan")
    with pytest.raises(GraftError, match="position 4 contain NaN"):
        sampler.draw(broken, range(6))
    with pytest.raises(GraftError, match="every token is forbidden at output position 0"):
        sampler.draw(torch.full((5,), -torch.inf), [1, 2])
    with pytest.raises(GraftError, match=r"shape \[4\]: expected \[5\]"):
        sampler.draw(torch.zeros(4), [1, 2])
    with pytest.raises(GraftError, match=r"shape \[1, 5\]"):
        sampler.draw(torch.zeros(1, 5), [1, 2])
    forbidding = made(5, temperature=temperature, logit_bias={i: float("-inf") for i in range(5)})
    with pytest.raises(GraftError, match="forbidden"):
        forbidding.draw(torch.zeros(5), [1, 2])


def test_infinite_scores_need_temperature_zero() -> None:
    infinite = torch.tensor([0.0, torch.inf, 1.0])
    assert made(3).draw(infinite, [1, 2]).token_id == 1
    for temperature, logits in ((1.0, infinite), (1e-45, torch.tensor([0.0, 1.0, 1.0]))):
        with pytest.raises(GraftError, match="temperature"):
            made(3, temperature=temperature).draw(logits, [1, 2])


def test_rows_wider_than_the_vocabulary_are_fine() -> None:
    logits = torch.zeros(12)
    logits[11] = 3.0
    assert made(10).draw(logits, [1, 2]).token_id == 11


def test_unresolved_params_are_refused() -> None:
    with pytest.raises(GraftError, match="resolve"):
        Sampler(SamplingParams(), [1], 5)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_logits(num_top: int) -> None:
    logits = torch.randn(15, generator=torch.Generator().manual_seed(1))
    want = torch.log_softmax(logits, dim=-1)
    sampler = made(15, temperature=0.5, top_k=2, logprobs=num_top, logit_bias={3: 50.0}, seed=0)
    draw = sampler.draw(logits, [1, 2])
    assert draw.token_id == 3 and draw.logprob is not None and draw.logprob.token_id == 3
    assert draw.logprob.logprob == pytest.approx(float(want[3]), abs=1e-6)
    order = torch.sort(want, descending=True, stable=True).indices[:num_top].tolist()
    assert [token_id for token_id, _ in draw.logprob.top] == order
    assert [value for _, value in draw.logprob.top] == pytest.approx([float(want[i]) for i in order], abs=1e-6)
    assert made(15).draw(logits, [1, 2]).logprob is None


def test_tied_alternatives_are_in_order_of_their_ids() -> None:
    draw = made(6, logprobs=3).draw(torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0]), [1, 2])
    assert draw.logprob is not None and [i for i, _ in draw.logprob.top] == [1, 2, 3]


class Recorder(hf.LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[tuple[list[int], torch.dtype, tuple[int, ...]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64 and input_ids.shape[0] == 1
        self.seen.append((input_ids[0].tolist(), scores.dtype, tuple(scores.shape)))
        return scores


class Reading(Sequence[int]):
    """A token list that notes how much of it is read."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids, self.read = token_ids, 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        got = self.token_ids[index]
        self.read += len(got) if isinstance(got, list) else 1
        return got


def test_processors_see_prompt_and_output_once_per_draw() -> None:
    recorder = Recorder()
    sampler = made(9, prompt=[4, 5, 6], processors=(recorder,))
    token_ids = Reading([4, 5, 6])
    for step in range(40):
        token_ids.token_ids.append(sampler.draw(torch.randn(9), token_ids).token_id)
        assert recorder.seen[-1] == (token_ids.token_ids[:-1], torch.float32, (1, 9))
        assert len(recorder.seen) == step + 1
    assert token_ids.read < 200, "tokens known from the draw before are not read again"


def test_processors_see_float64_where_the_logits_are() -> None:
    recorder = Recorder()
    sampler = made(9, temperature=1.0, processors=(recorder,), repetition_penalty=1.2, presence_penalty=0.1)
    sampler.draw(torch.zeros(9, dtype=torch.float64), [1, 2])
    sampler.draw(torch.zeros(9, dtype=torch.bfloat16), [1, 2, 3])
    assert [dtype for _, dtype, _ in recorder.seen] == [torch.float64, torch.float32]


def test_history_follows_a_truncation() -> None:
    recorder = Recorder()
    sampler = made(9, prompt=[4, 5], processors=(recorder,))
    for token_ids in ([4, 5], [4, 5, 1, 2], [4, 5, 3], [4, 5, 3, 2, 1], [4, 5, 7, 7, 2]):
        sampler.draw(torch.zeros(9), token_ids)
        assert recorder.seen[-1][0] == token_ids


def test_presence_and_frequency_penalties_ignore_the_prompt() -> None:
    logits = torch.tensor([0.0, 1.0, 0.9, 0.5])
    sampler = made(4, prompt=[1, 1, 1], presence_penalty=0.2, frequency_penalty=0.3)
    token_ids = [1, 1, 1]
    for _ in range(4):
        token_ids.append(sampler.draw(logits, token_ids).token_id)
    assert token_ids[3:] == [1, 2, 1, 3]  # 1.0 | 0.9 against 0.5 | 0.5 against 0.4 and 0.5, lowest id | 0.5


def test_plain_sampling_builds_no_processors() -> None:
    sampler = made(9, temperature=0.8, top_p=0.9, top_k=5, min_p=0.01, logprobs=1, eos_token_ids=(1,))
    sampler.draw(torch.zeros(9), [1, 2])
    assert sampler._pipeline is None and sampler._history is None
    assert "transformers" in sys.modules  # by this file; the sampler itself has no import of it at the top
    assert "transformers" not in vars(sys.modules["longgraft.sampler"])
