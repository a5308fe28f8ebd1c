"""Text of tokens, fit for a page: what each one completed, what it is called, and nothing that hides or reorders.

Knows a tokenizer; no outputs and no HTML. The one idea: **what a reader cannot see is written out**. Control and
direction characters become visible names, so that a page cannot show another text than the one that was generated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from typing import Any

from longgraft.stop import UNFINISHED, TextDecoder

# Control characters (but tab and line feed), soft hyphens and other marks without width (but joiners, which letters and
# pictures are made with), what turns the direction of writing, separators that break lines, tags (which can hide a
# whole text), and halves of surrogate pairs, which no file can hold.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\U000e0000-\U000e007f]"
)


def seen(text: str) -> str:
    """Return a text in which unseen characters are spelt out, like `⟨U+202E⟩`."""
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", text)


def pieces(tokenizer: Any, prompt_ids: Seq[int], token_ids: Seq[int]) -> list[str]:
    """Return the text that each token completed; all together they are the text of the answer.

    A character that is spread over tokens belongs to the last of them; the others have no text.
    """
    decoder = TextDecoder(tokenizer, prompt_ids)
    texts = [decoder.push([token_id]) for token_id in token_ids]
    if texts:
        texts[-1] += decoder.finish()
    return texts


def name_of(tokenizer: Any, token_id: int) -> str:
    """Return how one token is written by itself; a part of a character by the tokenizer's own name for it."""
    text = str(tokenizer.decode([token_id], skip_special_tokens=False))
    if text and UNFINISHED not in text:
        return seen(text)
    name = tokenizer.convert_ids_to_tokens(int(token_id))
    return seen(str(name)) if name else f"#{token_id}"


def whole(tokenizer: Any, token_ids: Seq[int]) -> str:
    """Return the text of tokens with special ones written out, as prompts are shown."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
