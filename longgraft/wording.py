"""What the text of each token says: its coarse kind, which the ranking tells apart, and its line breaks.

Knows no index. Works on a tokenizer's own token strings, because decoding a whole vocabulary takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

UNKNOWN, WORD, SPACED_WORD, PUNCTUATION, NEWLINE, BLANKS, DIGITS, PIECE = range(8)
# How byte-level vocabularies write blanks; in others these are letters of some languages.
BYTE_SIGNS = str.maketrans({"Ġ": " ", "Ċ": "\n", "ĉ": "\t", "č": "\r"})
LINE_BREAK_PIECE = "<0x0A>"  # the byte 10 of vocabularies with byte fallback
# How sentencepiece writes them; byte-level vocabularies use the sign in names of special tokens at most.
PIECE_SIGN, PIECE_SIGNS = "▁", str.maketrans({"▁": " "})


def kind_of(text: str) -> int:
    """Return the kind of one token's text."""
    core = text.strip()
    if "\n" in text:
        return NEWLINE
    if not core:
        return BLANKS if text else UNKNOWN
    if core.isdigit():
        return DIGITS
    if core.isidentifier() and text[0] == " ":
        return SPACED_WORD
    if text.isidentifier():
        return PIECE if text[0].islower() else WORD
    return UNKNOWN if any(c.isalnum() for c in text) else PUNCTUATION


@dataclass(frozen=True, slots=True, eq=False)
class Wording:
    """What the text of each token id says: its kind, 0 to 7, and how many line breaks it holds. [vocab_size] each"""

    kinds: npt.NDArray[np.uint8]
    newlines: npt.NDArray[np.uint8]


def wording_of(tokenizer: Any, vocab_size: int) -> Wording | None:
    """Return what each token's text says; None without a tokenizer that can name its tokens.

    Special tokens and ids beyond the tokenizer's own are UNKNOWN.
    """
    if not hasattr(tokenizer, "convert_ids_to_tokens") or not hasattr(tokenizer, "__len__"):
        return None
    known = min(len(tokenizer), vocab_size)
    names = [name if isinstance(name, str) else "" for name in tokenizer.convert_ids_to_tokens(list(range(known)))]
    pieces, bytewise = (sum(name.startswith(sign) for name in names) for sign in (PIECE_SIGN, "Ġ"))
    signs = PIECE_SIGNS if pieces > bytewise else BYTE_SIGNS
    names = ["\n" if name == LINE_BREAK_PIECE else name.translate(signs) for name in names]
    kinds, newlines = np.zeros(vocab_size, np.uint8), np.zeros(vocab_size, np.uint8)
    kinds[:known] = [kind_of(name) for name in names]
    newlines[:known] = [min(name.count("\n"), 255) for name in names]
    special = [i for i in getattr(tokenizer, "all_special_ids", ()) if 0 <= i < vocab_size]
    kinds[special] = newlines[special] = 0
    return Wording(kinds, newlines)
