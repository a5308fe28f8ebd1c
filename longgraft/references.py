"""What one request may copy from besides its own prompt and answer. None of it can change the answer.

Knows names, texts and the index that they are put into; no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from longgraft.config import GraftError
from longgraft.history import History
from longgraft.tree import Source

Text = str | Seq[int]
PREDICTION = "(prediction)"
HISTORY = "(history)"


@dataclass(frozen=True, slots=True)
class References:
    """Sources of one request.

    `prediction`: what the answer will probably look like (text or token ids). `documents`: texts by name. `corpora`:
    names, folders or opened corpora (`longgraft index build`). `tenant`: whose request it is: K/V of equal
    beginnings, and answers (with `EngineConfig.history_tokens`), are shared with requests of this name alone; those
    without one share beginnings among themselves.
    """

    prediction: Text | None = None
    documents: Mapping[str, Text] = field(default_factory=dict)
    corpora: Seq[Any] = ()
    tenant: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.documents, Mapping):
            raise GraftError(f"documents is a {type(self.documents).__name__}: expected texts by name")
        if isinstance(self.corpora, str) or not isinstance(self.corpora, Seq):
            raise GraftError(f"corpora is {self.corpora!r}: expected a list of names, folders or opened corpora")
        for one in self.corpora:
            if not isinstance(one, str | os.PathLike) and not hasattr(one, "lookup"):
                raise GraftError(f"corpora holds {one!r}: expected names, folders or opened corpora")
        for name, text in self.documents.items():
            if not isinstance(name, str) or not name:
                raise GraftError(f"documents holds the name {name!r}: expected non-empty names")
            _check_text(f"document {name}", text)
        if self.prediction is not None:
            _check_text("prediction", self.prediction)
        if self.tenant is not None and not (isinstance(self.tenant, str) and self.tenant):
            raise GraftError(f"tenant is {self.tenant!r}: expected a name")

    def put_into(self, index: Any, encode: Callable[[Text], list[int]], history: History) -> None:
        """Give all texts to the index of a request; `encode` turns text into token ids."""
        if not hasattr(index, "add_text"):
            raise GraftError(f"{type(index).__name__} takes no references: expected an index with add_text")
        for answer in history.of(self.tenant) if self.tenant else ():
            index.add_text(HISTORY, answer, Source.HISTORY)
        for name, text in self.documents.items():
            if ids := encode_named(encode, f"document {name}", text):
                index.add_text(name, ids, Source.DOCUMENT)
        if self.prediction is not None and (ids := encode_named(encode, "prediction", self.prediction)):
            index.add_text(PREDICTION, ids, Source.PREDICTION)

    def feed(self, index: Any, wanted: str | None, vocab_size: int) -> None:
        """Let the index bring passages of the corpora; those built with a tokenizer of another hash are refused."""
        from longgraft.index.corpus import Corpus, open_corpus
        from longgraft.index.corpus_feed import CorpusFeed, check_corpora

        if not hasattr(index, "feed"):
            raise GraftError(f"{type(index).__name__} takes no corpora: expected an index with feed")
        corpora = [one if isinstance(one, Corpus) else open_corpus(one, wanted) for one in self.corpora]
        check_corpora(corpora, wanted, vocab_size)
        index.feed = CorpusFeed(corpora)


def encode_named(encode: Callable[[Text], list[int]], name: str, text: Text) -> list[int]:
    """Return a text's token ids, [] if it is empty; a mistake names the text."""
    if not len(text):
        return []
    try:
        return encode(text)
    except GraftError as error:
        raise GraftError(f"{name}: {error}") from None


def _check_text(name: str, text: Any) -> None:
    """Raise `GraftError` for what is neither text that a tokenizer takes nor a row of something."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise GraftError(f"{name}: half a character at place {error.start}: expected text") from None
        return
    # Bytes are a sequence of integers too, but nobody who gives them means token ids.
    is_row = isinstance(text, Seq) or (hasattr(text, "tolist") and getattr(text, "ndim", 0) == 1)
    if not is_row or isinstance(text, bytes | bytearray | memoryview):
        raise GraftError(f"{name} is a {type(text).__name__}: expected text or a flat sequence of token ids")
