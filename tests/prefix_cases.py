"""What tests of the prefix cache share: texts that begin alike, and what to compare of their answers."""

from __future__ import annotations

import copy
import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch

from longgraft.config import Output, SamplingParams
from longgraft.engine import Engine
from tests.cases import plain_generate
from tests.engines import model_of, prompt_of

DOCUMENT = prompt_of(600)
FIRST, SECOND = DOCUMENT + prompt_of(40, 1), DOCUMENT + prompt_of(37, 2)
NEW = 8
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW)
HOT = SamplingParams(temperature=0.9, seed=3, max_new_tokens=NEW)
CHUNK = 256 * 2 * 2 * 2 * 16 * 8  # bytes: rows, K and V, layers, heads, head size, float64


def truth(prompt: list[int]) -> list[int]:
    """The greedy answer of the tiny llama."""
    return list(_truth(tuple(prompt)))


@lru_cache(maxsize=64)
def _truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(plain_generate(model_of(), prompt, n=NEW))


def is_whole(engine: Engine) -> bool:
    """No chunk is in use, and the books balance."""
    store = engine.prefixes.store
    sound = (engine.pool.check_integrity(), store.check_integrity()) == ("", "")
    return sound and engine.pool.num_free == engine.pool.num_chunks and not engine.prefixes._runs


def trees_of(output: Output) -> Any:
    """What was proposed and accepted in each round, and by whom."""
    names = ("accepted_by_round", "new_tokens_by_round", "nodes_by_source_depth", "accepted_by_source_depth")
    return [output.stats[name] for name in names], output.sources, output.origins, output.token_ids


def adapted(*names: str) -> Any:
    """The tiny model with LoRA adapters of random weights."""
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(model_of())
    for seed, name in enumerate(names):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lora = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a second adapter is meant
                peft.inject_adapter_in_model(lora, model, name)
    return model.to(torch.float64).eval()


def rows_of(engine: Engine, prompt: list[int]) -> tuple[int, list[torch.Tensor]]:
    """How many rows of a prompt are reused, and its keys and values, layer by layer."""
    seq = engine.open(prompt, GREEDY)
    with engine.target.session():
        engine.prefill(seq)
    runs = [seq.cache.runs(layer) for layer in range(2)]
    rows = [torch.cat([pair[part] for pair in one]) for one in runs for part in (0, 1)]
    seq.cache.release()
    return seq.stats.prefix_rows, rows
