"""Quotations: what counts as one, and the place that is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.tools.documents import Document
from longgraft.tools.quotes import FEWEST_WORDS, LEXEME, SHORTEST, Quotable, Quote, QuoteFinder

TEXT = """The keeper of the lighthouse wrote every evening into a large book.
He noted the wind, the height of the waves and each ship that passed.
On the third of May nothing at all is written there, and nobody knows why.
"""
OTHER = "A ship that passed in the night was never seen again by the keeper of the lighthouse at all.\n"
DOCUMENTS = [Document("log.txt", (TEXT,)), Document("other.md", (OTHER,))]


def quotes(answer: str, documents: list[Document] = DOCUMENTS) -> list[Quote]:
    finder = QuoteFinder(Quotable(documents))
    found = [finder.push(match[0], match.start()) for match in LEXEME.finditer(answer)]
    return [one for one in [*found, finder.finish()] if one is not None]


def test_a_quotation_is_found_with_its_lines() -> None:
    answer = 'It says: "the height of the waves and each ship that passed.\nOn the third of May" it was calm.'
    (quote,) = quotes(answer)
    assert answer[quote.begin : quote.end].startswith("the height") and answer[: quote.end].endswith("third of May")
    assert (quote.document, quote.lines, quote.pages, quote.others) == ("log.txt", (2, 3), None, 0)
    assert quote.label == "log.txt:2-3"


def test_blanks_and_typographic_signs_make_no_difference() -> None:
    document = Document("a.txt", ("She said: “don’t open the window\nbefore the ﬁrst of\n\nMay” – and left.\n",))  # noqa: RUF001
    (quote,) = quotes('He wrote: "don\'t open the window before the first of May" - and left.', [document])
    assert quote.lines == (1, 4) and quote.begin == 8


def test_pages_are_named_and_broken_words_joined() -> None:
    pages = (
        "Nothing of importance here.",
        "It was a bright day in the exam-\nple, and the clocks",
        "were striking now.",
    )
    (quote,) = quotes("a bright day in the example, and the clocks were striking", [Document("r.pdf", pages, True)])
    assert (quote.pages, quote.lines, quote.label) == ((2, 3), None, "r.pdf p. 2-3")


def test_turns_of_phrase_and_signs_are_none() -> None:
    assert quotes("The keeper of the lighthouse wrote something else, the wind and each ship.") == []
    assert quotes("| | | | | | | | | | | |", [Document("t.md", ("| | | | | | | | | | | | | |\n",))]) == []


def test_documents_do_not_run_into_one_another() -> None:
    whole = f"{TEXT}{OTHER}"
    found = quotes(whole)
    assert [one.document for one in found] == ["log.txt", "other.md"]
    assert whole[found[0].begin : found[0].end] == TEXT.strip() and found[1].lines == (1, 1)


def test_the_longest_end_of_a_short_match_goes_on() -> None:
    """ "the keeper of the lighthouse" stands in both; what follows decides."""
    (quote,) = quotes("Never seen: by the keeper of the lighthouse at all.")
    assert (quote.document, quote.begin) == ("other.md", len("Never seen: "))
    (quote,) = quotes("seen by The keeper of the lighthouse wrote every evening")
    assert (quote.document, quote.begin) == ("log.txt", len("seen by "))


def test_more_places_are_counted_and_the_first_named() -> None:
    page = "Annual report of the company for the year. "
    document = Document("r.pdf", ("Preface.", page + "One.", page + "Two.", page + "Three."), True)
    (quote,) = quotes("Annual report of the company for the year", [document])
    assert quote.label == "r.pdf p. 2 and 2 more"


@given(st.integers(0, 60), st.integers(SHORTEST, 30), st.sampled_from(["", "Xx yy zz: ", "keeper wrote "]))
def test_every_passage_is_found(begin: int, size: int, before: str) -> None:
    lexemes = list(LEXEME.finditer(TEXT))
    part = lexemes[begin : begin + size]
    if len(part) < SHORTEST or sum(one[0].isalnum() for one in part) < FEWEST_WORDS:
        return
    passage = TEXT[part[0].start() : part[-1].end()]
    answer = f"{before}{passage} qqq"
    (quote,) = quotes(answer)
    assert answer[quote.begin : quote.end].endswith(passage)
    assert quote.lines is not None
    assert quote.lines[1] == 1 + TEXT[: part[-1].start()].count("\n")


@pytest.mark.parametrize("documents", [[], [Document("a", ("",))]])
def test_nothing_to_quote(documents: list[Document]) -> None:
    assert quotes(TEXT, documents) == []
