"""Turns texts into token ids, and says by a hash which tokenizer did. Knows a tokenizer's few methods, not its package.

A transformers tokenizer with a fast backend, or a `tokenizers.Tokenizer`, is taken as it is. The hash is that of its
serialisation without what calls change (truncation, padding), so the same tokenizer has the same hash in every process.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.corpus_segment import HASH_BYTES, Document

Ints = npt.NDArray[np.int32]
LINE_BREAK_BYTE = "Ċ"  # how byte-level vocabularies (GPT-2's, Qwen's, Llama 3's) write the byte 10
LINE_BREAK_PIECE = "<0x0A>"  # how vocabularies with byte fallback (Llama 2's, Gemma's) do


def text_hash(text: str) -> bytes:
    """Return the hash by which a text is known. [16]"""
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest()


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the hash of a tokenizer, 32 hex digits."""
    return hashlib.blake2b(_backend(tokenizer).to_str().encode(), digest_size=16).hexdigest()


def _backend(tokenizer: Any) -> Any:
    """Return what encodes, without truncation and padding; the tokenizer itself is not changed."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not all(hasattr(backend, name) for name in ("to_str", "encode_batch", "encode_batch_fast", "get_vocab")):
        raise GraftError(
            f"a {type(tokenizer).__name__} has no fast backend: a corpus needs one that `tokenizers` implements "
            "(a tokenizer.json beside the model)"
        )
    if getattr(backend, "truncation", None) is not None or getattr(backend, "padding", None) is not None:
        backend = copy.deepcopy(backend)
        backend.no_truncation()
        backend.no_padding()
    return backend


class Encoder:
    """Encodes texts without special tokens. `hash`, `vocab_size`: the tokenizer's."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = _backend(tokenizer)
        self.hash = tokenizer_hash(self._backend)
        vocab = self._backend.get_vocab()
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        self._breaks_in = np.zeros(self.vocab_size, np.int32)
        for piece, token in vocab.items():
            self._breaks_in[token] = piece.count("\n") + piece.count(LINE_BREAK_BYTE) + (piece == LINE_BREAK_PIECE)

    def encode(self, texts: Sequence[str]) -> list[Document]:
        """Return the documents of some texts."""
        found = []
        for text, encoding in zip(texts, self._backend.encode_batch_fast(list(texts), add_special_tokens=False)):
            ids = np.asarray(encoding.ids, np.int32)
            found.append(Document(text_hash(text), ids, self._line_breaks(text, ids)))
        return found

    def _line_breaks(self, text: str, ids: Ints) -> Ints:
        """Return the token of each line break: by what the pieces hold if that adds up, else by offsets."""
        held = self._breaks_in[ids]
        if held.sum() == text.count("\n"):
            return np.repeat(np.arange(len(ids), dtype=np.int32), held)
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        begins = np.asarray([begin for begin, _ in encoding.offsets], np.int64)
        places = np.flatnonzero(np.frombuffer(text.encode("utf-32-le"), np.uint32) == ord("\n"))
        return np.maximum(np.searchsorted(begins, places, "right") - 1, 0).astype(np.int32)
