"""Acceptance: whatever is proposed, the output is what the sampler alone draws token by token."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from longgraft.accept import accept
from longgraft.config import SamplingParams
from longgraft.sampler import Sampler, resolve
from longgraft.stop import StopRules
from longgraft.tree import Source, TokenTree, TreeBuilder, Verification, chain
from tests import small_tokenizers as small

VOCAB = 5
PROMPT = [3, 0, 1]
Toy = Callable[[list[int]], Tensor]
Proposer = Callable[[list[int]], TokenTree]


def toy(token_ids: list[int]) -> Tensor:
    """Return logits that depend on the last three tokens."""
    return _toy(tuple(token_ids[-3:]))


@cache
def _toy(token_ids: tuple[int, ...]) -> Tensor:
    seed = 7
    for token_id in token_ids:
        seed = seed * 31 + token_id + 1
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 1.5)


def sampler_of(prompt: list[int] = PROMPT, vocab_size: int = VOCAB, **fields: Any) -> Sampler:
    params = SamplingParams(**{"seed": 1, "top_k": 0, **fields})
    return Sampler(resolve(params, None, vocab_size), prompt, vocab_size)


def verified(tree: TokenTree, token_ids: list[int], target: Toy = toy) -> Verification:
    """Score every node of a tree whose root is the last of `token_ids`."""
    rows = [target(token_ids + [int(tree.token_ids[i]) for i in tree.path(node)[1:]]) for node in range(len(tree))]
    return Verification(tree, torch.stack(rows), None, np.arange(len(tree), dtype=np.int32))


def plain(sampler: Sampler, count: int, prompt: list[int] = PROMPT, target: Toy = toy) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(sampler.draw(target(token_ids), token_ids).token_id)
    return token_ids[len(prompt) :]


def speculative(sampler: Sampler, count: int, propose: Proposer, prompt: list[int] = PROMPT, target: Toy = toy):
    """Return the output of a whole generation, and how many tokens each round gave."""
    stop = StopRules((), (), count)
    token_ids, rounds = list(prompt), []
    while stop.finish_reason is None:
        tree = propose(token_ids)
        assert tree.token_ids[0] == token_ids[-1]
        new = stop.clip(accept(verified(tree, token_ids, target), sampler, token_ids, stop).token_ids)
        token_ids += new
        rounds.append(len(new))
    return token_ids[len(prompt) :], rounds


def nothing(token_ids: list[int]) -> TokenTree:
    return chain([token_ids[-1]])


def everything(token_ids: list[int]) -> TokenTree:
    """Every continuation of two tokens."""
    builder = TreeBuilder(token_ids[-1])
    for first in range(VOCAB):
        child = builder.add(0, first, -1.0, Source.DRAFT)
        for second in range(VOCAB):
            builder.add(child, second, -2.0, Source.HISTORY)
    return builder.build()


def likeliest(token_ids: list[int]) -> TokenTree:
    builder, node, text = TreeBuilder(token_ids[-1]), 0, list(token_ids)
    for depth in range(4):
        text.append(int(toy(text).argmax()))
        node = builder.add(node, text[-1], -0.1 * depth, Source.DRAFT)
    return builder.build()


def unlikeliest(token_ids: list[int]) -> TokenTree:
    builder, node, text = TreeBuilder(token_ids[-1]), 0, list(token_ids)
    for _ in range(3):
        text.append(int(toy(text).argmin()))
        node = builder.add(node, text[-1], -1.0, Source.DRAFT)
    return builder.build()


def haphazard(token_ids: list[int]) -> TokenTree:
    """A random tree, with the same token from two sources, token id 0 among them."""
    rng = np.random.default_rng(len(token_ids))
    builder = TreeBuilder(token_ids[-1])
    for _ in range(12):
        parent, token_id = int(rng.integers(len(builder))), int(rng.integers(VOCAB))
        for source in (Source.DRAFT, Source.HISTORY):
            builder.add(parent, token_id, float(-rng.random() * 3), source)
    return builder.build()


def foreseeing(sampler: Sampler) -> Proposer:
    """Proposes exactly what the sampler is going to draw, and wrong siblings beside it."""

    def propose(token_ids: list[int]) -> TokenTree:
        builder, node, text = TreeBuilder(token_ids[-1]), 0, list(token_ids)
        for _ in range(5):
            right = sampler.draw(toy(text), text).token_id
            builder.add(node, (right + 1) % VOCAB, -0.2, Source.PROMPT)
            node = builder.add(node, right, -0.3, Source.DRAFT)
            text.append(right)
        return builder.build()

    return propose


PROPOSERS = [nothing, everything, likeliest, unlikeliest, haphazard]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 1.0, "bad_words_ids": [[0, 1], [2, 3, 4], [2]]},
    {"temperature": 1.5, "eos_token_ids": (4,), "min_new_tokens": 12, "logit_bias": {2: 1.0}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("propose", PROPOSERS)
def test_output_does_not_depend_on_proposals(settings: dict[str, Any], propose: Proposer) -> None:
    for seed in range(3):
        want = plain(sampler_of(seed=seed, **settings), 20)
        got, rounds = speculative(sampler_of(seed=seed, **settings), 20, propose)
        assert got == want
        if propose is nothing:
            assert rounds == [1] * 20
        if propose is everything:
            assert rounds == [3] * 6 + [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_proposals_are_all_accepted(temperature: float) -> None:
    propose = foreseeing(sampler_of(temperature=temperature))
    got, rounds = speculative(sampler_of(temperature=temperature), 24, propose)
    assert got == plain(sampler_of(temperature=temperature), 24)
    assert rounds == [6] * 4


def test_path_tokens_and_bonus() -> None:
    """The nodes visited, the token drawn at each; the last draw has no node."""
    sampler = sampler_of(temperature=0.0)
    tree = likeliest(PROMPT)
    accepted = accept(verified(tree, PROMPT), sampler, PROMPT)
    assert accepted.path == [0, 1, 2, 3, 4]
    assert accepted.token_ids[:4] == tree.token_ids[1:].tolist()
    assert accepted.token_ids == plain(sampler_of(temperature=0.0), 5)
    assert accepted.logprobs == ()
    missed = accept(verified(unlikeliest(PROMPT), PROMPT), sampler, PROMPT)
    assert missed.path == [0] and missed.token_ids == accepted.token_ids[:1]


def test_logprobs_are_those_of_plain_decoding() -> None:
    sampler = sampler_of(temperature=1.0, logprobs=2)
    accepted = accept(verified(everything(PROMPT), PROMPT), sampler, PROMPT)
    assert len(accepted.logprobs) == len(accepted.token_ids) == 3
    text = list(PROMPT)
    for token_id, logprob in zip(accepted.token_ids, accepted.logprobs):
        want = torch.log_softmax(toy(text), -1)
        assert logprob.token_id == token_id and len(logprob.top) == 2
        assert logprob.logprob == pytest.approx(float(want[token_id]), abs=1e-6)
        text.append(token_id)


class Stateful(hf.LogitsProcessor):
    """Forbids what it chose to forbid before: right only if called once per committed position, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.total = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(tuple(input_ids[0].tolist()))
        self.total = (self.total * 3 + int(input_ids[0, -1]) + 1) % 97
        scores = scores.clone()
        scores[:, self.total % VOCAB] = -torch.inf
        return scores


@pytest.mark.parametrize("propose", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stateful_processors_run_once_per_committed_position(propose: Proposer, temperature: float) -> None:
    reference, tested = Stateful(), Stateful()
    want = plain(sampler_of(temperature=temperature, processors=(reference,)), 17)
    got, _ = speculative(sampler_of(temperature=temperature, processors=(tested,)), 17, propose)
    assert got == want
    assert tested.calls == reference.calls
    assert [len(call) for call in tested.calls] == list(range(3, 20))


@pytest.mark.parametrize("eos", [(4,), (0, 2), (1,)])
def test_nothing_is_drawn_past_eos(eos: tuple[int, ...]) -> None:
    for seed in range(8):
        reference, tested = Stateful(), Stateful()
        want: list[int] = []
        sampler = sampler_of(temperature=1.0, seed=seed, processors=(reference,))
        while len(want) < 30 and not (want and want[-1] in eos):
            want.append(sampler.draw(toy(PROMPT + want), PROMPT + want).token_id)
        stop, token_ids = StopRules(eos, (), 30), list(PROMPT)
        sampler = sampler_of(temperature=1.0, seed=seed, processors=(tested,))
        while stop.finish_reason is None:
            accepted = accept(verified(everything(token_ids), token_ids), sampler, token_ids, stop)
            assert stop.clip(accepted.token_ids) == accepted.token_ids, "a draw was thrown away"
            token_ids += accepted.token_ids
        assert token_ids[3:] == want and tested.calls == reference.calls


def test_nothing_is_drawn_past_a_stop_string_or_a_limit() -> None:
    tokenizer = small.byte_level()
    text = tokenizer.encode("The quick brown fox jumps", add_special_tokens=False)
    size = len(tokenizer)

    def target(token_ids: list[int]) -> Tensor:
        logits = torch.zeros(size)
        logits[text[min(len(token_ids), len(text) - 1)]] = 9.0
        return logits

    prompt, rest = text[:1], text[1:]
    for stop, want in (
        (StopRules((), ("brown",), 99, None, tokenizer), "stop"),
        (StopRules((), (), 4), "length"),
        (StopRules((), (), 99, 5), "context"),
    ):
        recorder = Recorder()
        sampler = sampler_of(prompt, size, temperature=0.0, processors=(recorder,))
        accepted = accept(verified(chain(text), prompt, target), sampler, prompt, stop)
        assert recorder.count == len(accepted.token_ids) < len(rest)
        assert accepted.token_ids == rest[: recorder.count]
        assert stop.finish_reason is None, "the rules are only watched"
        assert stop.clip(accepted.token_ids) == accepted.token_ids and stop.finish_reason == want


class Recorder(hf.LogitsProcessor):
    count = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.count += 1
        return scores


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.8}, {"temperature": 0.5}])
def test_sequences_of_three_follow_the_exact_distribution(settings: dict[str, Any]) -> None:
    """Enumerate all sequences of three tokens; draw them through trees of every kind."""
    exact = {}
    for sequence in itertools.product(range(VOCAB), repeat=3):
        probability, text = 1.0, list(PROMPT)
        for token_id in sequence:
            probability *= conditional(text, settings)[token_id]
            text.append(token_id)
        exact[sequence] = probability
    counts = dict.fromkeys(exact, 0)
    trials = 900
    for seed in range(trials):
        propose = PROPOSERS[seed % len(PROPOSERS)]
        counts[tuple(speculative(sampler_of(seed=seed, **settings), 3, propose)[0])] += 1
    assert sum(exact.values()) == pytest.approx(1.0)
    assert not any(counts[s] for s, p in exact.items() if p == 0)
    # Rare sequences are pooled, so that every class expects at least five.
    common = [s for s, p in exact.items() if p * trials >= 5]
    observed = np.array([counts[s] for s in common] + [trials - sum(counts[s] for s in common)])
    expected = np.array([exact[s] for s in common] + [1 - sum(exact[s] for s in common)]) * trials
    keep = expected > 1
    statistic = float(((observed - expected) ** 2 / np.maximum(expected, 1e-9))[keep].sum())
    freedom = int(keep.sum()) - 1
    assert freedom >= 8
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.29 * (2 / (9 * freedom)) ** 0.5) ** 3


def conditional(text: list[int], settings: dict[str, Any]) -> Any:
    """Return the exact next-token distribution, by the definition of top-p."""
    weights = np.exp(toy(text).double().numpy() / settings["temperature"])
    weights /= weights.sum()
    order = np.argsort(-weights)
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= settings.get("top_p", 1.0)]] = 0
    return weights / weights.sum()


def test_long_committed_text_is_not_copied() -> None:
    class Counted(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("the committed tokens were walked through")

    token_ids = Counted(PROMPT * 1000)
    sampler = sampler_of(PROMPT * 1000, temperature=1.0)
    accepted = accept(verified(likeliest(PROMPT), PROMPT), sampler, token_ids)
    assert accepted.path[0] == 0
