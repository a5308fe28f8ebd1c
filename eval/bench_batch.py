"""`python -m longgraft.eval.bench_batch --model M`: sixteen requests together, and one after another.

Short chats beside long documents, all there from the beginning. Reports tokens a second of both ways of service, the
time between the rounds that bring a request tokens (while documents are read, and over all), the time to first tokens,
whether each output is as alone, and what is still held afterwards. Both ways run in one process on one engine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.eval.bench_texts import library_chat, library_code
from longgraft.eval.environment import environment
from longgraft.eval.soak import resident_mib
from longgraft.request import Request
from longgraft.scheduler import Scheduler

QUESTION = "\n\nWrite down what the last function of this file does.\n"


@dataclass
class Timing:
    """When a request got tokens: seconds from the beginning, and how many."""

    at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def prompts_of(engine: Engine, chats: int, documents: int, length: int) -> list[list[int]]:
    """Return token ids of `chats` questions and of `documents` files of `length` tokens with a question behind them."""
    encode, asked = engine.encode, list[list[int]]()
    code = encode("".join(text for _, text in zip(range(80), library_code())))
    question = encode(QUESTION)
    for number in range(documents):
        asked.append(code[number * length : number * length + length - len(question)] + question)
    for _, text in zip(range(chats), library_chat()):
        head = text[: text.index("<|assistant|>\n") + len("<|assistant|>\n")]
        asked.append(encode(head + "It"))
    return asked


def together(engine: Engine, prompts: Seq[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Serve all at once; returns tokens, seconds and gaps."""
    scheduler, begin, cpu = Scheduler(engine), time.perf_counter(), time.process_time()
    timings, requests = [Timing() for _ in prompts], list[Request]()
    for prompt, timing in zip(prompts, timings):

        def note(new: Seq[int], timing: Timing = timing) -> None:
            timing.at.append(time.perf_counter() - begin)
            timing.tokens.append(len(new))

        requests.append(scheduler.add(engine.open(prompt, params), on_tokens=note))
    reading_until = 0.0
    while scheduler.has_work:
        scheduler.step()
        if any(request.is_reading for request in requests):
            reading_until = time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    for request in requests:
        if request.failure is not None:
            raise request.failure.error
    gaps = [(b, b - a) for timing in timings for a, b in zip(timing.at, timing.at[1:])]
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu,
        "tokens": [tuple(request.seq.new_token_ids) for request in requests],
        "reading_s": reading_until,
        "gap_ms": quantiles([gap for _, gap in gaps]),
        "gap_ms_while_reading": quantiles([gap for at, gap in gaps if at <= reading_until]),
        "first_tokens_s": quantiles([timing.at[0] for timing in timings], 1.0),
        "put_back": sum(request.seq.stats.put_back for request in requests),
    }


def one_by_one(engine: Engine, prompts: Seq[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Serve one after another."""
    begin, cpu, first, tokens = time.perf_counter(), time.process_time(), list[float](), list[tuple[int, ...]]()
    for prompt in prompts:
        seq = engine.open(prompt, params)
        arrived = None
        for _ in engine.run([seq]):
            arrived = arrived or time.perf_counter() - begin
        first.append(arrived or 0.0)
        tokens.append(tuple(seq.new_token_ids))
    spent = {"seconds": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
    return spent | {"tokens": tokens, "first_tokens_s": quantiles(first, 1.0)}


def quantiles(values: Seq[float], unit: float = 1000.0) -> dict[str, float]:
    """Return p50, p99 and the largest; `unit`: by what seconds are multiplied."""
    if not values:
        return {}
    p50, p99, largest = np.quantile(values, [0.5, 0.99, 1.0]) * unit
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(largest), 2)}


def agreement(ours: Seq[tuple[int, ...]], alone: Seq[tuple[int, ...]]) -> dict[str, Any]:
    """Return how many outputs are the same, and where the others first differ."""
    firsts = [next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), None) for pair in zip(ours, alone)]
    return {"same": sum(a == b for a, b in zip(ours, alone)), "of": len(ours), "first_differences": firsts}


def bench(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Run both ways `args.pairs` times, each after a warm-up, and describe them."""
    prompts = prompts_of(engine, args.chats, args.documents, args.length)
    params = SamplingParams(temperature=0.0, max_new_tokens=args.new, ignore_eos=True)
    together(engine, [prompt[:64] for prompt in prompts], SamplingParams(temperature=0.0, max_new_tokens=4))
    before, free = resident_mib(), engine.pool.num_free
    pairs = list[dict[str, Any]]()
    for number in range(args.pairs):
        ways = [together, one_by_one] if number % 2 == 0 else [one_by_one, together]
        ran = {way.__name__: way(engine, prompts, params) for way in ways}
        pairs.append(described(ran))
        if number == 0:
            first = agreement(ran["together"].pop("tokens"), ran["one_by_one"].pop("tokens"))
    held = {"chunks": free - engine.pool.num_free, "wrong": engine.pool.check_integrity()}
    return {
        "bench": "batch", "model": args.model, "dtype": str(engine.target.dtype), "exact": args.exact,
        "round_rows": engine.config.round_rows, "requests": {"chats": args.chats, "documents": args.documents},
        "prompt_tokens": [len(prompt) for prompt in prompts], "new": args.new, "agreement": first,
        "speed_up": round(float(np.median([pair["speed_up"] for pair in pairs])), 3), "pairs": pairs,
        "held": held | {"mib_more": round(resident_mib() - before, 1)}, "environment": environment(),
    }  # fmt: skip


def described(ran: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one pair: output tokens a second of both ways, and what else each says."""
    new = {name: sum(map(len, run["tokens"])) for name, run in ran.items()}
    speeds = {f"{name}_tokens_per_s": round(new[name] / run["seconds"], 2) for name, run in ran.items()}
    figures = {
        name: {k: round(v, 2) if isinstance(v, float) else v for k, v in run.items() if k != "tokens"}
        for name, run in ran.items()
    }
    speed_up = speeds["together_tokens_per_s"] / speeds["one_by_one_tokens_per_s"]
    cpu = ran["one_by_one"]["cpu_s"] / ran["together"]["cpu_s"]
    return {"speed_up": round(speed_up, 3), "speed_up_by_cpu_time": round(cpu, 3)} | speeds | figures


def main() -> None:
    """Parse arguments, run, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--chats", type=int, default=14)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--round-rows", type=int, default=EngineConfig().round_rows)
    parser.add_argument("--policy", default=EngineConfig().policy)
    parser.add_argument("--cost-table")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        exact=args.exact, round_rows=args.round_rows, policy=args.policy, cost_table=args.cost_table, max_context=8192
    )
    report = bench(Engine.from_pretrained(args.model, config, dtype=args.dtype), args)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
