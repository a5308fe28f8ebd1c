"""Reads the text of one file: plain text in the usual encodings, HTML, PDF. Knows bytes and names, no tokens.

What cannot be read is a reason, not an error: one odd file must not stop a corpus. Text is what is read aloud from a
page: of HTML its visible text with a line for each block, of PDF what pypdf extracts, page by page.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HTML = frozenset({".html", ".htm", ".xhtml"})
PDF = frozenset({".pdf"})
MARKS = [  # longest first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
]
DECLARED = re.compile(rb"coding[:=][ \t]*([-\w.]{1,40})")  # PEP 263, which editors honour in any file
HIDDEN = frozenset({"script", "style", "template", "noscript", "svg", "head"})
BLOCKS = frozenset(
    "address article aside blockquote body br caption center dd details dialog div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hr html legend li main menu nav ol option p pre section summary table tbody "
    "tfoot thead tr ul".split()
)
CELLS = frozenset({"td", "th"})
PREFORMATTED = frozenset({"pre", "textarea"})
BINARY = "binary"
EMPTY = "empty"
BAD_PDF = "PDF that cannot be read"
NEEDS = "needs a package that is not installed: "


class Skipped(Exception):
    """The file has no text for a corpus; the message is the reason, the same for all files of its kind."""


def read_text(path: Path, data: bytes) -> str:
    """Return a file's text, lines ended by a line feed; raises `Skipped`."""
    return "\n\n".join(read_pages(path, data))


def read_pages(path: Path, data: bytes) -> list[str]:
    """Return the text of each page of a PDF, of anything else as one page; otherwise as `read_text`."""
    kind = path.suffix.lower()
    pages = _pdf(data) if kind in PDF else [_html(data) if kind in HTML else decode(data)]
    # Entities, PDF fonts and odd codecs can give halves of surrogate pairs, which no tokenizer takes.
    pages = [page.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n") for page in pages]
    if not any(page.strip() for page in pages):
        raise Skipped(EMPTY)
    return pages


def decode(data: bytes) -> str:
    """Return the text of bytes: by their mark, as UTF-8, as they declare themselves, or as Windows-1252."""
    return decoded(data)[0]


def decoded(data: bytes) -> tuple[str, str]:
    """Return the text of bytes and the name of their encoding; see `decode`."""
    for mark, name in MARKS:
        if data.startswith(mark):
            return data.decode(name, "replace"), name
    if b"\0" in data:
        raise Skipped(BINARY)
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return _decoded_otherwise(data)


def _decoded_otherwise(data: bytes) -> tuple[str, str]:
    declared = DECLARED.search(b"\n".join(data.splitlines()[:2]))
    if declared:
        name = declared[1].decode("ascii")
        try:
            text = data.decode(name)
            return (text if isinstance(text, str) else ""), name
        except (LookupError, ValueError):
            pass
    text = data.decode("cp1252", "replace")
    odd = sum(map(text.count, (chr(code) for code in (*range(9), *range(14, 27), *range(28, 32), 0xFFFD))))
    if odd * 50 > len(text):
        raise Skipped(BINARY)
    return text, "cp1252"


def _html(data: bytes) -> str:
    try:
        import bs4
    except ImportError:
        raise Skipped(NEEDS + "beautifulsoup4") from None
    if b"\0" in data and not any(data.startswith(mark) for mark, _ in MARKS):
        raise Skipped(BINARY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # XML read as HTML, a page that looks like a file name: it is read all the same
        soup = bs4.BeautifulSoup(data, "html.parser")
    title = " ".join(soup.title.get_text(" ").split()) if soup.title else ""
    pieces = [title, "\n"]
    for piece, is_pre in _pieces(soup, bs4):
        begins_line = pieces[-1][-1:] in ("\n", " ")
        piece = piece if is_pre else re.sub(r"\s+", " ", piece)
        pieces.append(piece.lstrip(" ") if begins_line and not is_pre else piece)
        if not pieces[-1]:
            pieces.pop()
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", "".join(pieces))).strip("\n") + "\n"


def _pieces(soup: Any, bs4: Any) -> Iterator[tuple[str, bool]]:
    """Yield (visible text, is it preformatted) in order, line feeds around blocks. No recursion: pages nest deeply."""
    stack: list[tuple[Any, bool]] = [(child, False) for child in reversed(soup.contents)]
    while stack:
        node, is_pre = stack.pop()
        if isinstance(node, str):
            # Comments, declarations and the like are other subclasses.
            if type(node) in (str, bs4.NavigableString, bs4.CData):
                yield str(node), is_pre
        elif node.name not in HIDDEN:
            is_pre = is_pre or node.name in PREFORMATTED
            around = "\n" if node.name in BLOCKS else " " if node.name in CELLS else ""
            if around:
                yield around, around == "\n"
                stack.append((around, around == "\n"))
            stack += [(child, is_pre) for child in reversed(node.contents)]


def _pdf(data: bytes) -> list[str]:
    try:
        import pypdf
    except ImportError:
        raise Skipped(NEEDS + "pypdf") from None
    logger = logging.getLogger("pypdf")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = pypdf.PdfReader(io.BytesIO(data))
            return [page.extract_text() for page in reader.pages]
    except Exception as error:
        # Broken files raise whatever the parser stumbled over; an encrypted one too.
        raise Skipped(BAD_PDF) from error
    finally:
        logger.setLevel(level)
