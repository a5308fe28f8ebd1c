"""Chooses the files of a repository that a completion should see: those that are imported, then those nearby.

Knows paths and texts of source files, no model. Imports are read by their words alone, whatever the language: the parts
of a name in a line that imports are looked for at the end of paths. So half-written files serve too. Ties go by path:
the same repository gives the same files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from longgraft.index.corpus_files import walk
from longgraft.index.corpus_text import Skipped, decode

MAX_BYTES = 1 << 20  # larger source files are generated
NEAR = 2  # folders up and down to a file that is not imported
LARGEST_SHARE = 2  # no file takes more than this part of the tokens
LEAST = 64  # fewer tokens of a file say nothing
# Lines that bring in other files: Python, JavaScript, Go, Rust, Java, Kotlin, C, C#, Ruby, PHP.
IMPORT = re.compile(
    r"""^\s*(?:
        from\s+(?P<module>[.\w]+)\s+import\s+(?:\((?P<inside>[^)]*)|(?P<members>[^\n\#(]*))
      | (?:export|import)\b.*?\bfrom\s+['"](?P<script>[^'"]+)['"]
      | .*?\b(?:require|require_relative|import)\s*\(?\s*['"](?P<quoted>[^'"]+)['"]
      | \#\s*include\s+["<](?P<header>[^">]+)[">]
      | (?:pub\s+)?(?:import|use|mod|using|package)\s+(?:static\s+)?(?P<name>[\w.:\\/]+)
    )""",
    re.VERBOSE | re.MULTILINE,
)
# Files that stand for their folder.
FOLDER_FILES = frozenset({"__init__", "index", "mod", "lib", "main"})
Count = Callable[[str], int]


def repository_files(root: Path, leave_out: Path) -> list[str]:
    """Return the paths in a repository, relative and sorted; what its ignore files say is heeded."""
    found = (one.path for one in walk([str(root)], leave_out) if not one.reason)
    return sorted(path.relative_to(root).as_posix() for path in found)


def imported(path: str, text: str) -> list[tuple[str, ...]]:
    """Return the names that a file imports, each as the last parts of a path without suffix, in order, each once."""
    names = [parts for match in IMPORT.finditer(text) for parts in _names(PurePosixPath(path).parent, match)]
    return list(dict.fromkeys(parts for parts in names if parts))


def _names(folder: PurePosixPath, match: re.Match[str]) -> Iterator[tuple[str, ...]]:
    found = match.groupdict()
    if module := found["module"]:
        dots = len(module) - len(module.lstrip("."))
        above = folder.parts[: len(folder.parts) - dots + 1] if dots else ()
        base = (*above, *(part for part in module.strip(".").split(".") if part))
        for member in re.findall(r"\w+", found["inside"] or found["members"] or ""):
            yield (*base, member)
        yield base
    elif name := found["script"] or found["quoted"] or found["header"]:
        parts = _joined(folder, name) if name.startswith(".") else tuple(re.split(r"[/\\]", name))
        yield (*parts[:-1], PurePosixPath(parts[-1]).stem) if parts else ()
    elif name := found["name"]:
        yield tuple(part for part in re.split(r"\.|::|\\|/", name) if part not in ("", "crate", "self", "super"))


def _joined(folder: PurePosixPath, name: str) -> tuple[str, ...]:
    parts = list(folder.parts)
    for part in name.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", ".", ".."):
            parts.append(part)
    return tuple(parts)


def ranked(path: str, text: str, files: Sequence[str]) -> list[str]:
    """Return the related ones of `files`, the most related first.

    Imported files in the order of their import lines; then those of the same name but for `test`; then those of the
    same suffix at most `NEAR` folders away, nearest first. Each group by distance and path.
    """
    own = PurePosixPath(path)
    order = {parts: place for place, parts in enumerate(imported(path, text))}
    found: list[tuple[int, int, int, str]] = []
    for file in files:
        other = PurePosixPath(file)
        if file == path:
            continue
        steps, place = _distance(own, other), _place(other, order)
        if place is not None:
            found.append((0, place, steps, file))
        elif _bare(other.stem) == _bare(own.stem) and other.suffix:
            found.append((1, 0, steps, file))
        elif other.suffix == own.suffix and steps <= NEAR:
            found.append((2, 0, steps, file))
    return [file for *_, file in sorted(found)]


def _place(path: PurePosixPath, order: dict[tuple[str, ...], int]) -> int | None:
    """Return which import, by number, a file answers; None if none.

    Its path ends with the whole name, or, in a repository that lies within a package, the name with the whole path.
    """
    parts = (*path.parts[:-1], path.stem)
    if path.stem in FOLDER_FILES and len(parts) > 1:
        parts = parts[:-1]
    places = [order[parts[i:]] for i in range(len(parts)) if parts[i:] in order]
    places += [place for name, place in order.items() if name[-len(parts) :] == parts]
    return min(places, default=None)


def _distance(one: PurePosixPath, other: PurePosixPath) -> int:
    """Return how many folders lie between two files: up to the common one and down again."""
    a, b = one.parts[:-1], other.parts[:-1]
    common = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return len(a) + len(b) - 2 * common


def _bare(stem: str) -> str:
    return re.sub(r"(^test[-_.]?|[-_.](test|spec)$)", "", stem.lower())


def chosen(root: Path, files: Sequence[str], budget: int, count: Count) -> list[tuple[str, str]]:
    """Return (path, text) of as many of `files` as `budget` tokens hold, the most related last, next to the cursor.

    A file too large for its share is cut at a line; files that cannot be read are passed over.
    """
    found: list[tuple[str, str]] = []
    for file in files:
        if budget < LEAST:
            break
        text = _text(root / file)
        text = _first_lines(text, min(budget, max(budget // LARGEST_SHARE, LEAST)), count)
        if text.strip():
            found.append((file, text))
            budget -= count(text) + count(file) + 2
    return found[::-1]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return "" if len(data) > MAX_BYTES else decode(data).replace("\r\n", "\n")
    except (OSError, Skipped):
        return ""


def _first_lines(text: str, most: int, count: Count) -> str:
    """Return the first lines of a text that have at most `most` tokens."""
    # Tokens of source code have three or four characters on average: this is far more than fits.
    if len(text) > 16 * most:
        text = text[: text.rfind("\n", 0, 16 * most) + 1]
    while text and (size := count(text)) > most:
        shorter = text[: min(len(text) - 1, len(text) * most // size)]
        text = shorter[: shorter.rfind("\n") + 1]
    return text
