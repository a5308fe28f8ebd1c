"""Marks stand round quotations, however the tokens come, and take nothing from the text."""

import io
import re

import pytest

from longgraft.tools.documents import Document
from longgraft.tools.marked_screen import BRACKETS, COLOURS, NO_MARKS, MarkedScreen, Marks, marks_for
from longgraft.tools.quotes import Quotable
from tests.small_tokenizers import SAMPLES, byte_level
from tests.tools.test_quotes import OTHER, TEXT

TOKENIZER = byte_level()
SOURCE = Quotable([Document("log.txt", (TEXT,)), Document("other.md", (OTHER,))])
ANSWER = f"Yes: the height of the waves and each ship that passed. Café — {OTHER.strip()} So it goes"


def shown(answer: str, size: int, marks: Marks) -> str:
    out = io.StringIO()
    screen = MarkedScreen(out, TOKENIZER, [], (), source=SOURCE, marks=marks)
    ids = TOKENIZER(answer)["input_ids"]
    for group in (ids[i : i + size] for i in range(0, len(ids), size)):
        screen.push(group, [0] * len(group))
    screen.finish()
    return out.getvalue()


def test_quotations_are_marked() -> None:
    assert shown(ANSWER, 1, BRACKETS) == (
        "Yes: ⟦the height of the waves and each ship that passed.⟧ [log.txt:2] Café — "
        f"⟦{OTHER.strip()}⟧ [other.md:1] So it goes\n"
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_how_tokens_come_makes_no_difference(size: int) -> None:
    assert shown(ANSWER, size, BRACKETS) == shown(ANSWER, 1, BRACKETS)


@pytest.mark.parametrize("answer", [ANSWER, OTHER, TEXT, *SAMPLES])
@pytest.mark.parametrize("size", [1, 5])
def test_without_marks_it_is_the_text(answer: str, size: int) -> None:
    plain = shown(answer, size, NO_MARKS)
    assert plain == (answer if answer.endswith("\n") or not answer else answer + "\n")
    coloured = shown(answer, size, COLOURS)
    bare = re.sub(r" \x1b\[2m\[[^]]*\]\x1b\[0m|\x1b\[\d+m", "", coloured)
    assert bare.rstrip("\n") == plain.rstrip("\n")


def test_text_is_not_held_back_for_long() -> None:
    out = io.StringIO()
    screen = MarkedScreen(out, TOKENIZER, [], (), source=SOURCE, marks=BRACKETS)
    pending = []
    written = ""
    for token in TOKENIZER(ANSWER)["input_ids"]:
        screen.push([token], [0])
        written += TOKENIZER.decode([token])
        pending.append(len(written.split()) - len(re.sub(r" \[[^]]*\]", "", out.getvalue()).split()))
    assert max(pending) <= 9


def test_marks_by_where_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert marks_for(io.StringIO()) is BRACKETS
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert marks_for(io.StringIO()) is COLOURS
    monkeypatch.setenv("NO_COLOR", "1")
    assert marks_for(io.StringIO()) is BRACKETS
