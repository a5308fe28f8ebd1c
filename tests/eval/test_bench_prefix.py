"""The measurement of second questions: its document, and one request of it."""

import pytest

from longgraft.eval.bench_prefix import NEW, ask, document
from tests.engines import engine_for, prompt_of
from tests.small_tokenizers import byte_level


def test_a_document_has_as_many_tokens_as_asked() -> None:
    tokenizer = byte_level(300)
    assert document(tokenizer, 3000)[:1000] == document(tokenizer, 1000)
    with pytest.raises(SystemExit, match="expected 1000000000 or more"):
        document(lambda _: {"input_ids": [1]}, 10**9)


def test_a_second_question_reads_what_is_new() -> None:
    engine, text = engine_for(), prompt_of(300)
    for question, rows in (([1, 2], 0), ([3, 4], 300)):
        seconds, tokens, stats = ask(engine, text + question)
        assert seconds > 0 and len(tokens) == NEW and stats["prefix_rows"] == rows
