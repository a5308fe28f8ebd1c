"""Log-probabilities of answers in OpenAI's shapes, and what `echo` adds.

Knows tokens, their text and their log-probabilities; no endpoint. Log-probabilities of the prompt itself (`echo` with
`logprobs`) are not computed yet: `echoed` says so.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from longgraft.config import TokenLogprob
from longgraft.server.errors import ApiError

UNFINISHED = "\ufffd"


class TokenTexts:
    """The text and the bytes of single tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """Return the token's own text; a part of a character is `bytes:` and its bytes, as OpenAI writes it."""
        text = self._decoded(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id)) if UNFINISHED in text else text

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


def echoed(prompt_text: str, echo: bool, logprobs: int | None) -> str:
    """Return what stands before an answer; raises `ApiError` where the prompt's log-probabilities are asked for."""
    if echo and logprobs is not None:
        said = "echo with logprobs is not supported by this server: leave one out"
        raise ApiError(400, said, param="echo", code="unsupported_parameter")
    return prompt_text if echo else ""


def chat_logprobs(texts: TokenTexts, logprobs: Seq[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities as chats have them."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": _finite(logprob), "bytes": texts.bytes(token_id)}

    content = [one(p.token_id, p.logprob) | {"top_logprobs": [one(*pair) for pair in p.top]} for p in logprobs]
    return {"content": content, "refusal": None}


def completion_logprobs(texts: TokenTexts, logprobs: Seq[TokenLogprob], begin: int) -> dict[str, Any]:
    """Return log-probabilities as completions have them; `begin`: characters that stand before."""
    tokens = [texts.text(one.token_id) for one in logprobs]
    offsets = [begin]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        "top_logprobs": [{texts.text(i): _finite(value) for i, value in one.top} for one in logprobs],
        "text_offset": offsets[: len(tokens)],
    }


def _finite(value: float) -> float:
    """Return what JSON can hold: a token that is forbidden has the logarithm of nothing."""
    return max(value, -9999.0)
