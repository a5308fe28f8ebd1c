"""128K tokens of context on a small model built from config: memory, and bytes moved a round."""

import resource
from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longgraft.config import EngineConfig, SamplingParams
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.engine import Engine

CONTEXT = 128 * 1024
GIB = 1024**3


def small_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.float32).eval()


@pytest.mark.slow
def test_128k_tokens_stay_small_and_lossless() -> None:
    flat = CostTable(np.full(len(ROW_BUCKETS), 1.0), np.zeros(len(ROW_BUCKETS)), frozen=True)
    grafted = Engine(small_model(), None, EngineConfig(), cost=flat)
    plain = Engine(grafted.target.model, None, EngineConfig(policy="plain"), pool=grafted.pool)
    piece = np.random.default_rng(0).integers(0, 1024, 3000).tolist()
    prompt = (piece * 50)[: CONTEXT - 64]
    params = SamplingParams(temperature=0.0, max_new_tokens=48, ignore_eos=True)
    first = plain.open(prompt, params)
    with plain.target.session():
        plain.prefill(first)
    outputs = []
    for engine in (plain, grafted):
        seq = engine.open(prompt, params)
        seq.cache = first.cache.fork()
        with closing(engine.run([seq])) as rounds:
            for _ in rounds:
                pass
        outputs.append(engine.output(seq))
        # Copy-on-write of the shared last chunk once, then at most a tree's rows a round.
        assert seq.cache.rows_moved <= 256 + 61 * outputs[-1].stats["rounds"]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].stats["nodes"] > 0
    first.cache.release()
    assert grafted.pool.num_free == grafted.pool.num_chunks
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak < 6 * GIB, f"peak memory {peak / GIB:.1f} GiB"
