"""Streaming: final text only, whole characters only, and together exactly the decoded output."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.stop import TextDecoder
from longgraft.stream import TextStream
from tests import small_tokenizers as small

BYTE_LEVEL, SENTENCEPIECE, CLEANING = small.byte_level(), small.sentencepiece(), small.cleaning()
TOKENIZERS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}
UNFINISHED = "\ufffd"


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def blocks(token_ids: list[int], rng: random.Random) -> list[list[int]]:
    out = []
    while token_ids:
        size = rng.choice([0, 1, 1, 2, 3, 7])
        out.append(token_ids[:size])
        token_ids = token_ids[size:]
    return out


def stream(tokenizer: Any, token_blocks: list[list[int]], prompt: Any = (), stop: Any = ()) -> list[str]:
    text = TextStream(tokenizer, prompt, stop)
    return [text.push(block) for block in token_blocks] + [text.finish()]


@pytest.mark.parametrize("sample", range(len(small.SAMPLES)))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_the_decoded_output(name: str, sample: int) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(sample)
    token_ids = encode(tokenizer, small.SAMPLES[sample])
    want = decode(tokenizer, token_ids)
    for pieces in (
        stream(tokenizer, [[t] for t in token_ids]),
        stream(tokenizer, [token_ids]),
        stream(tokenizer, blocks(token_ids, rng)),
    ):
        assert "".join(pieces) == want
        assert sum(piece.count(UNFINISHED) for piece in pieces) == small.SAMPLES[sample].count(UNFINISHED)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_piece_is_a_prefix_at_once(name: str) -> None:
    """Text comes with the token that finishes it, not later: no word is held back."""
    tokenizer = TOKENIZERS[name]
    token_ids = encode(tokenizer, small.SAMPLES[1] + "a 🦖 b" + small.SAMPLES[0])
    text, given = TextStream(tokenizer), ""
    for n, token_id in enumerate(token_ids, 1):
        given += text.push([token_id])
        assert given == decode(tokenizer, token_ids[:n]).rstrip(UNFINISHED)


def test_character_split_over_tokens_comes_whole() -> None:
    token_ids = encode(BYTE_LEVEL, "🦖")
    assert len(token_ids) >= 3
    pieces = stream(BYTE_LEVEL, [[t] for t in token_ids])
    assert [piece for piece in pieces if piece] == ["🦖"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_cut_character_ends_as_replacement(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = encode(tokenizer, "so 🦖")[:-1]
    assert "".join(stream(tokenizer, [[t] for t in token_ids])) == decode(tokenizer, token_ids)
    assert decode(tokenizer, token_ids).endswith(UNFINISHED)


def test_a_run_of_broken_bytes_does_not_hold_the_text_for_ever() -> None:
    broken = encode(BYTE_LEVEL, "é")[:1] * 100
    text = TextStream(BYTE_LEVEL)
    given = "".join(text.push([t]) for t in broken)
    assert 60 <= given.count(UNFINISHED) <= 100
    assert len(text._scan._decoder._window) < 80
    assert given + text.finish() == decode(BYTE_LEVEL, broken)


def test_long_runs_of_special_tokens_leave_no_trace() -> None:
    token_ids = [*encode(SENTENCEPIECE, "The quick"), *[1] * 200, *encode(SENTENCEPIECE, "brown fox")]
    for group in ([[t] for t in token_ids], [token_ids], [token_ids[:50], token_ids[50:]]):
        assert "".join(stream(SENTENCEPIECE, group)) == decode(SENTENCEPIECE, token_ids)
    text = TextStream(SENTENCEPIECE)
    for token_id in token_ids[:-3]:
        text.push([token_id])
    assert len(text._scan._decoder._window) < 80


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=40), st.lists(st.sampled_from([0, 1]), max_size=4), st.integers(0, 2**32))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_text_in_any_blocks(name: str, text: str, special: list[int], seed: int) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(seed)
    token_ids = encode(tokenizer, text.replace(UNFINISHED, ""))
    for token_id in special:
        token_ids.insert(rng.randint(0, len(token_ids)), token_id)
    assert "".join(stream(tokenizer, blocks(token_ids, rng))) == decode(tokenizer, token_ids)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=40), st.integers(0, 2**32))
def test_any_byte_level_tokens_in_any_blocks(token_ids: list[int], seed: int) -> None:
    """Also tokens that no text encodes to, with broken characters anywhere."""
    pieces = stream(BYTE_LEVEL, blocks(token_ids, random.Random(seed)))
    assert "".join(pieces) == decode(BYTE_LEVEL, token_ids)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, len(SENTENCEPIECE) - 1), max_size=40), st.integers(0, 2**32))
def test_grouping_never_changes_byte_fallback_text(token_ids: list[int], seed: int) -> None:
    """A broken run of byte tokens takes back characters that were shown; how it ends must not depend on blocks."""
    one_by_one = "".join(stream(SENTENCEPIECE, [[t] for t in token_ids]))
    assert "".join(stream(SENTENCEPIECE, blocks(token_ids, random.Random(seed)))) == one_by_one
    if UNFINISHED not in decode(SENTENCEPIECE, token_ids):
        assert one_by_one == decode(SENTENCEPIECE, token_ids)


def test_output_continues_the_prompt() -> None:
    prompt, output = encode(SENTENCEPIECE, "The quick"), encode(SENTENCEPIECE, "brown fox")
    assert decode(SENTENCEPIECE, output) == "brown fox"
    assert "".join(stream(SENTENCEPIECE, [output], prompt)) == " brown fox"
    assert "".join(stream(SENTENCEPIECE, [output])) == "brown fox"
    assert "".join(stream(SENTENCEPIECE, [output], [*prompt, 1])) == "brown fox"
    long_prompt = encode(SENTENCEPIECE, " ".join(small.LINES[:3]) * 20)
    assert "".join(stream(SENTENCEPIECE, [output], long_prompt)) == " brown fox"


def test_output_closes_a_character_the_prompt_left_open() -> None:
    token_ids = encode(BYTE_LEVEL, "ab 🦖!")
    cut = len(token_ids) - 3
    assert decode(BYTE_LEVEL, token_ids[:cut]).endswith(UNFINISHED)
    assert "".join(stream(BYTE_LEVEL, [[t] for t in token_ids[cut:]], token_ids[:cut])) == "🦖!"


def test_clean_up_of_spaces() -> None:
    rng = random.Random(1)
    words = range(2, len(CLEANING))
    assert decode(CLEANING, encode(CLEANING, "Hello , world . It 's fine !")) == "Hello, world. It's fine!"
    for _ in range(100):
        token_ids = rng.choices(words, k=rng.randint(0, 25))
        want = decode(CLEANING, token_ids)
        assert "".join(stream(CLEANING, blocks(token_ids, rng))) == want
        assert "".join(stream(CLEANING, [[t] for t in token_ids])) == want
    first = TextStream(CLEANING).push(encode(CLEANING, "Hello , world"))
    assert first.startswith("Hello,")


def test_a_clean_up_flag_on_bpe_changes_nothing() -> None:
    """As in transformers, which ignores it there (and would say so at every request)."""
    tokenizer = small.byte_level()
    tokenizer.clean_up_tokenization_spaces = True
    token_ids = encode(tokenizer, "so , it 's fine .")
    assert "".join(stream(tokenizer, [[t] for t in token_ids])) == "so , it 's fine ."


STOPS = [
    ("lazy",),
    ("fox jumps",),
    ("o", "over"),
    ("zzz",),
    ("\n    return",),
    ("dog, and the lazy dog, and",),
    ("🦖",),
]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_cut_the_text(name: str, stop: tuple[str, ...]) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(3)
    for sample in [small.SAMPLES[0], small.SAMPLES[1], "a 🦖 b"]:
        token_ids = encode(tokenizer, sample)
        text = decode(tokenizer, token_ids)
        want = text[: min((i for s in stop if (i := text.find(s)) >= 0), default=len(text))]
        for group in ([[t] for t in token_ids], [token_ids], blocks(token_ids, rng)):
            pieces = stream(tokenizer, group, stop=stop)
            assert "".join(pieces) == want
            given = ""
            for piece in pieces:
                given += piece
                assert want.startswith(given), "part of a stop string was shown"


def test_text_that_only_begins_a_stop_string_is_given_later() -> None:
    text = TextStream(BYTE_LEVEL, stop=("END!",))
    assert text.push(encode(BYTE_LEVEL, "the EN")) == "the "
    assert text.push(encode(BYTE_LEVEL, "D of EN")) == "END of "
    assert text.finish() == "EN"
    assert text.finish() == "" and text.push(encode(BYTE_LEVEL, "x")) == ""


def test_nothing_comes_after_a_stop_string() -> None:
    text = TextStream(BYTE_LEVEL, stop=("stop",))
    assert text.push(encode(BYTE_LEVEL, "go, stop, go")) == "go, "
    assert text.is_finished
    assert text.push(encode(BYTE_LEVEL, "more")) == "" and text.finish() == ""


def test_the_stop_completed_first_decides() -> None:
    """Of two stop strings the one complete after fewer tokens ends the text, whatever the blocks."""
    token_ids = [t for c in "xabcd" for t in encode(BYTE_LEVEL, c)]
    for group in ([[t] for t in token_ids], [token_ids], [token_ids[:3], token_ids[3:]]):
        assert "".join(stream(BYTE_LEVEL, group, stop=("abcd", "bc"))) == "xa"


def test_work_per_step_does_not_grow() -> None:
    seen: list[int] = []

    class Counting:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            seen.append(len(token_ids))
            return BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip_special_tokens)

    text = TextStream(Counting(), encode(BYTE_LEVEL, small.LINES[0]) * 50, ("never",))
    for token_id in encode(BYTE_LEVEL, " ".join(small.LINES) * 20):
        text.push([token_id])
    assert max(seen) <= 16


def test_plain_tokenizers_work_too() -> None:
    raw = BYTE_LEVEL.backend_tokenizer
    token_ids = encode(BYTE_LEVEL, small.LINES[4])
    decoder = TextDecoder(raw)
    assert decoder.push(token_ids) + decoder.finish() == small.LINES[4]
