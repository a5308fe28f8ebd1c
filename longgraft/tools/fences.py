"""Finds the file in a model's answer: the one code block that is it, or the reason why there is none to be trusted.

Knows texts alone. What is written over a file must be whole, so everything doubtful is refused: a block that was never
closed, one that is not the whole, parts left out with a remark.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from longgraft.tools.lines import lines_of

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*?)[ \t]*\n?")
# Remarks in place of code: dots together with words that say something was there.
LEFT_OUT = re.compile(
    r"(\.\.\.|…).*\b(rest|remain\w*|existing|unchanged|same|previous|other)\b"
    r"|\b(rest|remain\w*|existing|unchanged|same)\b.*(\.\.\.|…)",
    re.IGNORECASE,
)
# An answer without any block is the file if it holds at least this part of the file's lines.
ALIKE = 0.5
# Lines of the file outside the block say that it closed too early, or opened too late; shorter ones ("}") say nothing.
TELLING = 4
# A block that ends with so many last lines of the file is the whole of it.
TAIL = 3


class Unusable(Exception):
    """The answer holds no file that could be written; the message says why."""


class Fence(NamedTuple):
    """A line of an answer that opens or closes a code block."""

    line: int
    signs: str
    info: str

    def is_like(self, other: Fence) -> bool:
        """Tell whether this one can close what the other opened, its language aside."""
        return self.signs[0] == other.signs[0] and len(self.signs) >= len(other.signs)


class Block(NamedTuple):
    """Lines `first` .. `last` - 1 stand in a code block of the answer."""

    first: int
    last: int


def fence_for(text: str) -> str:
    """Return a fence that no line of a text closes: three signs, as models know it, or one more than the text has."""
    longest = max((len(fence.signs) for fence in _fences(lines_of(text))), default=2)
    return "`" * (longest + 1)


def file_in(answer: str, original: str) -> str:
    """Return the file that an answer to a request for `original` in one code block holds; raises `Unusable`."""
    lines = lines_of(answer)
    found, unclosed = _blocks(lines)
    if unclosed:
        found.append(_closed_shortly(unclosed))
    if not found:
        if not answer.strip() or _common(lines, original) < ALIKE * _counted(lines_of(original)).total():
            raise Unusable("the answer holds no code block")
        block = Block(0, len(lines))
    else:
        block = max(found, key=lambda one: (_common(lines[slice(*one)], original), one.last - one.first))
    text = "".join(lines[slice(*block)])
    missing = _counted(lines_of(original)) - _counted(lines[slice(*block)])
    outside = [line.strip() for line in (*lines[: block.first], *lines[block.last :])]
    if any(missing[line] for line in outside if len(line) >= TELLING):
        raise Unusable("lines of the file stand outside the answer's code block")
    _refuse_gaps(text, original)
    return text


def is_done(answer: str, original: str) -> bool:
    """Tell, while an answer is being written, whether its first code block is closed and ends as the original does."""
    lines = lines_of(answer)
    found, _ = _blocks(lines)
    if not found or not lines[found[0].last].endswith("\n"):
        return False
    ends = [
        [line.rstrip() for line in some if line.strip()][-TAIL:]
        for some in (lines[slice(*found[0])], lines_of(original))
    ]
    return ends[0] == ends[1]


def _refuse_gaps(text: str, original: str) -> None:
    if original.strip() and not text.strip():
        raise Unusable("the answer's code block is empty")
    known = set(lines_of(original))
    for line in lines_of(text):
        if line not in known and LEFT_OUT.search(line):
            raise Unusable(f"the answer leaves parts of the file out ({line.strip()[:60]!r})")


def _fences(lines: list[str]) -> list[Fence]:
    matches = ((i, FENCE.fullmatch(line)) for i, line in enumerate(lines))
    return [Fence(i, match[1], match[2]) for i, match in matches if match]


def _blocks(lines: list[str]) -> tuple[list[Block], list[Fence]]:
    """Return the outermost code blocks, and the fences from where one was opened that never closes.

    A fence like the block's own that names a language opens an inner block.
    """
    found: list[Block] = []
    is_open: list[Fence] = []
    met: list[Fence] = []
    for fence in _fences(lines):
        met = [*met, fence] if is_open else [fence]
        if not is_open or (fence.info and fence.is_like(is_open[-1])):
            is_open.append(fence)
        elif fence.is_like(is_open[-1]):
            is_open.pop()
            if not is_open:
                found.append(Block(met[0].line + 1, fence.line))
    return found, met if is_open else []


def _closed_shortly(met: list[Fence]) -> Block:
    """Return the block that a shorter fence closes, the last one before which all inner blocks are whole."""
    for number in range(len(met) - 1, 0, -1):
        fence = met[number]
        if number % 2 and not fence.info and fence.signs[0] == met[0].signs[0] and not fence.is_like(met[0]):
            return Block(met[0].line + 1, fence.line)
    raise Unusable("the answer's code block was never closed")


def _counted(lines: list[str]) -> Counter[str]:
    return Counter(stripped for line in lines if (stripped := line.strip()))


def _common(lines: list[str], original: str) -> int:
    """Return how many lines, blank ones not counted, stand in both."""
    return (_counted(lines) & _counted(lines_of(original))).total()
