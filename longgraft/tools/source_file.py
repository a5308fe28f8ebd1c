"""A file that is to be rewritten: read so that it can be written back in its own encoding and with its own line ends.

Knows files, no model. The one idea: whatever is not certain to come back byte for byte is refused before anything is
done, and whoever looks at the file sees the old version or the new one, never a part.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from longgraft.config import GraftError
from longgraft.index.corpus_text import Skipped, decoded

LINE = re.compile(r"([^\n]*?)(\r?\n)|([^\n]+)$")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """`name`: as it was given. `text`: lines ended by a line feed. `raw`: as it is; `data`: its bytes."""

    name: str
    path: Path
    text: str
    raw: str
    data: bytes
    encoding: str

    def restored(self, text: str) -> str:
        """Return a new text with the line ends of the old one; see `with_line_ends`. The last line's end stays too."""
        if self.text and not self.text.endswith("\n"):
            text = text.removesuffix("\n")
        elif text and not text.endswith("\n"):
            text += "\n"
        return with_line_ends(self.raw, text)


def read_source(name: str) -> SourceFile:
    """Return a file's text; a `GraftError` for one that cannot be read or written back."""
    path = Path(name)
    try:
        path = path.resolve(strict=True)  # a link stays one, what it points to is rewritten
        if not stat.S_ISREG(path.stat().st_mode):
            raise GraftError(f"{name} is not a regular file: expected one to edit")
        data = path.read_bytes()
        raw, encoding = decoded(data)
    except (OSError, RuntimeError) as error:
        raise GraftError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except Skipped as reason:
        raise GraftError(f"{name}: {reason}; expected a text") from None
    try:
        is_same = raw.encode(encoding) == data
    except (UnicodeError, LookupError):
        is_same = False
    if not is_same or ("\r" in raw and "\n" not in raw):
        raise GraftError(
            f"{name}: read as {encoding} it could not be written back as it is; convert it to UTF-8 with LF first"
        )
    return SourceFile(name, path, raw.replace("\r\n", "\n"), raw, data, encoding)


def write_source(source: SourceFile, raw: str) -> None:
    """Put `raw` in the file's place at once, permissions kept; refused if the file is no longer what was read."""
    try:
        data = raw.encode(source.encoding)
    except UnicodeEncodeError as error:
        raise GraftError(
            f"{source.name}: the answer has the character {raw[error.start]!r}, which {source.encoding} has not; "
            "convert the file to UTF-8 first"
        ) from error
    try:
        source.path.stat()
        if not os.access(source.path, os.W_OK):
            raise GraftError(f"{source.name} may not be written: change its permissions, or apply the diff yourself")
        _replace(source, data)
    except OSError as error:
        raise GraftError(f"{source.name}: cannot be written ({error.strerror or error})") from error


def _replace(source: SourceFile, data: bytes) -> None:
    path, about = source.path, source.path.stat()
    handle, part = tempfile.mkstemp(prefix=".longgraft-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError, AttributeError):  # another's file: it becomes ours where that is all we may
            os.chown(part, about.st_uid, about.st_gid)
        Path(part).chmod(stat.S_IMODE(about.st_mode))
        if path.read_bytes() != source.data:
            raise GraftError(f"{source.name} was changed meanwhile: nothing was written; run the edit again")
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)


def with_line_ends(old: str, text: str) -> str:
    """Return `text`, lines ended by a line feed, with the line ends of `old`.

    Where `old` mixes them, lines that stay keep theirs and new ones take that of the line before.
    """
    before = [(match[1], match[2]) for match in LINE.finditer(old) if match[2]]
    ends = {end for _, end in before}
    if len(ends) < 2:
        return text.replace("\n", ends.pop()) if ends else text
    lines = [match[1] if match[2] else match[3] for match in LINE.finditer(text)]
    kept: dict[int, str] = {}
    matcher = SequenceMatcher(None, [line for line, _ in before], lines, autojunk=False)
    for block in matcher.get_matching_blocks():
        kept |= {block.b + i: before[block.a + i][1] for i in range(block.size)}
    end, pieces = before[0][1], []
    for number, line in enumerate(lines):
        end = kept.get(number, end)
        pieces.append(line + end)
    whole = "".join(pieces)
    return whole if text.endswith("\n") else whole.removesuffix(end)
