"""Stop rules: nothing is committed past the end, and the end does not depend on how tokens arrive."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.stop import StopRules
from longgraft.stream import TextStream
from tests import small_tokenizers as small

BYTE_LEVEL, SENTENCEPIECE, CLEANING = small.byte_level(), small.sentencepiece(), small.cleaning()
TOKENIZERS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "cleaning": CLEANING}
WORDS = {
    "byte_level": "The quick brown fox 🦖 jumps\n over — the lazy dog",
    "sentencepiece": "The quick brown fox 🦖 jumps over the lazy dog",
    "cleaning": "Hello , world . It 's fine , I do n't , you said !",
}


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def feed(rules: StopRules, token_ids: list[int], rng: random.Random | None = None) -> list[int]:
    """Commit tokens block by block as an engine does, until the rules say that it is over."""
    committed: list[int] = []
    while token_ids and rules.finish_reason is None:
        size = 1 if rng is None else rng.randint(1, 9)
        kept = rules.clip(token_ids[:size])
        assert len(kept) <= size and kept == token_ids[: len(kept)]
        committed += kept
        token_ids = token_ids[size:]
    return committed


def plain_end(
    tokenizer: Any, token_ids: list[int], eos: set[int], stop: tuple[str, ...], limit: int, room: int | None
) -> tuple[int, str | None]:
    """The definition: look at the whole text after every token."""
    for n in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:n], skip_special_tokens=True)
        if token_ids[n - 1] in eos:
            return n, "eos"
        if any(s in text for s in stop):
            return n, "stop"
        if n == limit:
            return n, "length"
        if n == room:
            return n, "context"
    return len(token_ids), None


def test_eos_inside_a_block_is_kept_and_ends_it() -> None:
    rules = StopRules((7, 9), (), 100)
    assert rules.clip([1, 2, 9, 3, 7]) == [1, 2, 9]
    assert rules.finish_reason == "eos" and rules.remaining == 0
    assert rules.clip([4]) == []


def test_no_eos_at_all() -> None:
    rules = StopRules((), (), 4)
    assert rules.clip([7, 9]) == [7, 9] and rules.finish_reason is None and rules.remaining == 2
    assert rules.clip([0, 0, 0]) == [0, 0] and rules.finish_reason == "length"


@pytest.mark.parametrize(("limit", "room", "reason"), [(3, None, "length"), (9, 3, "context"), (3, 3, "length")])
def test_limits_are_never_passed(limit: int, room: int | None, reason: str) -> None:
    rules = StopRules((7,), (), limit, room)
    assert rules.remaining == 3
    assert rules.clip([1, 2]) == [1, 2] and rules.remaining == 1 and rules.finish_reason is None
    assert rules.clip([3, 4, 5]) == [3]
    assert rules.finish_reason == reason


def test_nothing_may_be_committed() -> None:
    assert StopRules((), (), 0).finish_reason == "length"
    full = StopRules((), (), 5, 0)
    assert full.finish_reason == "context" and full.remaining == 0 and full.clip([1]) == []


def test_eos_or_stop_on_the_last_allowed_token_is_not_length() -> None:
    assert _ended(StopRules((7,), (), 3), [1, 2, 7]) == "eos"
    assert _ended(StopRules((7,), (), 9, 3), [1, 2, 7]) == "eos"
    token_ids = encode(BYTE_LEVEL, "quick brown")
    assert _ended(StopRules((), ("brown",), len(token_ids), None, BYTE_LEVEL), token_ids) == "stop"
    assert _ended(StopRules((), ("brown",), len(token_ids) - 1, None, BYTE_LEVEL), token_ids) == "length"
    assert _ended(StopRules((token_ids[-1],), ("brown",), 99, None, BYTE_LEVEL), token_ids) == "eos"


def _ended(rules: StopRules, token_ids: list[int]) -> str | None:
    rules.clip(token_ids)
    return rules.finish_reason


@pytest.mark.parametrize(
    "stop", ["fox", "fox 🦖 j", "k b", "🦖", "\n", "q", "The quick brown", "ov", ", ", "It's", "world.", "dog"]
)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_string_anywhere_in_a_block(name: str, stop: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = encode(tokenizer, WORDS[name])
    n, reason = plain_end(tokenizer, token_ids, set(), (stop,), 99, None)
    whole = tokenizer.decode(token_ids[:n], skip_special_tokens=True)
    for seed in range(6):
        rules = StopRules((), (stop,), 99, None, tokenizer)
        committed = feed(rules, token_ids, random.Random(seed) if seed else None)
        assert committed == token_ids[:n] and rules.finish_reason == reason
        if reason == "stop":
            assert rules.text_end == whole.index(stop) and rules.text == whole[: rules.text_end]
        else:
            assert rules.text_end is None and rules.text == whole


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    st.text("abcd é🦖", max_size=30),
    st.lists(st.text("abcd é🦖", min_size=1, max_size=4), max_size=3),
    st.integers(0, 12),
    st.one_of(st.none(), st.integers(0, 12)),
    st.integers(0, 2**32),
)
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_rules_are_their_definition(
    name: str, text: str, stop: list[str], limit: int, room: int | None, seed: int
) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(seed)
    token_ids = encode(tokenizer, text)
    eos = set(rng.sample(token_ids, 1)) if token_ids and rng.random() < 0.3 else set()
    rules = StopRules(eos, tuple(stop), limit, room, tokenizer)
    committed = feed(rules, token_ids, rng)
    if limit and room != 0:
        assert (len(committed), rules.finish_reason) == plain_end(tokenizer, token_ids, eos, tuple(stop), limit, room)
    else:
        assert committed == [] and rules.finish_reason is not None


@settings(deadline=None, max_examples=80, derandomize=True)
@given(st.lists(st.integers(0, len(SENTENCEPIECE) - 1), max_size=30), st.text("ab Tr\ufffd", min_size=1, max_size=3))
def test_broken_bytes_end_the_same_in_any_blocks(token_ids: list[int], stop: str) -> None:
    one_by_one = StopRules((), (stop,), 99, None, SENTENCEPIECE)
    committed = feed(one_by_one, token_ids)
    for seed in range(3):
        rules = StopRules((), (stop,), 99, None, SENTENCEPIECE)
        assert feed(rules, token_ids, random.Random(seed)) == committed
        assert (rules.finish_reason, rules.text) == (one_by_one.finish_reason, one_by_one.text)


def test_special_tokens_are_not_text() -> None:
    token_ids = [*encode(BYTE_LEVEL, "ab"), 0, 1, *encode(BYTE_LEVEL, "cd")]
    rules = StopRules((), ("abcd",), 99, None, BYTE_LEVEL)
    assert rules.clip(token_ids) == token_ids and rules.finish_reason == "stop" and rules.text == ""
    rules = StopRules((), ("<|end|>",), 99, None, BYTE_LEVEL)
    assert rules.clip(token_ids) == token_ids and rules.finish_reason is None and rules.text == "abcd"


def test_text_without_a_stop_string() -> None:
    token_ids = encode(BYTE_LEVEL, "so 🦖 there")
    rules = StopRules((), (), 99, None, BYTE_LEVEL)
    rules.clip(token_ids[:3])
    rules.clip(token_ids[3:])
    assert rules.text == "so 🦖 there" and rules.text_end is None


def test_text_is_what_a_stream_gives() -> None:
    prompt, output = encode(SENTENCEPIECE, "The quick"), encode(SENTENCEPIECE, "brown fox jumps over")
    for stop in ((), ("jumps",)):
        rules = StopRules((), stop, 99, None, SENTENCEPIECE, prompt_ids=prompt)
        stream = TextStream(SENTENCEPIECE, prompt, stop)
        text = "".join([stream.push([t]) for t in feed(rules, output)]) + stream.finish()
        assert rules.text == text == (" brown fox " if stop else " brown fox jumps over")


def test_of_several_stop_strings_the_text_ends_before_the_leftmost() -> None:
    rules = StopRules((), ("x j", "fox", "jumps"), 99, None, BYTE_LEVEL)
    feed(rules, encode(BYTE_LEVEL, "brown fox jumps"))
    assert rules.text == "brown "
    for stop in (("quick", "ck"), ("ck", "quick")):
        rules = StopRules((), stop, 99, None, BYTE_LEVEL)
        feed(rules, encode(BYTE_LEVEL, "The quick"))
        assert rules.finish_reason == "stop" and rules.text == "The "


def test_watching_leaves_the_rules_alone() -> None:
    token_ids = encode(BYTE_LEVEL, "quick brown fox")
    rules = StopRules((), ("brown",), 99, None, BYTE_LEVEL)
    rules.clip(token_ids[:1])
    n, _ = plain_end(BYTE_LEVEL, token_ids, set(), ("brown",), 99, None)
    for _ in range(2):
        is_last = rules.watch()
        assert [is_last(t) for t in token_ids[1:n]] == [False] * (n - 2) + [True]
    assert rules.finish_reason is None and rules.remaining == 98 and rules.text_end is None
    assert rules.clip(token_ids[1:]) == token_ids[1:n]
    limit = StopRules((5,), (), 2).watch()
    assert not limit(1) and limit(2)
    assert StopRules((5,), (), 2).watch()(5)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(GraftError, match="tokenizer"):
        StopRules((), ("x",), 5)


def test_work_per_round_does_not_grow() -> None:
    seen: list[int] = []

    class Counting:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            seen.append(len(token_ids))
            return BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip_special_tokens)

    rules = StopRules((), ("never", "x" * 50), 10**6, None, Counting())
    token_ids = encode(BYTE_LEVEL, " ".join(small.LINES)) * 10
    for at in range(0, len(token_ids), 5):
        rules.clip(token_ids[at : at + 5])
    assert max(seen) <= 20
