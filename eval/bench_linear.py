"""Our linear layer beside torch's, by rows, shape and dtype, in one run; ends with one JSON line.

What to expect: a pass over few rows cannot be faster than reading the weight from memory once, and over many not
faster than its multiply-adds. Both bounds are measured in the same run (a streaming read of memory, torch's own
fp32 matrix product of 1024 x 1024), and `bound` is our best time over the larger of the two; below 1, our streams
read faster than torch's sum. Each call takes another
copy of the weight, as the layers of a model would, so that it comes from memory and not from cache. Our result is
checked against torch's, and its first row against that row computed alone.

    python -m longgraft.eval.bench_linear [--threads 2] [--repeats 9] [--rows 1,2,4] [--shapes 8960x1536] [--between]

`--between` compares what lies between the layers instead: an RMS norm over a shape's in_features and a gated SiLU over
its out_features, as torch's chains of operations and as one call; their operands stay in cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from longgraft.kernels import rms_norm
from longgraft.kernels import rows_linear as module
from longgraft.kernels.rows_linear import is_available, rows_linear

ROWS = "1,2,4,8,16,32,64,256,512"
SHAPES = "1536x8960,8960x1536,896x4864,151936x896,576x1536"  # out_features x in_features
POOL_BYTES = 384 << 20  # several times a last-level cache
SECONDS = 4.0  # at most so long per line, once each side has run three times


@dataclass(frozen=True, slots=True)
class Line:
    """One size. Times are medians in ms (`*_best`: minima)."""

    shape: str
    dtype: str
    rows: int
    torch_ms: float
    ours_ms: float
    torch_best: float
    ours_best: float
    bound: float

    @property
    def speedup(self) -> float:
        """How many times faster than torch, by medians."""
        return self.torch_ms / self.ours_ms


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_rate() -> float:
    """Return the bytes per second at which torch's threads read memory."""
    data = torch.ones(POOL_BYTES // 4)
    return data.numel() * 4 / min(timed(data.sum) for _ in range(5))


def multiply_rate() -> float:
    """Return multiply-adds per second of torch's fp32 matrix product, a lower bound of what the processor can do."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 1024**3 / min(timed(lambda: a @ b) for _ in range(9))


class Weights:
    """Copies of one weight, handed out in turn."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        weight = torch.randn(shape).to(dtype)
        copies = max(2, POOL_BYTES // (weight.numel() * weight.element_size()))
        self.copies = [weight.clone() for _ in range(copies)]
        self.taken = 0

    def take(self) -> Tensor:
        """Return the copy that was used longest ago."""
        self.taken += 1
        return self.copies[self.taken % len(self.copies)]


def verify(x: Tensor, weight: Tensor) -> None:
    """Raise if our result is not torch's up to rounding, or a row depends on its company."""
    ours, theirs = rows_linear(x, weight), torch_linear(x, weight)
    unit, summed = torch.finfo(x.dtype).eps, 4e-5 * weight.shape[1] ** 0.5
    if not torch.allclose(ours.float(), theirs.float(), rtol=2 * unit, atol=summed):
        raise SystemExit(f"wrong result for {tuple(x.shape)} x {tuple(weight.shape)} {x.dtype}")
    if not torch.equal(rows_linear(x[:1], weight), ours[:1]):
        raise SystemExit(f"a row depends on its company: {tuple(x.shape)} x {tuple(weight.shape)} {x.dtype}")


def measure(weights: Weights, rows: int, repeats: int, rates: tuple[float, float]) -> Line:
    """Time both sides in turn. `rates`: bytes and multiply-adds per second that bound them."""
    weight = weights.take()
    x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
    verify(x, weight)
    theirs: list[float] = []
    ours: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(ours) < repeats and (len(ours) < 3 or time.perf_counter() < end):
        for times, function in ((theirs, torch_linear), (ours, rows_linear)):
            times.append(1e3 * timed(lambda function=function: function(x, weights.take())))  # type: ignore[misc]
    bound = 1e3 * max(weight.numel() * weight.element_size() / rates[0], rows * weight.numel() / rates[1])
    return Line(
        "x".join(map(str, weight.shape)),
        str(weight.dtype).removeprefix("torch."),
        rows,
        statistics.median(theirs),
        statistics.median(ours),
        min(theirs),
        min(ours),
        min(ours) / bound,
    )


def between(shape: tuple[int, int], dtype: torch.dtype, rows: int, repeats: int) -> list[Line]:
    """Time norms in turn with torch's operations for them."""
    inputs = shape[1]
    x = torch.randn(1, rows, inputs).to(dtype)
    weight = torch.randn(inputs).to(dtype)

    def chain() -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)

    sides = {
        f"norm {inputs}": (chain, lambda: rms_norm.norm(x, weight, 1e-6, rms_norm.Style.INNER)),
    }
    lines = []
    for name, (theirs, ours) in sides.items():
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(3 * repeats):
            for kept, side in zip(times, (theirs, ours), strict=True):
                kept.append(1e3 * timed(side))
        (torch_ms, ours_ms), (torch_best, ours_best) = map(statistics.median, times), map(min, times)
        kind = str(dtype).removeprefix("torch.")
        lines.append(Line(name, kind, rows, torch_ms, ours_ms, torch_best, ours_best, float("nan")))
    return lines


def table(lines: Sequence[Line]) -> str:
    """Lay lines out for reading; `x1` is our time over our time for one row."""
    text = [
        f"{'shape':>12} {'dtype':>8} {'rows':>4} {'torch ms':>9} {'ours ms':>8} {'faster':>7} {'x1':>6} {'bound':>6}"
    ]
    single = {(line.shape, line.dtype): line.ours_ms for line in reversed(lines)}
    for line in lines:
        growth = line.ours_ms / single[line.shape, line.dtype]
        text.append(
            f"{line.shape:>12} {line.dtype:>8} {line.rows:>4} {line.torch_ms:>9.3f} {line.ours_ms:>8.3f} "
            f"{line.speedup:>6.2f}x {growth:>6.2f} {line.bound:>6.2f}"
        )
    return "\n".join(text)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--between", action="store_true")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    return parser.parse_args(argv)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where there is no native kernel to measure."""
    options = _arguments(argv)
    if not is_available():
        print(f"nothing to measure: native kernel {module.KERNEL}", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rates = (read_rate(), multiply_rate())
    print(
        f"{module.KERNEL}, threads {options.threads} of {module.THREADS}; "
        f"reads {rates[0] / 1e9:.1f} GB/s, multiplies {rates[1] / 1e9:.0f} G/s"
    )
    lines: list[Line] = []
    for shape in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            outputs, inputs = map(int, shape.split("x"))
            if options.between:
                for rows in map(int, options.rows.split(",")):
                    lines += between((outputs, inputs), getattr(torch, dtype), rows, options.repeats)
                continue
            weights = Weights((outputs, inputs), getattr(torch, dtype))
            lines += [measure(weights, rows, options.repeats, rates) for rows in map(int, options.rows.split(","))]
    print(table(lines))
    results = {f"{line.shape} {line.dtype} {line.rows}": round(line.speedup, 3) for line in lines}
    print(json.dumps({"threads": options.threads, "read": rates[0], "multiply": rates[1], "speedup": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
