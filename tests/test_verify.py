"""Verification: one pass over the trees of a batch says of every node what the model says of its path."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from longgraft.config import SamplingParams
from longgraft.engine import Engine
from longgraft.sequence import Sequence
from longgraft.tree import TokenTree, Verification, chain
from longgraft.verify import run_segments, segment_of, verified
from tests import engines
from tests.cases import token_tree
from tests.engines import engine_for, model_of, prompt_of

ARCHS = ("llama", "gemma3", "gpt_oss", "qwen3_moe")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def opened(engine: Engine, token_ids: list[int]) -> Sequence:
    """A sequence whose prompt has been read."""
    seq = engine.open(token_ids, SamplingParams(max_new_tokens=64))
    engine.prefill(seq)
    return seq


def verify(engine: Engine, batch: list[Sequence], trees: list[TokenTree]) -> list[Verification]:
    segments = [segment_of(seq.cache, tree) for seq, tree in zip(batch, trees)]
    return [verified(tree, rows) for tree, rows in zip(trees, run_segments(engine.target, segments))]


def rooted(name: str, root: int) -> TokenTree:
    tree = token_tree(name)
    tokens = tree.token_ids.copy()
    tokens[0] = root
    return TokenTree(tokens, tree.parents, tree.scores, tree.sources, tree.origins)


@torch.no_grad()
def logits_after(engine: Engine, text: list[int]) -> torch.Tensor:
    return engine.target.model(input_ids=torch.tensor([text]), use_cache=False, logits_to_keep=1).logits[0, -1]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_node_gets_the_logits_of_its_path(arch: str) -> None:
    engine = engine_for(arch, max_context=512)
    prompts = [prompt_of(70, 0, arch), prompt_of(9, 1, arch), prompt_of(40, 2, arch)]
    trees = [rooted(name, prompt[-1]) for name, prompt in zip(("random", "chain", "root"), prompts)]
    with engine.target.session():
        batch = [opened(engine, prompt) for prompt in prompts]
        results = verify(engine, batch, trees)
        assert [seq.cache.reserved for seq in batch] == [len(tree) for tree in trees], "rows wait to be kept"
    for seq in batch:
        seq.cache.release()
    for prompt, tree, result in zip(prompts, trees, results):
        assert result.tree is tree and result.slots.tolist() == list(range(len(tree)))
        for node in (0, len(tree) // 2, len(tree) - 1):
            text = prompt[:-1] + tree.token_ids[tree.path(node)].tolist()
            assert torch.allclose(result.logits[node], logits_after(engine, text), atol=1e-4)


def test_a_chain_needs_no_mask_and_a_tree_has_its_ancestors() -> None:
    engine, prompt = engine_for(max_context=512), prompt_of(20)
    with engine.target.session():
        cache = opened(engine, prompt).cache
    straight = segment_of(cache, chain([3, 4, 5]))
    assert straight.mask is None and straight.positions.tolist() == [19, 20, 21]
    tree = token_tree("bushy")
    bushy = segment_of(cache, tree)
    assert np.array_equal(bushy.mask, tree.ancestor_mask())  # type: ignore[arg-type]
    assert bushy.positions.tolist() == (19 + tree.depths).tolist()
    assert bushy.wants_logits and bushy.token_ids is tree.token_ids
    cache.release()


def test_one_forward_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sequences and nodes there are."""
    engine, prompts = engine_for(max_context=512), [prompt_of(5), prompt_of(30)]
    calls = []
    forward = model_of().forward

    def counted(*args: object, **options: object) -> object:
        calls.append(options["input_ids"].shape)  # type: ignore[attr-defined]
        return forward(*args, **options)

    monkeypatch.setattr(model_of(), "forward", counted)
    with engine.target.session():
        batch = [opened(engine, prompt) for prompt in prompts]
        calls.clear()
        verify(engine, batch, [token_tree("bushy"), token_tree("chain")])
    assert calls == [(1, len(token_tree("bushy")) + len(token_tree("chain")))]
    for seq in batch:
        seq.cache.release()
