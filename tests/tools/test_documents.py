"""Documents of every kind, with pages and lines, and what fits of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.eval.tiny_pdf import LINES, pages_of, pdf_of
from longgraft.tools.documents import Document, fitting, read_documents

PAGES = ["The first page (with signs \\ and parentheses)\nhas two lines.", "The second page: naïve façade."]


def words(text: str) -> int:
    return len(text.split())


def test_a_pdf_has_pages(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.PDF").write_bytes(pdf_of(PAGES))
    (document,) = read_documents([str(tmp_path / "a.PDF")])
    assert document.is_paged and [page.strip() for page in document.pages] == PAGES
    assert document.text.startswith(f"Document: {tmp_path / 'a.PDF'}\n\n[page 1]\nThe first page")
    assert "\n[page 2]\nThe second" in document.text
    assert document.first(1).pages == document.pages[:1]


def test_pages_are_wrapped_and_counted() -> None:
    pages = pages_of("word " * 2000 + "\n\nend", 3)
    assert [page.count("\n") + 1 for page in pages[:2]] == [LINES, LINES]
    assert " ".join(" ".join(pages).split()).startswith("word word") and len(pages) == 3


def test_texts_and_pages_of_the_web(tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    (tmp_path / "a.md").write_bytes(b"# One\r\n\r\ntwo\x0cstill two\r\n")
    (tmp_path / "b.html").write_text("<h1>Title</h1><p>Some <b>bold</b> text</p>")
    text, page = read_documents([str(tmp_path / "a.md"), str(tmp_path / "b.html")])
    assert text.units == ("# One\n", "\n", "two\x0cstill two\n") and not text.is_paged
    assert "Some bold text" in page.text and "<" not in page.text
    assert text.first(2).pages == ("# One\n\n",)


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pypdf")
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("data.bin").write_bytes(b"\0\1\2")
    Path("empty.txt").write_text(" \n")
    Path("scan.pdf").write_bytes(pdf_of(["", ""]))
    Path("broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    for name, said in [
        ("gone.txt", "gone.txt: cannot be read .No such file"),
        ("folder", "folder is a folder: name the files in it"),
        ("data.bin", "data.bin: binary"),
        ("empty.txt", "empty.txt: no text was found in it"),
        ("scan.pdf", "scan.pdf: no text was found in it .a scanned PDF has none"),
        ("broken.pdf", "broken.pdf: PDF that cannot be read"),
    ]:
        with pytest.raises(GraftError, match=said):
            read_documents([name])
    with pytest.raises(GraftError, match="a is given twice"):
        read_documents(["a", "b", "a"])


def test_what_fits_is_whole_units_from_the_first_on() -> None:
    paged = Document("a.pdf", ("one two three", "four five six", "seven"), is_paged=True)
    plain = Document("b.txt", ("alpha beta\ngamma delta\n",))
    assert fitting([paged, plain], 1000, words) == ([paged, plain], "a.pdf and b.txt")
    kept, said = fitting([paged, plain], words(paged.text) + words(plain.text) - 1, words)
    assert said == "a.pdf and b.txt up to line 1 of 2" and kept == [paged, plain.first(1)]
    kept, said = fitting([paged, plain], words(paged.text) - 1, words)
    assert said == "a.pdf up to page 2 of 3" and kept == [paged.first(2)]
    assert fitting([paged, plain], 3, words) == ([], "nothing")


@given(st.lists(st.text("ab \n", min_size=1, max_size=60), min_size=1, max_size=3), st.integers(0, 60))
def test_what_fits_never_is_too_much(texts: list[str], room: int) -> None:
    documents = [Document(f"{i}", (text,)) for i, text in enumerate(texts)]
    kept, _ = fitting(documents, room, len)
    assert sum(len(one.text) for one in kept) <= room
    for one, whole in zip(kept, documents):
        assert whole.pages[0].startswith(one.pages[0])
