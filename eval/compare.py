"""Plain, grafted and, if asked for, transformers' prompt lookup, on the tasks of `tasks.py`, in one run.

Each prompt is read once and its K/V forked, so that runs differ in decoding alone. Runs are interleaved: plain,
grafted, plain again; the second plain run shows the noise. Reported: decode tokens/s of each, the median ratio, the
acceptance length, end-to-end time with reading the prompt counted in, and whether the tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Any

import torch

from longgraft.config import EngineConfig, Output, SamplingParams
from longgraft.cost import CostTable
from longgraft.engine import Engine
from longgraft.eval.bench import table
from longgraft.eval.environment import environment
from longgraft.eval.tasks import TASKS, prompt_ids
from longgraft.sequence import Sequence


def main() -> None:
    """Run the comparison named on the command line; JSON on the last line."""
    parser = argparse.ArgumentParser(prog="python -m longgraft.eval.compare", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tasks", default="rewrite,quote,new_file,chat", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--new", type=int, default=192, help="new tokens a run")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--lookup", action="store_true", help="also transformers' prompt_lookup_num_tokens=10")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--cost-table")
    args = parser.parse_args()
    config = EngineConfig(exact=args.exact, cost_table=args.cost_table, prefix_cache=False)
    grafted = Engine.from_pretrained(args.model, config, dtype=args.dtype)
    plain = Engine(
        grafted.target.model,
        grafted.tokenizer,
        EngineConfig(policy="plain", exact=args.exact, prefix_cache=False),
        pool=grafted.pool,
    )
    rows = [compare(plain, grafted, task, args) for task in args.tasks.split(",")]
    print(table(rows))
    cost = grafted.cost
    assert isinstance(cost, CostTable)
    report = {"bench": "compare", "model": args.model, "dtype": str(grafted.target.dtype), "exact": args.exact}
    report |= {"linear": grafted.target.linear.name, "rows": rows, "environment": environment()}
    report["cost_ms_at_2k"] = [round(float(c) * 1e3, 2) for c in cost.rounds(64, 2048)[[0, 1, 3, 7, 15, 31, 63]]]
    print(json.dumps(report))


def compare(plain: Engine, grafted: Engine, task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the report."""
    ids = prompt_ids(task, grafted.tokenizer)
    params = SamplingParams(temperature=0.0, max_new_tokens=args.new)
    first = plain.open(ids, params)
    with plain.target.session():
        plain.prefill(first)
    ours: list[Output] = []
    before: list[Output] = []
    after: list[Output] = []
    for _ in range(args.pairs):
        before.append(decode(plain, first, params))
        ours.append(decode(grafted, first, params))
        after.append(decode(plain, first, params) if args.pairs > 1 else before[-1])
    prefill = first.stats.seconds["prefill"]
    speed, base = (statistics.median(o.stats["decode_tokens_per_s"] for o in runs) for runs in (ours, before))
    ratios = [o.stats["decode_tokens_per_s"] / b.stats["decode_tokens_per_s"] for o, b in zip(ours, before)]
    noise = [b.stats["decode_tokens_per_s"] / a.stats["decode_tokens_per_s"] for a, b in zip(after, before)]
    ends = [prefill + runs[0].stats["decode_s"] for runs in (before, ours)]
    row = {
        "task": task,
        "prompt": len(ids),
        "new": len(ours[0].token_ids),
        "plain_tok_s": base,
        "grafted_tok_s": speed,
        "ratio": statistics.median(ratios),
        "plain_vs_plain": statistics.median(noise),
        "acceptance_length": ours[0].stats["acceptance_length"],
        "accepted_of_nodes": f"{ours[0].stats['accepted']}/{ours[0].stats['nodes']}",
        "end_to_end_ratio": ends[0] / ends[1],
        "same_tokens": ours[0].token_ids == before[0].token_ids,
    }
    if args.lookup:
        row |= lookup(grafted, ids, args.new, speed)
    first.cache.release()
    return row


def decode(engine: Engine, first: Sequence, params: SamplingParams) -> Output:
    """Generate behind a fork of a prompt that was read already."""
    seq = engine.open(first.token_ids[: first.prompt_len], params)
    seq.cache = first.cache.fork()
    with closing(engine.run([seq])) as rounds:
        for _ in rounds:
            pass
    return engine.output(seq)


def lookup(engine: Engine, ids: Seq[int], new: int, ours: float) -> dict[str, Any]:
    """Time transformers' own prompt lookup on the same prompt; reading the prompt is timed apart and taken off."""
    inputs = torch.tensor([list(ids)])
    options = {"do_sample": False, "prompt_lookup_num_tokens": 10, "attention_mask": torch.ones_like(inputs)}
    times = []
    for length in (1, new):
        begin = time.perf_counter()
        with torch.no_grad():
            out = engine.target.model.generate(inputs, max_new_tokens=length, **options)
        times.append(time.perf_counter() - begin)
    speed = (out.shape[1] - len(ids) - 1) / (times[1] - times[0])
    return {"lookup_tok_s": speed, "grafted_over_lookup": ours / speed}


if __name__ == "__main__":
    main()
