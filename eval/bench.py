"""Benchmarks of the engine's own parts. Each checks what it times, prints a table, and ends with one JSON line.

round: everything in a round outside the target's pass (retrieve, build trees, accept, commit), against a target
that answers at once. step: one plain decode step beside transformers' DynamicCache + sdpa. costs: t(N, L), the time
of a pass of N rows behind L tokens, over random K/V, without reading a prompt. Ratios are taken within one run.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longgraft.accept import accept
from longgraft.cache import ChunkPool, LayerShape, SequenceCache
from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.eval.bench_linear import multiply_rate, read_rate
from longgraft.eval.environment import environment
from longgraft.graft import graft
from longgraft.index.context_index import ContextIndex
from longgraft.kernels.tree_attention import BACKENDS
from longgraft.measure import filled, time_forward
from longgraft.memory import skeleton, weight_bytes
from longgraft.policy import RetrievalPolicy
from longgraft.resolve import resolve
from longgraft.sampler import Sampler
from longgraft.sequence import Sequence
from longgraft.stats import Stats
from longgraft.stop import StopRules
from longgraft.target import Target
from longgraft.tree import IntArray, TreeBuilder, Verification


def source_tokens(length: int, vocab_size: int) -> IntArray:
    """Return `length` tokens of real source code: words and signs of Python's library, hashed into the vocabulary."""
    import re

    words: list[str] = []
    for path in sorted(Path(json.__file__).parent.parent.glob("*.py")):
        words += re.findall(r"\w+|\s+|[^\w\s]", path.read_text(errors="replace"))
        if len(words) >= length:
            break
    return np.array([zlib.crc32(word.encode()) % vocab_size for word in words[:length]], np.int32)


def bench_round(args: argparse.Namespace) -> dict[str, Any]:
    """Time rounds against a target that answers at once with logits that agree with real text."""
    vocab, context = args.vocab, args.context
    tokens = source_tokens(context + 4000, vocab)
    pool = ChunkPool([LayerShape(2, 64, 64)] * 24, context // 256 + 32, torch.bfloat16, torch.device("cpu"))
    params = resolve(SamplingParams(temperature=0.0, max_new_tokens=10**6, ignore_eos=True), None, vocab)
    seq = Sequence(
        token_ids=tokens[:context].tolist(),
        prompt_len=context,
        cache=SequenceCache(pool),
        index=ContextIndex(vocab),
        sampler=Sampler(params, tokens[:context].tolist(), vocab),
        stop=StopRules((), (), 10**6, 10**6, None),
        stats=Stats(),
        policy=RetrievalPolicy(args.nodes, vocab),
    )
    seq.cache.reserve(context - 1)
    seq.cache.keep(range(context - 1))
    seq.index.extend(np.asarray(seq.token_ids, np.int32), learn=False)
    logits = torch.randn(args.nodes + 1, vocab).to(torch.bfloat16)
    samples: dict[str, list[float]] = {"plan": [], "accept": [], "extend": [], "total": [], "observe": []}
    moved = seq.cache.rows_moved
    while len(seq.token_ids) < len(tokens) - 64 and len(samples["total"]) < args.rounds:
        _one_round(seq, tokens, logits, args.nodes, samples)
    rounds = len(samples["total"])
    row = {f"{name}_ms_p50": float(np.median(times)) * 1e3 for name, times in samples.items()}
    row |= {
        "total_without_refresh_ms_p50": float(np.median(np.array(samples["total"]) - np.array(samples["observe"])))
        * 1e3,
        "context": context,
        "nodes": args.nodes,
        "vocab": vocab,
        "rounds": rounds,
        "acceptance_length": (len(seq.token_ids) - context) / rounds,
        "rows_moved_per_round": (seq.cache.rows_moved - moved) / rounds,
    }
    return {"bench": "round", "rows": [row, *_bench_sampling(vocab)]}


def _one_round(
    seq: Sequence, tokens: IntArray, logits: torch.Tensor, nodes: int, samples: dict[str, list[float]]
) -> None:
    start = time.perf_counter()
    builder = TreeBuilder(seq.root_token)
    found = seq.index.draft(nodes)
    graft(builder, [found] if found else [], logits.shape[1], max_depth=64)
    tree = builder.build(nodes + 1)
    positions, mask = tree.positions(seq.cache.length), tree.ancestor_mask()
    planned = time.perf_counter()
    assert len(positions) == len(mask)
    seq.cache.reserve(len(tree))
    answers = _agree(tree, tokens, len(seq.token_ids), logits)
    asked = time.perf_counter()
    result = Verification(tree, answers, None, np.arange(len(tree), dtype=np.int32))
    accepted = accept(result, seq.sampler, seq.token_ids, seq.stop)
    new = seq.stop.clip(accepted.token_ids)
    chosen = time.perf_counter()
    seq.extend(new, result, accepted)
    done = time.perf_counter()
    expected = tokens[len(seq.token_ids) - len(new) : len(seq.token_ids)].tolist()
    assert new == expected, "the round committed something the target did not say"
    before = time.perf_counter()
    seq._observe(result, accepted.path)
    samples["observe"].append(time.perf_counter() - before)
    for name, value in (("plan", planned - start), ("accept", chosen - asked), ("extend", done - chosen)):
        samples[name].append(value)
    samples["total"].append(planned - start + done - asked)


def _agree(tree: Any, tokens: IntArray, length: int, logits: torch.Tensor) -> torch.Tensor:
    """Return logits whose largest entry is the true next token at every node that lies on the true text."""
    rows = logits[: len(tree)].clone()
    on_text = {0}
    for node in range(1, len(tree)):
        depth = int(tree.depths[node])
        if int(tree.parents[node]) in on_text and tree.token_ids[node] == tokens[length + depth - 1]:
            on_text.add(node)
    for node in on_text:
        rows[node, tokens[length + int(tree.depths[node])]] = 50.0
    return rows


def _bench_sampling(vocab: int) -> Iterator[dict[str, Any]]:
    logits = (torch.randn(64, vocab) * 3).to(torch.bfloat16)
    settings = {
        "greedy": SamplingParams(temperature=0.0),
        "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
        "top_k 50": SamplingParams(temperature=0.8, top_k=50, seed=1),
        "temperature only": SamplingParams(temperature=1.0, seed=1),
        "top_p, flat logits": SamplingParams(temperature=5.0, top_p=0.95, seed=1),
    }
    for name, params in settings.items():
        sampler = Sampler(resolve(params, None, vocab), [1, 2, 3], vocab)
        history = [1, 2, 3]
        times = []
        for row in logits:
            begin = time.perf_counter()
            sampler.draw(row, history)
            times.append(time.perf_counter() - begin)
        yield {"draw": name, "vocab": vocab, "ms_p50": float(np.median(times)) * 1e3}


def bench_step(args: argparse.Namespace) -> dict[str, Any]:
    """Time one plain decode step beside transformers' DynamicCache + sdpa at each context, interleaved."""
    engine = Engine.from_pretrained(
        args.model, EngineConfig(policy="plain", prefix_cache=False), dtype=args.dtype, quantize=args.quantize
    )
    rows = []
    for context in args.contexts:
        cache = filled(engine.target, engine.pool, context)
        theirs = _transformers_step(engine, context)
        ours: list[float] = []
        other: list[float] = []
        for _ in range(args.repeats):
            with engine.target.session():
                ours.append(time_forward(engine.target, cache, 1, repeats=1))
            other.append(theirs())
        cache.release()
        rows.append(
            {
                "context": context,
                "ours_ms": float(np.median(ours)) * 1e3,
                "transformers_ms": float(np.median(other)) * 1e3,
                "ratio": float(np.median(np.array(other) / np.array(ours))),
            }
        )
    return {"bench": "step", "model": args.model, "dtype": args.dtype, "rows": rows}


def _transformers_step(engine: Engine, context: int) -> Callable[[], float]:
    from transformers import DynamicCache

    target = engine.target
    cache = DynamicCache(config=target.model.config)
    for layer, shape in enumerate(target.layers):
        keys = torch.randn(1, shape.kv_heads, context, shape.key_dim).to(target.dtype)
        cache.update(keys, keys.clone(), layer)
    token = torch.zeros(1, 1, dtype=torch.long)
    # The argument's name changed in transformers 5.24.
    name = "cache" if "cache" in inspect.signature(target.model.forward).parameters else "past_key_values"

    def step() -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            target.model(input_ids=token, **{name: cache}, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - begin
        cache.crop(-1)
        return seconds

    return step


def bench_costs(args: argparse.Namespace) -> dict[str, Any]:
    """Time passes of N rows behind L random K/V rows, backends of attention in turn, beside what bounds them."""
    engine = Engine.from_pretrained(
        args.model, EngineConfig(policy="plain", prefix_cache=False), dtype=args.dtype, quantize=args.quantize
    )
    target, found = engine.target, list[dict[str, Any]]()
    cache = filled(target, engine.pool, max(args.contexts))
    rates = read_rate(), multiply_rate()
    with target.session():
        for context in sorted(args.contexts, reverse=True):
            cache.truncate(context)
            lines = [{"context": context, "backend": name} for name in (*args.backends, "bound")]
            for n in args.rows:
                for line in lines[:-1]:
                    target.backend = line["backend"]
                    line[str(n)] = round(time_forward(target, cache, n, args.repeats) * 1e3, 2)
                lines[-1][str(n)] = round(bound_of(target, n, context, rates, args.quantize) * 1e3, 2)
            found += lines[::-1]
    return {"bench": "costs", "model": args.model, "dtype": args.dtype, "unit": "ms", "rows": found[::-1]}


def bound_of(target: Target, rows: int, context: int, rates: tuple[float, float], quantize: str | None = None) -> float:
    """Return the seconds that a pass takes at least: reading weights and K/V once, or all its multiply-adds.

    `rates`: bytes a second that torch reads, and multiply-adds a second of its fp32 product; both are what this
    machine has shown, not what it could.
    """
    bare = skeleton(target.model.config)  # without storage: linear layers as they were before packing
    embeddings, head = bare.get_input_embeddings().weight, bare.get_output_embeddings().weight
    read = weight_bytes(bare, target.dtype, quantize)
    if quantize is not None or embeddings is not head:
        read -= embeddings.numel() * target.dtype.itemsize  # of which a pass reads a row a token
    read += context * sum(s.kv_heads * (s.key_dim + s.value_dim) for s in target.layers) * target.dtype.itemsize
    cells = sum(m.weight.numel() for m in bare.modules() if isinstance(m, torch.nn.Linear))
    heads = target.config.num_attention_heads
    products = rows * (cells + context * sum(heads * (s.key_dim + s.value_dim) for s in target.layers))
    return max(read / rates[0], products / rates[1])


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table; rows with other columns begin a new one."""
    lines: list[str] = []
    header: list[str] = []
    for row in rows:
        if list(row) != header:
            header = list(row)
            lines += ["", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m longgraft.eval.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("round")
    one.add_argument("--context", type=int, default=32768)
    one.add_argument("--nodes", type=int, default=60)
    one.add_argument("--vocab", type=int, default=151936)
    one.add_argument("--rounds", type=int, default=200)
    one.set_defaults(run=bench_round)
    for name, run in (("step", bench_step), ("costs", bench_costs)):
        one = commands.add_parser(name)
        one.add_argument("--model", required=True)
        one.add_argument("--dtype", default="auto")
        one.add_argument("--quantize", choices=["int8", "int4"])
        one.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
        one.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
        one.add_argument("--repeats", type=int, default=5)
        if name == "costs":
            one.add_argument("--backends", nargs="+", default=["auto"], choices=BACKENDS)
        one.set_defaults(run=run)
    args = parser.parse_args()
    report = args.run(args) | {"environment": environment()}
    print(table(report["rows"]))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
