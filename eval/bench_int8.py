"""Weights of 8 or 4 bits beside the original ones in one run: time per layer and forward, agreement of greedy tokens.

What to expect: a forward of few rows is bound by reading the weights, so half the bytes should take about half the
time (4 bits: a third), and sixteen rows little more than one. Sides take turns, each layer call reads another copy of
its weight, so that it comes from memory; medians and minima of the same run are compared, since the machine may be
shared. The quantised model is another model: `agreement` is the share of positions of a text (teacher forcing) at which
its likeliest token is the original's, beside the mean Kullback-Leibler divergence of its predictions.

    python -m longgraft.eval.bench_int8 [--bits 4] [--threads 2] [--repeats 7] [--shapes 4864x896] [--model DIR]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft.cache import SequenceCache
from longgraft.eval.bench_linear import POOL_BYTES, Weights, timed
from longgraft.kernels.packed_linear import KERNEL
from longgraft.kernels.rows_linear import rows_linear
from longgraft.load import load
from longgraft.quantize import quantize
from longgraft.quantized_linear import QuantizedLinear, pack
from longgraft.target import Segment, Target

ROWS = "1,4,8,16,64"
PREFIX = 128  # tokens in the cache of a timed forward
TEXT_ROWS = 64  # text rows per forward


@dataclass(frozen=True, slots=True)
class Line:
    """One size, times in ms: medians, and minima as `*_best`."""

    name: str
    rows: int
    original: float
    packed: float
    original_best: float
    packed_best: float

    def __str__(self) -> str:
        return (
            f"{self.name:>16} {self.rows:>4} {self.original:>9.2f} {self.packed:>9.2f} "
            f"{self.packed / self.original:>6.2f} {self.original_best:>9.2f} {self.packed_best:>8.2f} "
            f"{self.packed_best / self.original_best:>6.2f}"
        )


HEADER = f"{'':>16} {'rows':>4} {'bf16 ms':>9} {'packed ms':>9} {'ratio':>6} {'bf16 best':>9} {'best':>8} {'ratio':>6}"


def line(name: str, rows: int, sides: Sequence[Callable[[], Any]], repeats: int) -> Line:
    """Time the original (first) and the packed side in turn."""
    times: tuple[list[float], ...] = ([], [])
    for _ in range(repeats):
        for kept, side in zip(times, sides, strict=True):
            kept.append(1e3 * timed(side))
    return Line(name, rows, *map(statistics.median, times), *map(min, times))


def layer_lines(shape: str, rows: Sequence[int], repeats: int, bits: int = 8) -> list[Line]:
    """Compare one layer of `out x in` with bf16 weights, ours on both sides, with its packed self."""
    outputs, inputs = map(int, shape.split("x"))
    weights = Weights((outputs, inputs), torch.bfloat16)
    first = pack(weights.copies[0], bits)
    count = max(2, POOL_BYTES // first.nbytes)
    copies = [replace(first, values=first.values.clone()) for _ in range(count)]
    layers = [QuantizedLinear(copy, None, torch.bfloat16) for copy in copies]
    turn = iter(range(1 << 30))

    def take() -> QuantizedLinear:
        return layers[next(turn) % count]

    lines = []
    for n in rows:
        x = torch.randn(n, inputs).bfloat16()
        sides = (lambda x=x: rows_linear(x, weights.take()), lambda x=x: take().forward(x))
        lines.append(line(shape, n, sides, repeats))
    return lines


class Side:
    """A model behind our target, with a text read into its cache."""

    def __init__(self, model: Any, token_ids: np.ndarray[Any, Any]) -> None:
        self.target = Target(model)
        self.token_ids = token_ids
        self.cache = SequenceCache(self.target.new_pool(8))
        with self.target.session():
            self.target.prefill(self.cache, token_ids[:PREFIX], TEXT_ROWS)

    def forward(self, rows: int) -> None:
        """One forward of `rows` rows behind the prefix, dropped again."""
        positions = np.arange(PREFIX, PREFIX + rows, dtype=np.int32)
        with self.target.session():
            self.target.forward([Segment(self.cache, self.token_ids[:rows], positions)])
        self.cache.keep([])

    def predictions(self) -> Tensor:
        """Log-probabilities of the next token at every position of the text. [n, V]"""
        cache, parts = SequenceCache(self.target.new_pool(-(-len(self.token_ids) // 256) + 1)), []
        with self.target.session():
            for begin in range(0, len(self.token_ids), TEXT_ROWS):
                part = self.token_ids[begin : begin + TEXT_ROWS]
                positions = np.arange(begin, begin + len(part), dtype=np.int32)
                parts += self.target.forward([Segment(cache, part, positions)])
                cache.keep(range(len(part)))
        return torch.cat(parts).float().log_softmax(-1)


def agreement(original: Tensor, ours: Tensor) -> tuple[float, float]:
    """Return the share of equal argmaxes and the mean divergence of our predictions from the original's, in nats."""
    same = (original.argmax(-1) == ours.argmax(-1)).float().mean()
    divergence = (original.exp() * (original - ours)).nansum(-1).mean()
    return float(same), float(divergence)


def model_lines(
    name: str, reading: tuple[str, int], rows: Sequence[int], repeats: int, bits: int = 8
) -> tuple[list[Line], dict[str, Any]]:
    """Compare forwards of a model in bf16 with those of its packed self, and their predictions.

    `reading`: a text, and how many of its tokens are read at most.
    """
    text, tokens = reading
    model, tokenizer = load(name, "bfloat16", "cpu")
    token_ids = np.array(tokenizer.encode(text)[:tokens], np.int32)
    if len(token_ids) < PREFIX:
        raise SystemExit(f"the text has {len(token_ids)} tokens; expected at least {PREFIX}")
    other = copy.deepcopy(model)
    start = time.perf_counter()
    made = quantize(other, bits=bits)
    seconds = time.perf_counter() - start
    sides = (Side(model, token_ids), Side(other, token_ids))
    lines = [
        line(Path(name).name[-16:], n, [lambda s=s, n=n: s.forward(n) for s in sides], repeats)  # type: ignore[misc]
        for n in rows
    ]
    same, divergence = agreement(*(side.predictions() for side in sides))
    return lines, {
        "layers": made.layers, "bytes": [made.bytes_before, made.bytes_after], "seconds": round(seconds, 1),
        "tokens": len(token_ids), "agreement": round(same, 4), "divergence": round(divergence, 5),
    }  # fmt: skip


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--shapes", default="", help="out x in, comma-separated, of layers")
    parser.add_argument("--bits", type=int, default=8, choices=[8, 4], help="of the packed weights")
    parser.add_argument("--model", default="", help="a model to compare with its quantised self")
    parser.add_argument("--text", default=__file__, help="what it reads")
    parser.add_argument("--tokens", type=int, default=512)
    return parser.parse_args(argv)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; prints a table and one JSON line."""
    options = _arguments(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [int(n) for n in options.rows.split(",")]
    print(f"kernel {KERNEL}, {options.bits} bits, threads {options.threads}\n{HEADER}", flush=True)
    lines: list[Line] = []
    facts: dict[str, Any] = {}
    for shape in filter(None, options.shapes.split(",")):
        lines += layer_lines(shape, rows, options.repeats, options.bits)
    if options.model:
        text = Path(options.text).read_text(encoding="utf-8")
        reading = (text, options.tokens)
        found, facts = model_lines(options.model, reading, rows, options.repeats, options.bits)
        lines += found
    print("\n".join(map(str, lines)))
    ratios = {f"{one.name} {one.rows}": round(one.packed_best / one.original_best, 3) for one in lines}
    print(json.dumps({"bits": options.bits, "threads": options.threads, "ratios": ratios, **facts}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
