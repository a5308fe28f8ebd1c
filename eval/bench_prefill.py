"""Reading one long prompt: progress, time and memory, beside what it cannot do without.

    python -m longgraft.eval.bench_prefill [--tokens 131072] [--model M] [--dtype float32]

Knows the engine; no round. Without a model one is built from a config: two Llama layers, so that attention, which
grows with the square of the length, is nearly all of it. The floor is all multiply-adds of linear layers and of causal
attention at the rate of torch's own fp32 matrix product of 1024 x 1024, measured in the same run; for a bf16 model on a
processor without instructions for it that is the rate, too. Memory is what the process holds at most beyond what it
held before reading, beside the K/V of the prompt.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from contextlib import closing
from typing import Any

import numpy as np
import torch

from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.eval.bench_linear import multiply_rate
from longgraft.memory import GIB

SAID = (0.1, 0.25, 0.5, 0.75)
"""At these shares of the prompt the estimate of what is left is kept, to be compared with what it took."""


def built(tokens: int, dtype: str) -> Any:
    """Return a causal LM with random weights: 2 layers, 4 heads of 64 on 2 key heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def multiply_adds(model: Any, tokens: int) -> tuple[float, float]:
    """Return the multiply-adds of linear layers (the head, which prompts do not need, left out) and of attention."""
    head = model.get_output_embeddings()
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or tokens
    seen = [min(window, tokens) if kind == "sliding_attention" else tokens for kind in kinds]
    pairs = sum(keys * (tokens - keys / 2) for keys in seen)
    return float(linear) * tokens, 2.0 * config.num_attention_heads * dim * pairs


def peak_bytes() -> int:
    """Return the most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Read a prompt and one token; return seconds, estimates on the way and memory."""
    seq = engine.open(prompt, SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True))
    begin, before = time.perf_counter(), peak_bytes()
    said: list[dict[str, float]] = []

    def progress(done: int, total: int, seconds: float) -> None:
        if len(said) < len(SAID) and SAID[len(said)] * total <= done < total:
            said.append({"done": done / total, "at_s": time.perf_counter() - begin, "left_s": seconds})
            print(f"{done} of {total} tokens, {seconds:.0f} s to go", file=sys.stderr)

    with closing(engine.run([seq], progress)) as rounds:
        next(rounds)
    seconds, held = time.perf_counter() - begin, peak_bytes() - before
    for one in said:
        one["off"] = one["left_s"] / (seconds - one["at_s"]) - 1.0
    kv = engine.pool.bytes_per_chunk * -(-len(prompt) // engine.pool.chunk_rows)
    return {"seconds": seconds, "estimates": said, "held_gib": held / GIB, "kv_gib": kv / GIB}


def main() -> None:
    """Parse the command line, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    rate = multiply_rate()
    config = EngineConfig(max_context=args.tokens)
    if args.model is None:
        engine = Engine(built(args.tokens, args.dtype), None, config)
    else:
        engine = Engine.from_pretrained(args.model, config, dtype=args.dtype)
    vocab = engine.target.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, args.tokens - 1).tolist()
    linear, attention = multiply_adds(engine.target.model, len(prompt))
    result = read(engine, prompt) | {"tokens": len(prompt), "linear": linear, "attention": attention}
    floor = (linear + attention) / rate
    print(json.dumps(result | {"rate": rate, "floor_s": floor, "times_floor": result["seconds"] / floor}))


if __name__ == "__main__":
    main()
