"""The native attention beside torch's kernel, by heads, dtype, cached keys and rows; ends with one JSON line.

What to expect: a call over few rows cannot be faster than reading its keys and values from memory once, and over
many not faster than its multiply-adds. Both bounds are measured in the same run (a streaming read of memory, torch's
own fp32 matrix product of 1024 x 1024), and `bound` is our time over the larger of the two. Each call takes another
copy of the cache, as the layers of a model would. On one thread times are of that thread's processor time, so that
other programs disturb them less. Our result is checked against torch's, and its first row against that row alone.

    python -m longgraft.eval.bench_attention [--threads 2] [--heads 2x6x128] [--keys 128,8192] [--rows 1,16]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longgraft.eval.bench_linear import multiply_rate, read_rate
from longgraft.kernels import cpu, native, rows_linear
from longgraft.kernels.spec import AttentionSpec, Run, TreeInput

HEADS = "2x6x128,2x7x64,3x3x64,1x4x256"  # key heads x query heads for each x head size
KEYS = "128,2048,8192,32768"
ROWS = "1,4,16,64"
PROMPT = (512, (0, 2048, 8192))  # rows of a prompt's chunk, and where it is measured
POOL_BYTES = 192 << 20  # several times a last-level cache
SECONDS = 0.3  # per line and side at least, once each has run three times


@dataclass(frozen=True, slots=True)
class Line:
    """One size: best times in ms, and ours over the larger of the two bounds."""

    heads: str
    dtype: str
    keys: int
    rows: int
    torch_ms: float
    ours_ms: float
    bound: float


class Caches:
    """Copies of one layer's cache, handed out in turn."""

    def __init__(self, heads: tuple[int, int, int], dtype: torch.dtype, keys: int) -> None:
        kv_heads, _, size = heads
        one = (torch.randn(keys, kv_heads, size).to(dtype), torch.randn(keys, kv_heads, size).to(dtype))
        self.bytes = 2 * one[0].numel() * dtype.itemsize
        count = 1 if keys == 0 else max(2, min(64, POOL_BYTES // self.bytes))
        self.copies = [(one[0].clone(), one[1].clone()) for _ in range(count)]
        self.taken = 0

    def take(self) -> list[Run]:
        """Return the copy that was used longest ago; no run where there are no keys."""
        self.taken += 1
        run = self.copies[self.taken % len(self.copies)]
        return [run] if len(run[0]) else []


def binary_tree(rows: int) -> tuple[Tensor, Tensor]:
    """Return the ancestor mask and the depths of a tree of `rows` nodes in which each has two children."""
    mask, depths = torch.eye(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
    for node in range(1, rows):
        mask[node] |= mask[(node - 1) // 2]
        depths[node] = depths[(node - 1) // 2] + 1
    return mask, depths


class Layer:
    """The calls of one line: queries, the rows' own keys, and a cache."""

    def __init__(self, heads: tuple[int, int, int], caches: Caches, keys: int, rows: int) -> None:
        kv_heads, group, size = heads
        dtype = caches.copies[0][0].dtype
        self.caches, self.spec = caches, AttentionSpec(size**-0.5)
        self.query = torch.randn(kv_heads * group, rows, size).to(dtype).transpose(0, 1)
        tree = [torch.randn(kv_heads, rows, size).to(dtype).transpose(0, 1) for _ in range(2)]
        self.tree = (tree[0], tree[1])
        mask, depths = binary_tree(rows)
        chain = rows >= PROMPT[0]
        self.mask = None if chain else mask
        self.positions = keys + (torch.arange(rows) if chain else depths)

    def inputs(self) -> TreeInput:
        """Return one call's tensors, with the next copy of the cache."""
        return TreeInput(self.query, self.caches.take(), self.tree, self.spec, self.mask, self.positions)

    def verify(self) -> None:
        """Raise if our result is not torch's up to rounding, or a row depends on its company."""
        inputs = self.inputs()
        ours, theirs = native.attend(inputs), cpu.attend(inputs)
        loose = 16 * torch.finfo(ours.dtype).eps
        if not torch.allclose(ours.float(), theirs.float(), rtol=loose, atol=loose):
            raise SystemExit(f"wrong result: {(ours.float() - theirs.float()).abs().max()} off")
        root = (self.tree[0][:1], self.tree[1][:1])
        alone = TreeInput(self.query[:1], inputs.prefix, root, self.spec, None, self.positions[:1])
        if not torch.equal(native.attend(alone), ours[:1]):
            raise SystemExit("a row depends on its company")


def best(calls: Sequence[Callable[[], Any]], clock: Callable[[], float]) -> list[float]:
    """Return the least time in ms of each call, taken in turn."""
    least = [float("inf")] * len(calls)
    end, done = time.perf_counter() + SECONDS * len(calls), 0
    while done < 3 or (time.perf_counter() < end and done < 300):
        for i, call in enumerate(calls):
            start = clock()
            call()
            least[i] = min(least[i], 1e3 * (clock() - start))
        done += 1
    return least


def measure(heads: tuple[int, int, int], caches: Caches, sizes: tuple[int, int], rates: tuple[float, float]) -> Line:
    """Time both sides in turn; `sizes`: keys and rows; `rates`: bytes and multiply-adds per second that bound them."""
    keys, rows = sizes
    layer = Layer(heads, caches, keys, rows)
    layer.verify()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    theirs, ours = best([lambda: cpu.attend(layer.inputs()), lambda: native.attend(layer.inputs())], clock)
    kv_heads, group, size = heads
    own = (rows + 1) / 2 if layer.mask is None else float(layer.mask.sum()) / rows
    products = 2 * rows * kv_heads * group * size * (keys + own)
    bound = 1e3 * max(caches.bytes / rates[0], products / rates[1])
    dtype = str(layer.query.dtype).removeprefix("torch.")
    return Line("x".join(map(str, heads)), dtype, keys, rows, theirs, ours, ours / bound)


def table(lines: Sequence[Line]) -> str:
    """Lay lines out for reading."""
    text = [
        f"{'heads':>8} {'dtype':>9} {'keys':>6} {'rows':>4} {'torch ms':>9} {'ours ms':>9} {'faster':>7} {'bound':>6}"
    ]
    for line in lines:
        text.append(
            f"{line.heads:>8} {line.dtype:>9} {line.keys:>6} {line.rows:>4} {line.torch_ms:>9.3f} {line.ours_ms:>9.3f} "
            f"{line.torch_ms / line.ours_ms:>6.2f}x {line.bound:>6.2f}"
        )
    return "\n".join(text)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--keys", default=KEYS)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--no-prompt", action="store_true", help="leave out the chunks of a prompt")
    return parser.parse_args(argv)


def _sizes(options: argparse.Namespace) -> dict[int, list[int]]:
    """Rows to measure, by keys."""
    sizes = {int(keys): [int(rows) for rows in options.rows.split(",")] for keys in options.keys.split(",")}
    for keys in () if options.no_prompt else PROMPT[1]:
        sizes.setdefault(keys, []).append(PROMPT[0])
    return dict(sorted(sizes.items()))


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where there is no native kernel to measure."""
    options = _arguments(argv)
    if not rows_linear.is_available():
        print(f"nothing to measure: native kernel {rows_linear.KERNEL}", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rates = (read_rate(), multiply_rate())
    print(f"{rows_linear.KERNEL}, threads {options.threads} of {rows_linear.THREADS}; ", end="")
    print(f"reads {rates[0] / 1e9:.1f} GB/s, multiplies {rates[1] / 1e9:.0f} G/s")
    lines = []
    for shape in options.heads.split(","):
        kv_heads, group, size = map(int, shape.split("x"))
        heads = (kv_heads, group, size)
        for dtype in options.dtypes.split(","):
            for keys, each in _sizes(options).items():
                caches = Caches(heads, getattr(torch, dtype), keys)
                lines += [measure(heads, caches, (keys, rows), rates) for rows in each]
    print(table(lines))
    results = {f"{x.heads} {x.dtype} {x.keys} {x.rows}": [round(x.torch_ms, 4), round(x.ours_ms, 4)] for x in lines}
    print(json.dumps({"threads": options.threads, "read": rates[0], "multiply": rates[1], "ms": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
