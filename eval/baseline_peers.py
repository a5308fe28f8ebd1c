"""Baselines that are other projects' own code, imported where installed: ArcticInference and transformers.

Knows no rule of its own, only how to ask. A project that is missing is one sentence that says how to install it.
`arctic-inference` (SuffixDecodingCache, github snowflakedb/ArcticInference, 0.3.0) is built from source. Its suffix
decoding needs neither torch nor vLLM to run; its build wants torch and finds ours where pip is told not to isolate it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.baseline_draft import EMPTY, Draft, chain

INSTALL_ARCTIC = "pip install 'longgraft[peers]' && pip install --no-build-isolation --no-deps arctic-inference==0.3.0"
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ArcticOptions:
    """Options of `SuffixDecodingCache.speculate`; the defaults are its own."""

    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    use_tree_spec: bool = False


class Arctic:
    """ArcticInference's suffix trees over the request alone (`max_cached_requests=0`), depth 64, its default."""

    depth = 64

    def __init__(self, options: ArcticOptions | None = None) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError:
            raise GraftError(f"method arctic needs arctic-inference: {INSTALL_ARCTIC}") from None
        self.options = options or ArcticOptions()
        self.cache: Any = SuffixDecodingCache(max_tree_depth=self.depth, max_cached_requests=0)
        self.tail = np.zeros(0, np.int32)

    def reset(self) -> None:
        """Forget the text."""
        if self.cache.active_requests:
            self.cache.stop_request(0)
        self.tail = self.tail[:0]

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]: the first call is the prompt."""
        if self.cache.active_requests:
            self.cache.add_active_response(0, token_ids)
        else:
            self.cache.start_request(0, token_ids)
        self.tail = np.concatenate([self.tail, token_ids[-self.depth :]])[-self.depth :]

    def draft(self, budget: int) -> Draft:
        """Propose what its suffix trees say."""
        if not self.cache.active_requests:
            return EMPTY
        options = self.options
        found = self.cache.speculate(
            0,
            self.tail,
            max_spec_tokens=budget,
            max_spec_factor=options.max_spec_factor,
            max_spec_offset=options.max_spec_offset,
            min_token_prob=options.min_token_prob,
            use_tree_spec=options.use_tree_spec,
        )
        return Draft(found.token_ids, found.parents)

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that its own estimate says the tree of this text holds; None where a release has no estimate."""
        trees = getattr(self.cache, "_local_trees", {})
        estimate = getattr(trees.get(0), "estimate_memory", None)
        return None if estimate is None else int(estimate())


class TransformersLookup:
    """transformers' own `PromptLookupCandidateGenerator`, asked as `generate` asks it. It scans the text each time.

    `limit`: its `num_output_tokens` (None: the budget); n-grams of 2, then 1, its default.
    """

    def __init__(self, limit: int | None = 10) -> None:
        try:
            import torch
            from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
        except ImportError as error:
            raise GraftError(f"method pld-class needs transformers with prompt lookup: {error}") from None
        self.torch: Any = torch
        self.limit = limit
        self.generator: Any = PromptLookupCandidateGenerator(num_output_tokens=limit or 1, max_length=NO_LIMIT)
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.text: Any = self.torch.zeros(1, 0, dtype=self.torch.long)

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in committed tokens [n]."""
        more = self.torch.from_numpy(token_ids.astype(np.int64))[None]
        self.text = self.torch.cat([self.text, more], dim=1)

    def draft(self, budget: int) -> Draft:
        """Propose what the class returns behind the text."""
        size = self.text.shape[1]
        self.generator.num_output_tokens = budget if self.limit is None else min(budget, self.limit)
        if size == 0 or self.generator.num_output_tokens == 0:
            return EMPTY
        return chain(self.generator.get_candidates(self.text)[0][0, size:].tolist())
