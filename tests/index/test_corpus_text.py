"""Reading text: encodings, HTML, PDF, and what is no text."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgraft.index.corpus_text import Skipped, read_text
from tests.index.corpus_cases import QUICK

TEXT = "Grüße, naïve café — “quoted” 日本語\nsecond line\n"


def read(data: bytes, name: str = "file.txt") -> str:
    return read_text(Path(name), data)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_with_and_without_a_mark(encoding: str) -> None:
    assert read(TEXT.encode(encoding)) == TEXT


@pytest.mark.parametrize("mark", ["utf-16-be", "utf-32-be"])
def test_big_endian_marks(mark: str) -> None:
    assert read(("\ufeff" + TEXT).encode(mark)) == TEXT


def test_older_encodings() -> None:
    assert read("Grüße “naïve”\n".encode("cp1252")) == "Grüße “naïve”\n"
    declared = "# -*- coding: shift_jis -*-\nname = '日本語'\n"
    assert read(declared.encode("shift_jis")) == declared
    assert read(b"# coding: no-such-codec\nna\xefve\n") == "# coding: no-such-codec\nnaïve\n"
    odd = b"# coding: unicode_escape\n\\ud800 \xef\n"
    assert read(odd) == "# coding: unicode_escape\n? ï\n"
    assert read(b"# coding: hex\nna\xefve\n").endswith("naïve\n")


@pytest.mark.parametrize(
    "data", [b"a\0b", b"\x89PNG\r\n\x1a\n\0", bytes(range(128, 256)) * 4 + bytes(range(1, 32)) * 9]
)
def test_what_is_no_text(data: bytes) -> None:
    with pytest.raises(Skipped, match=r"^binary$"):
        read(data)


@pytest.mark.parametrize("data", [b"", b" \n\t\r\n", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_what_is_empty(data: bytes) -> None:
    with pytest.raises(Skipped, match=r"^empty$"):
        read(data)


def test_line_ends_become_line_feeds() -> None:
    assert read(b"a\r\nb\rc\nd\n\r\n") == "a\nb\nc\nd\n\n"


PAGE = """<!DOCTYPE html><html><head><title>The  title</title><style>p {color: red}</style>
<script>var hidden = "<p>no</p>";</script></head><body><!-- comment -->
<h1>Heading &amp; more</h1><p>One <b>bold</b> word,
  wrapped.</p><ul><li>first</li><li>second</li></ul><pre>  indented
    code</pre><table><tr><th>a</th><td>b</td></tr></table>line<br>break<template>no</template></body></html>"""


def test_html_is_read_as_it_looks() -> None:
    assert read(PAGE.encode(), "page.HTML").split("\n") == [
        "The title", "", "Heading & more", "", "One bold word, wrapped.", "", "first", "", "second", "", "  indented",
        "    code", "", "a b", "", "line", "", "break", "",
    ]  # fmt: skip


def test_html_in_its_declared_encoding() -> None:
    page = '<html><meta charset="iso-8859-5"><p>привет</p>'.encode("iso-8859-5")
    assert read(page, "a.htm") == "привет\n"
    assert read("\ufeff<p>日本</p>".encode("utf-16-le"), "a.html") == "日本\n"


@pytest.mark.parametrize(
    "data", [b"<" * 1000 + b"p", b"<p" + b"<a>" * 20_000 + b"deep", b"<![if x]>t<![endif]>", b"&#99999999999; t"]
)
def test_broken_html_is_read_somehow(data: bytes) -> None:
    assert read(data, "a.html")


def test_halves_of_surrogate_pairs_do_not_come_through() -> None:
    read(b"<p>a &#xD800; b &#55296; c</p>", "a.html").encode()


def test_html_without_text() -> None:
    with pytest.raises(Skipped, match="empty"):
        read(b"<html><script>x</script></html>", "a.html")
    with pytest.raises(Skipped, match="binary"):
        read(b"<html>\0</html>", "a.html")


def pdf(*lines: str) -> bytes:
    """Return a PDF with a page for each line."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(lines)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(lines)} >>".encode())
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, line in enumerate(lines):
        content = f"BT /F1 12 Tf 72 720 Td ({line}) Tj ET".encode()
        about = "/Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< {about} /Contents {5 + 2 * i} 0 R >>".encode())
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
    data, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    begin = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(data))
    return data + begin + table + trailer


def test_pdf() -> None:
    assert (
        read(pdf("Hello from page one", "and page two"), "a.PDF").split() == "Hello from page one and page two".split()
    )


@pytest.mark.parametrize("data", [b"", b"%PDF-1.4\n", b"no PDF", pdf("x")[:200]])
def test_broken_pdf(data: bytes) -> None:
    with pytest.raises(Skipped, match="PDF that cannot be read"):
        read(data, "a.pdf")


@QUICK
@given(st.binary(max_size=300), st.sampled_from(["a.txt", "a.html", "a.pdf"]))
def test_any_bytes_are_text_or_a_reason(data: bytes, name: str) -> None:
    try:
        text = read(data, name)
    except Skipped as reason:
        assert str(reason) in ("binary", "empty", "PDF that cannot be read")
    else:
        assert text.strip() and "\r" not in text
        text.encode()


@pytest.mark.parametrize(
    ("name", "package", "called"), [("a.html", "bs4", "beautifulsoup4"), ("a.pdf", "pypdf", "pypdf")]
)
def test_a_missing_package_is_a_reason(name: str, package: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def without(wanted: str, *more: Any, **options: Any) -> Any:
        if wanted == package:
            raise ImportError(wanted)
        return true_import(wanted, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Skipped, match=f"not installed: {called}"):
        read(b"<p>x", name)
