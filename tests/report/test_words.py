"""Text of tokens on a page: complete, and nothing in it that hides or reorders."""

import pytest

from longgraft.report.words import name_of, pieces, seen, whole
from tests import small_tokenizers as small

MAKERS = [small.byte_level, small.sentencepiece, small.cleaning]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", small.SAMPLES)
def test_all_pieces_are_the_text(make: object, text: str) -> None:
    from longgraft.stop import TextDecoder

    tokenizer = make()  # type: ignore[operator]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = TextDecoder(tokenizer, [])
    found = pieces(tokenizer, [], token_ids)
    assert len(found) == len(token_ids) and "".join(found) == decoder.push(token_ids) + decoder.finish()


def test_half_a_character_has_no_text_until_it_is_whole() -> None:
    tokenizer = small.byte_level()
    token_ids = tokenizer.encode("aΩb", add_special_tokens=False)
    assert pieces(tokenizer, [], token_ids) == ["a", "", "Ω", "b"]
    assert pieces(tokenizer, [], token_ids[:2]) == ["a", "\ufffd"], "and the last one says so if it never is"
    assert "\ufffd" not in name_of(tokenizer, token_ids[1]), "by itself it goes by the tokenizer's name"


def test_names_of_tokens_that_are_no_text() -> None:
    tokenizer = small.byte_level()
    assert name_of(tokenizer, 0) == "<|start|>"
    assert name_of(tokenizer, 10_000) == "#10000", "vocabularies are padded beyond the tokenizer's"
    assert whole(tokenizer, [0, *tokenizer.encode("ab", add_special_tokens=False)]) == "<|start|>ab"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\tb\nc d\u00a0e", "a\tb\nc d\u00a0e"),
        ("שלום 😀 👩‍👩‍👧", "שלום 😀 👩‍👩‍👧"),
        ("a\u202eb\u2066c", "a⟨U+202E⟩b⟨U+2066⟩c"),
        ("\x00\x1b[31m\r\n\u2028", "⟨U+0000⟩⟨U+001B⟩[31m⟨U+000D⟩\n⟨U+2028⟩"),
        ("z\u200be\ufeffr\xado \U000e0041", "z⟨U+200B⟩e⟨U+FEFF⟩r⟨U+00AD⟩o ⟨U+E0041⟩"),
        ("half \ud83d", "half ⟨U+D83D⟩"),
    ],
)
def test_what_cannot_be_seen_is_spelt_out(text: str, wanted: str) -> None:
    assert seen(text) == wanted
    seen(text).encode("utf-8")
