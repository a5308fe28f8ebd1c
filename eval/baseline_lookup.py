"""Baselines that copy one chain from where an n-gram occurred before: prompt lookup, vLLM's n-gram, ngram-mod.

Know no model and no tree. Rules and defaults are the projects'; the code is not. One idea: the first (or newest)
continuation of every n-gram sits in a dict that grows with the text, so a step costs no scan. Sources:

- prompt lookup: transformers `PromptLookupCandidateGenerator`: n = 2, then 1; leftmost match; 10 tokens.
- n-gram of vLLM (`vllm/v1/spec_decode/ngram_proposer.py`): longest n in a range, earliest match.
- ngram-mod of llama.cpp (`common/ngram-mod.cpp`): the newest next token of each 24-gram, followed token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longgraft.eval.baseline_draft import EMPTY, Draft, chain


class NgramLookup:
    """The leftmost occurrence of the longest suffix of `most` to `least` tokens, and what followed it.

    `limit`: tokens proposed at most (None: the budget).
    """

    def __init__(self, least: int, most: int, limit: int | None = None) -> None:
        self.limit = limit
        self.sizes = range(most, least - 1, -1)
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.text: list[int] = []
        self.first: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in self.sizes}

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]. O(n x sizes)"""
        before = len(self.text)
        self.text += token_ids.tolist()
        for size, first in self.first.items():
            start = max(before - size + 1, 0)
            tail = self.text[start:]
            for end, gram in enumerate(zip(*(tail[i:] for i in range(size))), start + size):
                first.setdefault(gram, end)

    def draft(self, budget: int) -> Draft:
        """Propose the tokens that followed the match, as a chain."""
        text = self.text
        for size, first in self.first.items():
            end = first.get(tuple(text[-size:]), len(text))
            if end < len(text):
                return chain(text[end : end + (budget if self.limit is None else min(budget, self.limit))])
        return EMPTY


class NgramMod:
    """The newest next token of each `size`-gram, followed through its own proposals.

    Differs from llama.cpp, always in the baseline's favour: no hash collisions, no state of other requests, and no
    minimum of 48 proposed tokens (which no smaller budget could meet).
    """

    def __init__(self, size: int = 24) -> None:
        self.size = size
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.text: list[int] = []
        self.following: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]. O(n x size)"""
        start = max(len(self.text) - self.size, 0)
        self.text += token_ids.tolist()
        tail = self.text[start:]
        self.following.update(zip(zip(*(tail[i:] for i in range(self.size))), tail[self.size :]))

    def draft(self, budget: int) -> Draft:
        """Propose a chain of next tokens for as long as each n-gram is known."""
        size = self.size
        line: list[int] = self.text[-size:]
        if len(line) < size:
            return EMPTY
        while len(line) - size < budget:
            token = self.following.get(tuple(line[-size:]))
            if token is None:
                break
            line.append(token)
        return chain(line[size:])


def scan_lookup(text: Sequence[int], least: int, most: int, limit: int) -> list[int]:
    """Return what `NgramLookup` proposes, by scanning: the rule in its plainest form, for tests."""
    for size in range(min(most, len(text) - 1), least - 1, -1):
        for end in range(size, len(text)):
            if text[end - size : end] == text[-size:]:
                return list(text[end : end + limit])
    return []
