"""Checks and measurements of a target at load: is our path right, can it be exact, what does a round cost?

A model whose attention does more than it tells its attention function (a mask of its own, layers we do not
see) would give wrong text without any error; comparing logits with the model's own attention finds it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longgraft.attention import returned
from longgraft.cache import ChunkPool, SequenceCache
from longgraft.config import EngineConfig, GraftError
from longgraft.cost import CostTable
from longgraft.measure import measure_costs
from longgraft.quantized_linear import QuantizedLinear
from longgraft.target import Segment, Target
from longgraft.tree import IntArray, Source, TokenTree, TreeBuilder, chain
from longgraft.verify import segment_of

PROMPT_LEN = 31
# Largest typical difference allowed, as a share of the logits' spread. A wrong mask, position or scale moves
# logits by about their spread; rounding stays far below (float32: 1e-6, bfloat16: 1e-2, measured on the models
# in eval/LOG.md).
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
# Where activations are rounded to whole numbers the least difference may become a step, in any dtype: at most 0.10 for
# sound models with 8- or 4-bit weights, 0.42 and more for attention that does something else (SmolLM2; eval/LOG.md).
QUANTIZED_TOLERANCE = 0.2


def probe_tokens(vocab_size: int, length: int) -> IntArray:
    """Return `length` fixed pseudo-random token ids."""
    return np.random.default_rng(0).integers(0, vocab_size, length).astype(np.int32)


def probe_tree(token_ids: IntArray) -> TokenTree:
    """Return a bushy tree of 8 nodes and depth 3 over the given token ids (at least 8)."""
    builder = TreeBuilder(int(token_ids[0]))
    for parent, token in zip([0, 0, 1, 1, 2, 3, 3], token_ids[1:8]):
        builder.add(parent, int(token), 0.0, Source.DRAFT)
    return builder.build()


def self_check(target: Target) -> None:
    """Compare our logits with the model's own attention, on a prompt in two chunks and a small tree.

    Raises `GraftError` naming the model if they differ by more than rounding.
    """
    prompt, tree = (
        probe_tokens(target.vocab_size, PROMPT_LEN),
        probe_tree(probe_tokens(target.vocab_size, 50)[40:]),
    )
    with target.session():
        ours = _our_logits(target, prompt, tree)
    paths = [tree.path(node) for node in range(len(tree)) if node not in tree.parents]
    shares = []
    for path in paths:
        own = _own_logits(target, np.concatenate([prompt, tree.token_ids[path]]))
        mine = torch.cat([ours[:PROMPT_LEN], ours[PROMPT_LEN:][path]]).float()
        spread = float(own.std()) + 1e-12
        shares.append(float((mine - own).abs().mean(dim=-1).median()) / spread)
    is_quantized = any(isinstance(layer, QuantizedLinear) for layer in target.model.modules())
    allowed = max(TOLERANCE[target.dtype], QUANTIZED_TOLERANCE if is_quantized else 0.0)
    if not all(share <= allowed for share in shares):
        raise GraftError(
            f"{type(target.model).__name__}: with our attention its logits differ from its own by {max(shares):.2g} of "
            "their spread; this model does something our attention does not know, so it is not supported"
        )


def _our_logits(target: Target, prompt: IntArray, tree: TokenTree) -> Tensor:
    cache = SequenceCache(target.new_pool(1))
    half = len(prompt) // 2
    rows = []
    for begin, end in ((0, half), (half, len(prompt))):
        positions = np.arange(begin, end, dtype=np.int32)
        rows += target.forward([Segment(cache, prompt[begin:end], positions)])
        cache.keep(range(end - begin))
    return torch.cat(rows + target.forward([segment_of(cache, tree)]))


def _own_logits(target: Target, token_ids: IntArray) -> Tensor:
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=target.device).unsqueeze(0)
    with returned(target.model), torch.no_grad():
        logits: Tensor = target.model(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def probe_exact(target: Target) -> None:
    """Raise `GraftError` unless a token's logits are bitwise the same decoded alone and verified in a tree.

    Decodes a chain token by token; verifies the same chain as one tree, and each of its tokens among others.
    """
    tokens = probe_tokens(target.vocab_size, PROMPT_LEN + 12)
    prompt, tail = tokens[:PROMPT_LEN], tokens[PROMPT_LEN:]
    one = chain(tail.tolist())
    bushy = TreeBuilder(int(tail[0]))
    node = 0
    for token in tail[1:].tolist():
        for other in range(1, 4):
            bushy.add(node, (token + other) % target.vocab_size, 0.0, Source.DRAFT)
        node = bushy.add(node, token, 0.0, Source.DRAFT)
    tree = bushy.build()
    with target.session():
        together = target.forward([segment_of(_prefilled(target, prompt), one)])[0]
        among = target.forward([segment_of(_prefilled(target, prompt), tree)])[0][tree.path(node)]
        cache, steps = _prefilled(target, prompt), []
        for token in tail.tolist():
            steps.append(target.forward([segment_of(cache, chain([token]))])[0][0])
            cache.keep([0])
    alone = torch.stack(steps)
    if not (torch.equal(together, alone) and torch.equal(among, alone)):
        raise GraftError(
            f"exact mode: {type(target.model).__name__} in {str(target.dtype).removeprefix('torch.')} does not compute "
            "a token bitwise alike alone and in a tree on this machine; leave exact mode off"
        )


def _prefilled(target: Target, prompt: IntArray) -> SequenceCache:
    cache = SequenceCache(target.new_pool(2))
    target.prefill(cache, prompt, rows=len(prompt))
    return cache


def costs_of(target: Target, pool: ChunkPool, config: EngineConfig) -> CostTable | None:
    """Return the table that chooses the number of rows: a file's or measured; None where all is plain decoding."""
    if config.policy == "plain":
        return None
    if config.cost_table is not None:
        return CostTable.load(config.cost_table)
    with target.session():
        return measure_costs(target, pool)
