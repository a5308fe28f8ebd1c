"""Finds the file in a model's answer: the one code block that is it, or the reason why there is none to be trusted.

Knows texts alone. What is written over a file must be whole, so everything doubtful is refused: a block that was never
closed, several places it could end at, parts left out with a remark.
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


class Unusable(Exception):
    """The answer holds no file that could be written; the message says why."""


class Block(NamedTuple):
    """Lines `first` .. `last` - 1 stand in a code block of the answer."""

    first: int
    last: int


def fence_for(text: str) -> str:
    """Return a fence that no line of a text can close, of four signs at least: three are what a text may gain."""
    longest = max((len(run) for run in re.findall(r"^ {0,3}(`{3,})", text, re.MULTILINE)), default=3)
    return "`" * (longest + 1)


def file_in(answer: str, original: str) -> str:
    """Return the file that an answer to a request for `original` in one code block holds; raises `Unusable`."""
    lines = lines_of(answer)
    found = _blocks(lines)
    if not found:
        if not answer.strip() or _common(lines, original) < ALIKE * len(_counted(lines_of(original))):
            raise Unusable("the answer holds no code block")
        text = answer
    elif _fences(lines_of(original)):
        # Fences of the file's own may have passed for the block's: it is all between the outermost ones.
        text = "".join(lines[found[0].first : found[-1].last])
    else:
        best = max(found, key=lambda block: (_common(lines[slice(*block)], original), block.last - block.first))
        text = "".join(lines[slice(*best)])
    refuse_gaps(text, original)
    return text


def refuse_gaps(text: str, original: str) -> None:
    """Raise `Unusable` for a text that is empty or has remarks like "... rest of the file" that the original has not."""
    if original.strip() and not text.strip():
        raise Unusable("the answer's code block is empty")
    known = set(lines_of(original))
    for line in lines_of(text):
        if line not in known and LEFT_OUT.search(line):
            raise Unusable(f"the answer leaves parts of the file out ({line.strip()[:60]!r})")


def _fences(lines: list[str]) -> list[tuple[int, str, str]]:
    """Return (line, signs, info) of every line that is a fence."""
    matches = ((i, FENCE.fullmatch(line)) for i, line in enumerate(lines))
    return [(i, match[1], match[2]) for i, match in matches if match]


def _blocks(lines: list[str]) -> list[Block]:
    """Return the outermost code blocks. A fence of the same kind with a language opens an inner one."""
    found: list[Block] = []
    is_open: list[str] = []
    begun: list[tuple[int, str, str]] = []
    for number, signs, info in _fences(lines):
        if not is_open:
            is_open, begun = [signs], [(number, signs, info)]
            continue
        begun.append((number, signs, info))
        is_like = signs[0] == is_open[-1][0] and len(signs) >= len(is_open[-1])
        if is_like and not info:
            is_open.pop()
            if not is_open:
                found.append(Block(begun[0][0] + 1, number))
        elif is_like:
            is_open.append(signs)
    if is_open:
        found.append(_closed_shortly(lines, begun))
    return found


def _closed_shortly(lines: list[str], begun: list[tuple[int, str, str]]) -> Block:
    """Return a block whose end is a fence shorter than its beginning: the answer's last line, inner blocks being whole."""
    last = max((i for i, line in enumerate(lines) if line.strip()), default=0)
    number, signs, info = begun[-1]
    is_end = number == last and not info and signs[0] == begun[0][1][0] and len(signs) < len(begun[0][1])
    if not is_end or len(begun) % 2:
        raise Unusable("the answer's code block was never closed")
    return Block(begun[0][0] + 1, number)


def _counted(lines: list[str]) -> Counter[str]:
    return Counter(stripped for line in lines if (stripped := line.strip()))


def _common(lines: list[str], original: str) -> int:
    """Return how many lines, blank ones not counted, stand in both."""
    return (_counted(lines) & _counted(lines_of(original))).total()
