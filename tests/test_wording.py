"""What the text of each token says, by the token strings of byte-level and sentencepiece vocabularies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longgraft.wording import BLANKS, DIGITS, NEWLINE, PUNCTUATION, SPACED_WORD, UNKNOWN, WORD, wording_of
from tests.small_tokenizers import byte_level, sentencepiece


class Named:
    """A tokenizer that can do nothing but name its tokens."""

    def __init__(self, *names: str | None) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self.names[i] for i in ids]


def test_byte_level_signs() -> None:
    made = wording_of(Named("ĠThe", "The", "Ċ", "ĊĊĠ", "Ġ", "12", ");", None), 10)
    assert made is not None
    assert made.kinds.tolist() == [
        *(SPACED_WORD, WORD, NEWLINE, NEWLINE, BLANKS, DIGITS, PUNCTUATION, UNKNOWN),
        *(UNKNOWN, UNKNOWN),
    ]
    assert made.newlines.tolist() == [0, 0, 1, 2, 0, 0, 0, 0, 0, 0]


def test_letters_of_sentencepiece_vocabularies_are_no_line_breaks() -> None:
    """Ċ and Ġ are Maltese, č is Czech; the sign of byte-level vocabularies means something else there."""
    made = wording_of(Named("▁The", "▁a", "Ċ", "▁ĠĊ", "č", "\n\n", "<0x0A>"), 7)
    assert made is not None
    assert made.newlines.tolist() == [0, 0, 0, 0, 0, 2, 1]
    assert made.kinds[2] == WORD and made.kinds[3] == SPACED_WORD


def test_special_tokens_with_the_sign_do_not_make_a_byte_level_vocabulary_another() -> None:
    made = wording_of(Named("▁of▁sentence", "Ġa", "Ġb", "Ċ"), 4)
    assert made is not None and made.newlines.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["bytes", "pieces"])
def test_line_breaks_add_up_to_those_of_the_text(tokenizer: Any) -> None:
    text = "one two\n\n  three\nčau Ċ\n"
    made = wording_of(tokenizer, len(tokenizer))
    assert made is not None
    assert int(made.newlines[tokenizer(text)["input_ids"]].astype(np.int64).sum()) == 4


@pytest.mark.parametrize("vocab_size", [1, 100, 5000])
def test_models_know_fewer_or_more_tokens_than_tokenizers(vocab_size: int) -> None:
    made = wording_of(byte_level(300), vocab_size)
    assert made is not None and made.kinds.shape == made.newlines.shape == (vocab_size,)


def test_tokenizers_that_cannot_name_their_tokens_say_nothing() -> None:
    class Unsized:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["a" for _ in ids]

    assert wording_of(None, 10) is None
    assert wording_of(object(), 10) is None
    assert wording_of(Unsized(), 10) is None
