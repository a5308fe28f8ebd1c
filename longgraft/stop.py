"""When a generation ends, and text from tokens as they come: the one place that decodes incrementally.

Knows tokens and a tokenizer's `decode`; no logits, no model. A character may be spread over tokens and a stop
string over the characters of several tokens, so text is decoded in a sliding window: the tokens of the last
settled step, whose text is known, and the new ones; what the window says beyond the known text is new. A
trailing U+FFFD may still become a character and waits for the next token. A step costs O(new tokens).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import Any

from longgraft.config import GraftError

UNFINISHED = "\ufffd"
# An open character closes within three more bytes; past this many tokens its U+FFFD is real and the window
# moves on.
_MAX_OPEN = 32
# Prompt tokens that the output continues: enough to close a character and to know of a word before it.
_CONTEXT = 8
# No pattern of transformers' clean-up is longer, and each begins with a space.
_CLEANED_SPAN = 4


class TextDecoder:
    """Text of a growing list of output tokens, special ones skipped; the same however the tokens are grouped.

    The text continues `prompt_ids`: a sentencepiece-like tokenizer keeps the space of a first word that
    follows a word of the prompt. After a special token, as at the end of a chat template, a new text begins
    instead.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Seq[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.is_cleaning = _cleans_spaces(tokenizer)
        # Cleaned here, not by the tokenizer: what it cleans away may depend on tokens to come.
        has_option = hasattr(tokenizer, "clean_up_tokenization_spaces")
        self._options = {"clean_up_tokenization_spaces": False} if has_option else {}
        self._uncleaned = ""
        self._window = self._context(prompt_ids)
        self._num_settled = len(self._window)
        self._num_known = len(self._decode(self._window).rstrip(UNFINISHED))

    def fork(self) -> TextDecoder:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._window = list(self._window)
        return twin

    def push(self, token_ids: Seq[int]) -> str:
        """Take the next tokens and return the text that has become final."""
        if not token_ids:
            return ""
        text = self._decode([*self._window, *token_ids])
        if UNFINISHED in text and len(token_ids) > 1:
            # What counts as a broken character may depend on where one looks, so look after every token.
            return "".join([self.push([token_id]) for token_id in token_ids])
        self._window += token_ids
        is_overdue = len(self._window) - self._num_settled > _MAX_OPEN
        final = text if is_overdue else text.rstrip(UNFINISHED)
        new = final[self._num_known :]
        self._num_known = max(self._num_known, len(final))
        if new and len(final) == len(text):
            self._window = self._window[self._num_settled :]
            self._num_settled = len(self._window)
            self._num_known = len(self._decode(self._window))
        elif is_overdue and not new:
            # A long run of tokens without text: special ones.
            del self._window[self._num_settled :]
        return self._cleaned(new) if self.is_cleaning else new

    @property
    def tail(self) -> str:
        """Text that is not final, as it would stand if no more tokens came; open characters left out."""
        return str(self._tokenizer.clean_up_tokenization(self._uncleaned)) if self._uncleaned else ""

    def finish(self) -> str:
        """Return the rest of the text, open characters as U+FFFD."""
        self._uncleaned += self._decode(self._window)[self._num_known :]
        rest = self.tail if self.is_cleaning else self._uncleaned
        self._uncleaned, self._window, self._num_settled, self._num_known = "", [], 0, 0
        return rest

    def _decode(self, token_ids: Seq[int], skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, **self._options)
        return str(text)

    def _context(self, prompt_ids: Seq[int]) -> list[int]:
        """Return the last prompt tokens, from after the last special one."""
        context: list[int] = []
        for token_id in reversed(prompt_ids[-_CONTEXT:]):
            if not self._decode([token_id]) and self._decode([token_id], skip_special_tokens=False):
                break
            context.insert(0, int(token_id))
        return context

    def _cleaned(self, new: str) -> str:
        """Return cleaned text up to where nothing that follows can change it: four characters without a space."""
        text = self._uncleaned + new
        cut = len(text)
        while cut >= _CLEANED_SPAN and " " in text[cut - _CLEANED_SPAN : cut]:
            cut -= 1
        cut = cut if cut >= _CLEANED_SPAN else 0
        self._uncleaned = text[cut:]
        return str(self._tokenizer.clean_up_tokenization(text[:cut]))


def _cleans_spaces(tokenizer: Any) -> bool:
    """Tell whether `tokenizer.decode` removes spaces before punctuation, by its flags (never for BPE unless forced)."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False) and (type(model).__name__ != "BPE" or forced))


class StopScan:
    """Finds the first token after which the text contains a stop string, and where in the text that string begins."""

    def __init__(self, decoder: TextDecoder, stop: Seq[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._num_recent = max((len(s) for s in self._stop), default=1) - 1
        self._recent = ""
        self._length = 0
        self.text_end: int | None = None

    def fork(self) -> StopScan:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._decoder = self._decoder.fork()
        return twin

    def push(self, token_ids: Seq[int]) -> tuple[str, int]:
        """Take tokens up to the one that completes a stop string; return the new text and how many were
        taken.

        The text is final, unless a stop was found: then it is all there is, `text_end` says how much counts.
        """
        before = self._decoder.fork()
        text = self._decoder.push(token_ids)
        if len(token_ids) == 1 or not (self._decoder.is_cleaning or self._find(text)):
            return self._take(text), len(token_ids)
        self._decoder = before
        pieces: list[str] = []
        for token_id in token_ids:
            pieces.append(self._take(self._decoder.push([token_id])))
            if self.text_end is not None:
                break
        return "".join(pieces), len(pieces)

    def _find(self, text: str) -> list[int]:
        """Return where stop strings begin in the recent text and `text`."""
        probe = self._recent + text + self._decoder.tail
        return [at for s in self._stop if (at := probe.find(s)) >= 0]

    def _take(self, text: str) -> str:
        if found := self._find(text):
            self.text_end = self._length - len(self._recent) + min(found)
            return text + self._decoder.tail
        self._length += len(text)
        recent = self._recent + text
        self._recent = recent[max(0, len(recent) - self._num_recent) :]
        return text

    def finish(self) -> str:
        """Return the text still missing when no stop string came."""
        return self._decoder.finish()


class StopRules:
    """Ends one generation: EOS, stop strings, the length asked for, the context limit; in this order on one
    token.

    `context_room` is the number of output tokens the context limit leaves (None: no limit). `prompt_ids` give
    the text its beginning, see `TextDecoder`. `finish_reason` is None, then `eos`, `stop`, `length` or
    `context`; `text_end` is the number of characters before a stop string that was found. Raises `GraftError`
    for stop strings without a tokenizer.
    """

    def __init__(
        self,
        eos_token_ids: Collection[int],
        stop: Seq[str],
        max_new_tokens: int,
        context_room: int | None = None,
        tokenizer: Any = None,
        *,
        prompt_ids: Seq[int] = (),
    ) -> None:
        if stop and tokenizer is None:
            raise GraftError("stop strings need text: give the engine a tokenizer, or stop by eos_token_ids")
        self._eos = frozenset(eos_token_ids)
        self._max_new_tokens = max_new_tokens
        self._context_room = context_room
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids[-_CONTEXT:])
        self._scan = StopScan(TextDecoder(tokenizer, self._prompt_ids), stop) if stop else None
        self._token_ids: list[int] = []
        self._num_tokens = 0
        self.finish_reason = self._limit_reached()

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        if self.finish_reason is not None:
            return 0
        room = self._max_new_tokens if self._context_room is None else self._context_room
        return min(self._max_new_tokens, room) - self._num_tokens

    @property
    def text_end(self) -> int | None:
        """Characters of the text before the stop string that ended it; None while none did."""
        return self._scan.text_end if self._scan else None

    @property
    def text(self) -> str:
        """Text of the tokens so far without a stop string. Decodes all of them: for the end, not for every round."""
        decoder = TextDecoder(self._tokenizer, self._prompt_ids)
        return (decoder.push(self._token_ids) + decoder.finish())[: self.text_end]

    def clip(self, token_ids: Seq[int]) -> list[int]:
        """Commit `token_ids` up to the one that ends the generation, which is kept, and return what was committed."""
        kept = list(token_ids[: self.remaining])
        end = next((i + 1 for i, token_id in enumerate(kept) if token_id in self._eos), len(kept))
        del kept[end:]
        if not kept:
            return kept
        if self._scan is not None:
            _, taken = self._scan.push(kept)
            del kept[taken:]
        self._token_ids += kept
        self._num_tokens += len(kept)
        if kept[-1] in self._eos:
            self.finish_reason = "eos"
        elif self.text_end is not None:
            self.finish_reason = "stop"
        else:
            self.finish_reason = self._limit_reached()
        return kept

    def watch(self) -> Callable[[int], bool]:
        """Return a function that takes the coming tokens one by one and tells whether that one is the last.

        It works on a copy: these rules themselves advance by `clip` alone.
        """
        twin = copy.copy(self)
        twin._token_ids = []
        twin._scan = self._scan.fork() if self._scan else None

        def is_last(token_id: int) -> bool:
            twin.clip([token_id])
            return twin.finish_reason is not None

        return is_last

    def _limit_reached(self) -> str | None:
        if self._num_tokens >= self._max_new_tokens:
            return "length"
        if self._context_room is not None and self._num_tokens >= self._context_room:
            return "context"
        return None
