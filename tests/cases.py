"""Hard cases shared by many tests: token strings, trees, draft sources, and plain decoding as the oracle.

Knows the vocabulary of `longgraft.tree`, no engine and no index. All tables are deterministic. `SOURCES` are
described in `tests.sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft.tree import Source, TokenTree
from tests.models import VOCAB
from tests.sources import SOURCES

__all__ = ["SOURCES", "TOKEN_STRINGS", "TREES", "Choose", "greedy", "plain_generate", "token_tree"]

Choose = Callable[[Tensor, list[int]], int]


# Plain decoding ------------------------------------------------------------------------------------------------


def greedy(logits: Tensor, token_ids: list[int]) -> int:
    return int(logits.argmax())


@torch.no_grad()
def plain_generate(
    model: Any, prompt: Sequence[int], choose: Choose = greedy, n: int = 32, *, long_rope: bool = False
) -> list[int]:
    """Return the `n` tokens after `prompt`: one forward over the whole text per token, no cache, one row of logits.

    `choose(logits [V], token_ids so far)` returns the next token. `long_rope` keeps a longrope model in its
    second regime throughout: a last row at a far position, which no earlier row can see, tells it so.
    """
    token_ids = list(prompt)
    for _ in range(n):
        ids = token_ids + [0] * long_rope
        positions = list(range(len(token_ids))) + [model.config.max_position_embeddings - 1] * long_rope
        out = model(input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), use_cache=False)
        token_ids.append(choose(out.logits[0, len(token_ids) - 1], list(token_ids)))
    return token_ids[len(prompt) :]


# Token strings -------------------------------------------------------------------------------------------------


def _fibonacci(length: int) -> list[int]:
    a, b = [1], [1, 2]
    while len(b) < length:
        a, b = b, b + a
    return b[:length]


def _documents(rng: np.random.Generator) -> list[int]:
    """One document four times: as it is, with one token changed, with some left out, with some put in."""
    text = rng.integers(0, VOCAB, 60).tolist()
    changed = [*text[:30], (text[30] + 1) % VOCAB, *text[31:]]
    return text + changed + text[:20] + text[25:] + text[:40] + [7, 7, 7] + text[40:]


def _strings() -> dict[str, list[int]]:
    rng = np.random.default_rng(5)
    return {
        "single": [3],
        "single_zero": [0],
        "pair": [2, 2],
        "zeros": [0] * 64,
        "largest_id": [VOCAB - 1] * 9,
        "random": rng.integers(0, VOCAB, 300).tolist(),
        "random_binary": rng.integers(0, 2, 300).tolist(),
        "all_different": rng.permutation(VOCAB).tolist(),
        "period_2": [0, 1] * 40,
        "period_7": [4, 0, 4, 4, 2, 0, 9] * 12,
        "late_period": rng.integers(0, VOCAB, 40).tolist() + [5, 6, 7] * 30,
        "fibonacci": _fibonacci(233),
        "thue_morse": [i.bit_count() % 2 for i in range(256)],
        "documents": _documents(rng),
        "square": rng.integers(0, 5, 80).tolist() * 2,
    }


TOKEN_STRINGS = _strings()


# Trees ---------------------------------------------------------------------------------------------------------


def _bushy(width: int, depth: int) -> list[int]:
    parents, level = [-1], [0]
    for _ in range(depth):
        first = len(parents)
        parents += [parent for parent in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return parents


def _random_parents(seed: int, size: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [-1] + [int(rng.integers(0, node)) for node in range(1, size)]


def _tokens(parents: list[int]) -> list[int]:
    """Return a token per node: siblings differ, cousins share, id 0 occurs everywhere."""
    seen: dict[int, int] = {}
    tokens = []
    for parent in parents:
        seen[parent] = seen.get(parent, -1) + 1
        tokens.append(seen[parent] * 3 % VOCAB)
    return tokens


_PARENTS: dict[str, list[int]] = {
    "root": [-1],
    "chain": list(range(-1, 11)),
    "star": [-1] + [0] * 14,
    "bushy": _bushy(3, 3),
    "binary": _bushy(2, 5),
    "comb": [-1] + [node // 2 * 2 for node in range(20)],
    "star_then_chain": [-1] + [0] * 5 + list(range(5, 15)),
    "two_chains": [-1, 0, 0, *range(1, 19)],
    "random_small": _random_parents(1, 9),
    "random": _random_parents(2, 33),
    "random_large": _random_parents(3, 64),
}
TREES: dict[str, tuple[list[int], list[int]]] = {name: (_tokens(p), p) for name, p in _PARENTS.items()}


def token_tree(name: str) -> TokenTree:
    """Return one of `TREES`, scores falling by depth."""
    token_ids, parents = TREES[name]
    scores = [0.0]
    for node in range(1, len(parents)):
        scores.append(scores[parents[node]] - 0.25 - 0.01 * node)
    sources = [Source.ROOT] + [Source.PROMPT] * (len(parents) - 1)
    return TokenTree(
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.array(scores, np.float32),
        np.array(sources, np.int8),
        np.full((len(parents), 2), -1, np.int32),
    )
