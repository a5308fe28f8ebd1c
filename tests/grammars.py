"""What tests of grammars share: a small tokenizer with tags of its own, a plain loop as oracle, a schema checker.

The oracle makes a new matcher of llguidance for every token; it knows nothing of `longgraft.matcher`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from longgraft.config import SamplingParams
from longgraft.grammar import Grammar
from longgraft.resolve import resolve
from longgraft.sampler import Sampler
from tests.models import VOCAB
from tests.small_tokenizers import byte_level

EOS = 1
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """Byte-level, with the tags as tokens that llguidance takes for special ones, as in Qwen's."""
    made = byte_level(VOCAB - len(TAGS))
    made.add_tokens(list(TAGS))
    assert len(made) == VOCAB
    return made


@lru_cache(maxsize=1)
def words() -> Any:
    hf = pytest.importorskip("llguidance.hf")
    return hf.from_tokenizer(tokenizer(), n_vocab=VOCAB)


@lru_cache(maxsize=64)
def _pristine(grammar: Grammar) -> Any:
    import llguidance
    from llguidance.gbnf_to_lark import gbnf_to_lark

    lark = grammar.lark_text(lambda text: tokenizer().get_vocab()[text] if text in TAGS else None)
    lark = gbnf_to_lark(lark) if grammar.kind == "gbnf" else lark
    made = llguidance.LLMatcher(words(), lark, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def allowed(grammar: Grammar, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Which tokens a new matcher allows after an answer's tokens; EOS where the answer may end. [V]"""
    matcher = _pristine(grammar).deep_copy()
    assert matcher.consume_tokens(list(token_ids)), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return bits[:VOCAB].astype(bool)


@torch.no_grad()
def plain(model: Any, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """Plain decoding under a grammar: the whole text through the model for every token, a new matcher for each."""
    sampler = Sampler(resolve(params, None, VOCAB), prompt, VOCAB)
    text = list(prompt)
    for _ in range(params.max_new_tokens):
        logits = model(input_ids=torch.tensor([text]), use_cache=False, logits_to_keep=1).logits[0, -1]
        mask = torch.from_numpy(~allowed(params.grammar, text[len(prompt) :]))
        # Penalties leave -inf what it is, so it does not matter that they come afterwards here.
        text.append(sampler.draw(logits.masked_fill(mask, -torch.inf), text).token_id)
        if text[-1] == EOS:
            break
    return tuple(text[len(prompt) :])


def text_of(token_ids: Sequence[int]) -> str:
    """The text of an answer alone, whatever half a character its prompt ended in."""
    kept = [token for token in token_ids if token != EOS]
    return str(tokenizer().decode(kept, skip_special_tokens=False))


def fits(value: Any, schema: Any) -> bool:
    """Say whether a value fits a schema of the few kinds that the tests make."""
    if "enum" in schema:
        return value in schema["enum"] and isinstance(value, bool) == isinstance(schema["enum"][0], bool)
    kind = schema["type"]
    if kind == "object":
        named = (
            isinstance(value, dict) and set(schema.get("required", ())) <= value.keys() <= schema["properties"].keys()
        )
        return named and all(fits(inner, schema["properties"][name]) for name, inner in value.items())
    if kind == "array":
        return (
            isinstance(value, list)
            and len(value) <= schema["maxItems"]
            and all(fits(v, schema["items"]) for v in value)
        )
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "boolean":
        return isinstance(value, bool)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and schema.get("minimum", value) <= value <= schema.get("maximum", value)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put something in another's place for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield
