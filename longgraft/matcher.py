"""Follows an answer through its grammar: which tokens may come next, and where only one may.

The one file that knows llguidance, which is imported when the first grammar comes. The one idea: **a matcher is a
function of the tokens before it**. It walks ahead through proposals and back, and what it says at a text is the same
whichever way it came there; so the mask of a node is the one that plain decoding applies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft.config import GraftError
from longgraft.grammar import Grammar

# Compiled grammars that are kept: a server's clients ask for the same few again and again.
MOST_KEPT = 64


class Grammars:
    """Compiles grammars for one tokenizer; may be asked from any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._making, self._looking = threading.Lock(), threading.Lock()
        self._words: Any = None
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()

    def compile(self, grammar: Grammar | None) -> None:
        """Make sure that a grammar is compiled; `GraftError` if it cannot be. Takes up to seconds the first time."""
        if grammar is not None:
            self._compiled(grammar)

    def open(self, grammar: Grammar | None, prompt_len: int, eos_token_ids: Collection[int]) -> Matcher | None:
        """Return the matcher of one answer; `GraftError` for a bad grammar, tokenizer, or an answer without an end."""
        if grammar is None:
            return None
        ends = [token_id for token_id in eos_token_ids if 0 <= token_id < self.vocab_size]
        if not ends:
            raise GraftError("a grammar's answer ends with an EOS token: set eos_token_ids, and leave ignore_eos out")
        return Matcher(self._compiled(grammar), self._words.eos_token, prompt_len, ends, self.vocab_size)

    def _compiled(self, grammar: Grammar) -> Any:
        """Return a grammar's matcher at its beginning; one that is there is had at once, whatever others compile."""
        if not isinstance(grammar, Grammar):
            raise GraftError(f"grammar is a {type(grammar).__name__}: expected a longgraft.Grammar")
        if (known := self._known(grammar)) is not None:
            return known
        with self._making:
            if (known := self._known(grammar)) is not None:
                return known
            library = _library()
            if self._words is None:
                self._words = _words(self.tokenizer, self.vocab_size)
            text = grammar.lark_text(self._special)
            made = _compile(library, self._words, _lark_of_gbnf(text) if grammar.kind == "gbnf" else text)
        with self._looking:
            self._kept[grammar] = made
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def _known(self, grammar: Grammar) -> Any:
        with self._looking:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _special(self, text: str) -> int | None:
        token_id = self.tokenizer.get_added_vocab().get(text)
        return token_id if token_id is not None and self._words.is_special_token(token_id) else None


class Matcher:
    """Where one answer stands in its grammar. It advances, and walks back, to whatever text it is asked about."""

    def __init__(
        self, compiled: Any, end: int, prompt_len: int, eos_token_ids: Collection[int], vocab_size: int
    ) -> None:
        self._compiled, self._inner = compiled, compiled.deep_copy()
        self._end, self._eos = end, np.array(sorted(eos_token_ids), np.int64)
        self._prompt_len, self._vocab_size = prompt_len, vocab_size
        self._taken: list[int] = []

    def fork(self) -> Matcher:
        """Return an independent one at the beginning of the answer."""
        return Matcher(self._compiled, self._end, self._prompt_len, self._eos.tolist(), self._vocab_size)

    def mask(self, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        """Return `scores [V]` with -inf for every token that may not follow `token_ids` (prompt and answer so far).

        EOS tokens may come where the answer is complete, and nowhere else. Raises `GraftError` where nothing may come.
        """
        self.go_to(token_ids)
        allowed = self._allowed(len(scores))
        if not allowed.any():
            raise GraftError(self._dead_end())
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), -torch.inf)

    def go_to(self, token_ids: Sequence[int]) -> None:
        """Stand behind `token_ids` (prompt and answer so far); `GraftError` if the grammar forbids them."""
        count = len(token_ids) - self._prompt_len
        known = min(count, len(self._taken))
        if known and self._taken[known - 1] != token_ids[self._prompt_len + known - 1]:
            known = 0
        if self._inner.is_error() or not self._inner.rollback(len(self._taken) - known):
            # Walking ahead ran into a limit of the library, which is for good: the answer itself has not.
            self._inner, known = self._compiled.deep_copy(), 0
        del self._taken[known:]
        new = [int(token) for token in token_ids[self._prompt_len + known :]]
        self._taken += new
        if new and not self._inner.consume_tokens(new):
            raise GraftError(f"the answer does not fit its grammar: {_first_line(self._inner.get_error())}")

    def allows(self, token_id: int) -> bool:
        """Say whether a token may follow that does not end the answer."""
        return self._inner.validate_tokens([token_id]) == 1 and not self._ends(token_id)

    def step(self, token_id: int) -> bool:
        """Walk on to a token that may follow and return True; else False, and only `go_to` and `back` may be called."""
        self._taken.append(token_id)
        return bool(self._inner.consume_token(token_id))

    def back(self) -> None:
        """Undo the last `step`."""
        self._taken.pop()
        self._inner.rollback(1)

    def forced(self) -> list[int]:
        """Return the tokens that must come next, because the grammar leaves no choice; EOS is not among them."""
        tokens: list[int] = []
        for token in self._inner.compute_ff_tokens():
            if self._ends(token) or token >= self._vocab_size:
                break
            tokens.append(int(token))
        return tokens

    def _ends(self, token_id: int) -> bool:
        return token_id == self._end or bool((self._eos == token_id).any())

    def _allowed(self, size: int) -> Any:
        """Return which tokens may come. [size]"""
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        if self._inner.is_error():
            return np.zeros(size, np.bool_)
        found = np.unpackbits(bits, bitorder="little").view(np.bool_)
        may_end, found[self._end] = bool(found[self._end]), False
        allowed = np.zeros(size, np.bool_)
        allowed[: len(found)] = found[:size]
        allowed[self._eos] = may_end
        return allowed

    def _dead_end(self) -> str:
        place, error = f"at output position {len(self._taken)}", self._inner.get_error()
        if error and "NoExtension" not in error:
            return f"the grammar is too complex {place}: {_first_line(error)}"
        return f"the grammar allows no token {place}: it demands something that the tokenizer has no token for"


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GraftError("grammars need llguidance: pip install 'longgraft[grammar]'") from error
    return llguidance


def _words(tokenizer: Any, vocab_size: int) -> Any:
    """Return the library's view of a tokenizer, which may have more tokens than the model, or fewer."""
    from llguidance.hf import from_tokenizer

    if tokenizer is None:
        raise GraftError("grammars need text: give the engine a tokenizer")
    try:
        return from_tokenizer(tokenizer, n_vocab=max(vocab_size, 1 + max(tokenizer.get_vocab().values(), default=0)))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        name = type(tokenizer).__name__
        raise GraftError(f"grammars: llguidance takes no {name} like this: {_first_line(str(error))}") from error


def _lark_of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # some of its mistakes are bare exceptions
        raise GraftError(f"the grammar cannot be read as GBNF: {_first_line(str(error))}") from error


def _compile(library: Any, words: Any, lark: str) -> Any:
    try:
        made = library.LLMatcher(words, lark, log_level=0)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise GraftError(f"the grammar cannot be compiled: {_first_line(str(error))}") from error
    if made.is_error():
        raise GraftError(f"the grammar cannot be compiled: {_first_line(made.get_error())}")
    return made


def _first_line(message: str) -> str:
    """Return what a message of the library says, without the state that it prints behind it."""
    lines = message.strip().split("\n")
    return ", ".join([lines[0][:300], *(line for line in lines[1:] if line.startswith("error: "))])
