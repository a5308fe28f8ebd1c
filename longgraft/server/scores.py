"""Log-probabilities of answers in OpenAI's shapes, and what `echo` adds.

Knows tokens, their text and their log-probabilities; no endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any

from longgraft.config import TokenLogprob

UNFINISHED = "\ufffd"


class TokenTexts:
    """The text and the bytes of single tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # a long prompt's alternatives are the same few thousand tokens

    def text(self, token_id: int) -> str:
        """Return the token's own text; a part of a character is `bytes:` and its bytes, as OpenAI writes it."""
        if (text := self._known.get(token_id)) is None:
            text = self._decoded(token_id)
            if UNFINISHED in text:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))
            self._known[token_id] = text
        return text

    def bytes(self, token_id: int) -> list[int]:
        """Return the token's bytes; those of a part of a character from its name in the vocabulary."""
        text = self._decoded(token_id)
        if UNFINISHED not in text:
            return list(text.encode())
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if name.startswith("<0x") and name.endswith(">"):
            return [int(name[3:-1], 16)]
        return [BYTE_OF[sign] for sign in name if sign in BYTE_OF] or list(text.encode())

    def _decoded(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def _byte_signs() -> dict[str, int]:
    """Return the byte that each sign of byte-level vocabularies stands for: printable ones for themselves."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_signs()


def chat_logprobs(texts: TokenTexts, logprobs: Seq[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities as chats have them."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": _finite(logprob), "bytes": texts.bytes(token_id)}

    content = [one(p.token_id, p.logprob) | {"top_logprobs": [one(*pair) for pair in p.top]} for p in logprobs]
    return {"content": content, "refusal": None}


def completion_logprobs(texts: TokenTexts, logprobs: Seq[TokenLogprob], begin: int) -> dict[str, Any]:
    """Return log-probabilities as completions have them; `begin`: characters that stand before."""
    tokens = [texts.text(one.token_id) for one in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        "top_logprobs": [_tops(texts, one) for one in logprobs],
        "text_offset": [begin + offset for offset in _offsets(tokens)],
    }


def echo_logprobs(
    texts: TokenTexts, prompt_ids: Seq[int], logprobs: Seq[TokenLogprob | None], end: int
) -> dict[str, Any]:
    """Return those of a prompt that is echoed; the first token has none. `end`: characters of the echoed text.

    What the text leaves out (special tokens) has a name here all the same, so offsets end where the text does.
    """
    tokens = [texts.text(token_id) for token_id in prompt_ids]
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in logprobs],
        "top_logprobs": [None if one is None else _tops(texts, one) for one in logprobs],
        "text_offset": [min(offset, end) for offset in _offsets(tokens)],
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return log-probabilities of two texts, one behind the other."""
    return {name: [*values, *second[name]] for name, values in first.items()}


def _offsets(tokens: Seq[str]) -> list[int]:
    return list(accumulate(map(len, tokens), initial=0))[: len(tokens)]


def _tops(texts: TokenTexts, one: TokenLogprob) -> dict[str, float]:
    """Return alternatives by their text; of several with the same text the likeliest."""
    found: dict[str, float] = {}
    for token_id, value in one.top:
        found.setdefault(texts.text(token_id), _finite(value))
    return found


def _finite(value: float) -> float:
    """Return what JSON can hold: a token that is forbidden has the logarithm of nothing."""
    return max(value, -9999.0)
