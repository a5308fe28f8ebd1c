"""A small PDF of plain text, for tests and measurements: one font, one column, no library.

Knows the format's few objects that this takes: catalogue, page tree, pages, their contents, a font every reader has.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

LINES, WIDTH = 40, 80  # of a page
SIZE, LEADING, LEFT, TOP = 10, 14, 60, 780  # points, on A4


def pages_of(text: str, count: int) -> list[str]:
    """Return the first `count` pages of a text, its paragraphs wrapped."""
    lines = [line for part in text.split("\n\n") for line in [*textwrap.wrap(part, WIDTH), ""]]
    return ["\n".join(lines[i : i + LINES]) for i in range(0, LINES * count, LINES) if lines[i : i + LINES]]


def pdf_of(pages: Sequence[str]) -> bytes:
    """Return a PDF with these pages; characters outside Latin-1 become question marks."""
    numbers = [4 + 2 * i for i in range(len(pages))]
    kids = " ".join(f"{number} 0 R" for number in numbers)
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, page in zip(numbers, pages):
        content = _content(page)
        bodies.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {number + 1} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        bodies.append(b"<< /Length %d >>\nstream\n%b\nendstream" % (len(content), content))
    return _file(bodies)


def _content(page: str) -> bytes:
    lines = [f"BT /F1 {SIZE} Tf {LEADING} TL {LEFT} {TOP} Td".encode()]
    for line in page.split("\n"):
        text = line.encode("latin-1", "replace")
        for sign in (b"\\", b"(", b")"):
            text = text.replace(sign, b"\\" + sign)
        lines.append(b"(%b) Tj T*" % text)
    return b"\n".join([*lines, b"ET"])


def _file(bodies: Sequence[bytes]) -> bytes:
    """Return header, numbered objects, the table of where each begins, and the trailer."""
    whole, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(whole))
        whole += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(bodies) + 1
    end = b"xref\n0 %d\n0000000000 65535 f \n%btrailer\n<< /Size %d /Root 1 0 R >>\n" % (size, table, size)
    return whole + end + b"startxref\n%d\n%%%%EOF\n" % len(whole)
