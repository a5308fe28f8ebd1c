"""Tokenising for a corpus with real tokenizers: ids, hashes, lines."""

from __future__ import annotations

from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.index.corpus_tokens import Encoder, text_hash, tokenizer_hash
from tests import small_tokenizers
from tests.index.corpus_cases import Characters

MAKERS = [small_tokenizers.byte_level, small_tokenizers.sentencepiece, small_tokenizers.cleaning]
TEXTS = [
    *(text for text in small_tokenizers.SAMPLES if text),
    "a\n\n\nb\n \n\tc\n",
    "\n",
    "x" * 500,
    "Ċ is no line break\n",
]


@pytest.mark.parametrize("make", MAKERS)
def test_ids_are_the_tokenizers_own(make: Any) -> None:
    tokenizer = make()
    encoder = Encoder(tokenizer)
    for text, document in zip(TEXTS, encoder.encode(TEXTS)):
        assert document.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert document.hash == text_hash(text)
    assert encoder.vocab_size > max(int(one.token_ids.max(initial=0)) for one in encoder.encode(TEXTS))


@pytest.mark.parametrize("make", MAKERS[:2])
def test_each_line_break_is_in_its_token(make: Any) -> None:
    tokenizer = make()
    for text, document in zip(TEXTS, Encoder(tokenizer).encode(TEXTS)):
        assert len(document.breaks) == text.count("\n")
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        places = [i for i, c in enumerate(text) if c == "\n"]
        for place, token in zip(places, document.breaks.tolist()):
            begin, end = encoding.offsets[token]
            assert begin <= place < max(end, begin + 1)


def test_calls_do_not_change_the_hash_and_settings_do_not_change_the_ids() -> None:
    tokenizer = small_tokenizers.byte_level()
    before = tokenizer_hash(tokenizer)
    assert tokenizer_hash(small_tokenizers.byte_level()) == before == tokenizer_hash(tokenizer.backend_tokenizer)
    tokenizer.pad_token = "<|end|>"
    tokenizer(["a", "b c d e"], padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer_hash(tokenizer) == before
    (document,) = Encoder(tokenizer).encode(["one longer text"])
    assert len(document.token_ids) > 2
    assert tokenizer.backend_tokenizer.truncation is not None


def test_other_tokenizers_have_other_hashes() -> None:
    hashes = {tokenizer_hash(make()) for make in MAKERS}
    changed = small_tokenizers.byte_level()
    changed.add_tokens(["<new>"])
    assert len(hashes | {tokenizer_hash(changed), tokenizer_hash(Characters())}) == 5


@pytest.mark.parametrize("tokenizer", [None, object(), "name", lambda text: [1]])
def test_what_is_no_fast_tokenizer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(GraftError, match="has no fast backend"):
        tokenizer_hash(tokenizer)
