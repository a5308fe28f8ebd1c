"""Whole generations with a block drafter: the output is plain decoding's, whatever the drafter says."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from longgraft.config import POLICIES, EngineConfig, GraftError, SamplingParams
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.draft.block import BlockDrafter, load_block_drafter
from longgraft.draft.block_config import read_config
from longgraft.draft.block_ends import Ends
from longgraft.engine import Engine
from longgraft.tree import Source
from tests.draft.blocks import HIDDEN, SPECULATORS, ZLAB, save, tensors
from tests.draft.test_block_weights import SMALL, small_vocabulary
from tests.engines import all_nodes, model_of, prompt_of
from tests.models import VOCAB

LENGTH = 20
DRAFTING = [policy for policy in POLICIES if policy not in ("plain", "retrieval")]


class Telling(nn.Module):
    """A network that knows the text: right except at every `wrong`th position, sure of itself."""

    max_positions = 10_000

    def __init__(self, text: list[int], wrong: int) -> None:
        super().__init__()
        self.text, self.wrong = text, wrong

    def open(self) -> Any:
        return SimpleNamespace(length=0)

    def run(self, context: Any, block: Tensor, features: Tensor) -> Tensor:
        context.length += len(features)
        rows = torch.zeros(len(block), VOCAB, dtype=block.dtype)
        for i in range(len(block)):
            place = context.length + i  # row i stands for the token at this position; row 0 is the root
            token = self.text[place] if place < len(self.text) else 0
            rows[i, (token + (place % self.wrong == 0)) % VOCAB] = 12.0
        return rows


def cheap() -> CostTable:
    """A pass takes a hundredth of what the target's row takes: worth making."""
    return CostTable(np.full(len(ROW_BUCKETS), 0.01), np.zeros(len(ROW_BUCKETS)), frozen=True)


def telling(text: list[int], wrong: int) -> BlockDrafter:
    head = nn.Linear(VOCAB, VOCAB, bias=False, dtype=torch.float64)
    nn.init.eye_(head.weight)
    ends = Ends(model_of().get_input_embeddings(), head)
    return BlockDrafter(model_of(), read_config(ZLAB), Telling(text, wrong), ends, window=400, cost=cheap())


def engine(drafter: Any, policy: str = "adaptive", **settings: Any) -> Engine:
    return Engine(model_of(), None, EngineConfig(policy=policy, **settings), drafter=drafter, cost=all_nodes())


@lru_cache(maxsize=1)
def plain_engine() -> Engine:
    return Engine(model_of(), None, EngineConfig(policy="plain"), cost=all_nodes())


def plain(prompt: Any, params: SamplingParams) -> Any:
    return plain_engine().generate(prompt, params)


def ready(drafter: BlockDrafter, policy: str) -> Engine:
    """An engine, where this policy can be had."""
    made = engine(drafter, policy)
    try:
        made.policies.get(policy)
    except GraftError as error:
        if "not there yet" not in str(error):
            raise
        pytest.skip(str(error))
    return made


def weights_of(name: str, tmp_path: Path) -> Path:
    """A checkpoint of random weights in one of three shapes."""
    if name == "speculators":
        return save(
            tmp_path, {**SPECULATORS, "draft_vocab_size": SMALL, "sample_from_anchor": True}, small_vocabulary()
        )
    if name == "restarts":
        return save(tmp_path, {**ZLAB, "max_position_embeddings": 17}, tensors())
    options = {"mask_token_id": 7, "target_layer_ids": [1, 0]}
    return save(tmp_path, {**ZLAB, "dflash_config": options}, tensors(2 * HIDDEN))


@pytest.mark.parametrize("policy", DRAFTING)
@pytest.mark.parametrize(("name", "temperature"), [("zlab", 1.0), ("speculators", 1.0), ("restarts", 0.0)])
def test_lossless_with_random_weights(name: str, temperature: float, policy: str, tmp_path: Path) -> None:
    drafter = load_block_drafter(weights_of(name, tmp_path), model_of())
    drafter.cost.table = cheap()
    params = SamplingParams(temperature=temperature, seed=4, max_new_tokens=LENGTH)
    prompt = prompt_of(40)
    output = ready(drafter, policy).generate(prompt, params)
    assert output.token_ids == plain(prompt, params).token_ids


@pytest.mark.parametrize("policy", DRAFTING)
@pytest.mark.parametrize(("wrong", "temperature"), [(3, 1.0), (7, 0.0)])
def test_lossless_and_faster_where_the_drafter_knows(wrong: int, temperature: float, policy: str) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_new_tokens=LENGTH)
    prompt = prompt_of(40)
    truth = plain(prompt, params).token_ids
    drafter = telling([*prompt, *truth], wrong)
    output = ready(drafter, policy).generate(prompt, params)
    assert output.token_ids == truth
    assert output.sources.count(Source.DRAFT) > 3


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_clipped_rounds_end_where_plain_ones_do(stop: int) -> None:
    prompt = prompt_of(40)
    params = SamplingParams(temperature=0.0, max_new_tokens=LENGTH)
    truth = list(plain(prompt, params).token_ids)
    ended = SamplingParams(temperature=0.0, max_new_tokens=LENGTH, eos_token_ids=(truth[stop],))
    output = engine(telling([*prompt, *truth], 1000)).generate(prompt, ended)
    assert list(output.token_ids) == truth[: truth.index(truth[stop]) + 1]


def test_several_requests_and_chunked_prompts(tmp_path: Path) -> None:
    drafter = load_block_drafter(weights_of("restarts", tmp_path), model_of())
    drafter.cost.table = cheap()
    prompts = [prompt_of(40), prompt_of(40)[:1], prompt_of(40)[7:24], prompt_of(40)[:2]]
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=12)
    outputs = engine(drafter, prefill_rows=7).generate(prompts, params)
    expected = plain(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
