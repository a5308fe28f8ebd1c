"""Times on a GPU beside what the hardware allows: copies, products, forwards t(N, L), rounds, transformers.

Knows engines and models of `gpu_cases`. The one idea: a time says something only beside a count, so every forward
comes with the bytes it must read and the operations it must do, at the rates measured on the same device first.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft.cache import SequenceCache
from longgraft.config import SamplingParams
from longgraft.eval.gpu_cases import model_of, text_of
from longgraft.eval.gpu_checks import engine_of, timed
from longgraft.eval.gpu_stage import Stage
from longgraft.measure import filled
from longgraft.target import Segment, Target

ROWS, LENGTHS = (1, 2, 4, 8, 16, 32, 64), (1_024, 4_096, 16_384, 65_536, 131_072)
RATES = Path(tempfile.gettempdir(), f"longgraft_gpu_rates_{os.getuid() if hasattr(os, 'getuid') else 0}.json")


def ceilings(stage: Stage) -> None:
    """Measure copy bandwidth, matrix products, a launch and a wait; later stages read them."""
    rates = {"bytes": 0.0, "flops": 0.0}
    size = stage.size(1 << 31, 1 << 20)
    source = torch.zeros(size // 4, device=stage.device)
    target = torch.empty_like(source)
    rates["bytes"] = 2 * size / timed(stage, lambda: target.copy_(source))
    stage.figure("copy, read + written", f"{rates['bytes'] / 1e12:.2f} TB/s", rate=rates["bytes"])
    for dtype, n in ((torch.bfloat16, stage.size(8192, 64)), (torch.float32, stage.size(4096, 64))):
        a, b = (torch.randn(n, n, device=stage.device).to(dtype) for _ in "ab")
        rate = 2 * n**3 / timed(stage, lambda a=a, b=b: a @ b)  # type: ignore[misc]
        rates["flops"] = max(rates["flops"], rate)
        stage.figure(f"product {str(dtype)[6:]} {n}", f"{rate / 1e12:.1f} TFLOP/s", rate=rate)
    one = torch.zeros(1, device=stage.device)
    launch = timed(stage, lambda: one.add_(1), 200)
    wait = timed(stage, lambda: one.add_(1).item(), 50)
    stage.figure("launch, read back", f"{launch * 1e6:.1f} us, {wait * 1e6:.1f} us", launch=launch, wait=wait)
    RATES.write_text(json.dumps(rates))


def forwards(stage: Stage) -> None:
    """Time a forward of N rows behind L cached ones, beside the bytes and operations it cannot do without."""
    rates = json.loads(RATES.read_text()) if RATES.exists() else None
    model = model_of(torch.float32 if stage.is_dry else torch.bfloat16, stage.device, 2, stage.is_dry)
    lengths = (300,) if stage.is_dry else LENGTHS
    for backend in ("auto", "triton"):
        with stage.contained(f"forwards {backend}"), (target := Target(model, backend)).session():
            pool = target.new_pool(-(-(lengths[-1] + 64) // 256) + 1)
            for length in lengths:
                cache = filled(target, pool, length)
                widths = _widths(stage, backend, length)
                line = [f"{rows}: {_time_forward(stage, target, cache, (rows, length), rates)}" for rows in widths]
                stage.figure(f"t(N, {length}) {backend}, ms and share of the device", ", ".join(line))
                cache.release()


def _widths(stage: Stage, backend: str, length: int) -> tuple[int, ...]:
    """Which N are timed: plain torch copies the prefix for every layer, so it gets few."""
    if stage.is_dry:
        return (1, 3)
    if backend == "triton":
        return ROWS
    return (1, 16, 64) if length <= 16_384 else (1,)


def _time_forward(
    stage: Stage, target: Target, cache: SequenceCache, sizes: tuple[int, int], rates: dict[str, float] | None
) -> str:
    rows, length = sizes
    segment = Segment(cache, np.zeros(rows, np.int32), np.arange(length, length + rows, dtype=np.int32))

    def run() -> list[Tensor]:
        cache.truncate(length)
        return target.forward([segment])

    seconds = timed(stage, run, 5)
    cache.truncate(length)
    weights = sum(p.numel() for name, p in target.model.named_parameters() if "embed" not in name)
    per_row = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in target.layers)
    heads = int(target.config.num_attention_heads)
    counted = (weights + per_row * (length + rows)) * target.dtype.itemsize
    flops = 2 * weights * rows + sum(2 * heads * (s.key_dim + s.value_dim) for s in target.layers) * rows * length
    floor = max(counted / rates["bytes"], flops / rates["flops"]) if rates else 0.0
    numbers = {"rows": rows, "length": length, "seconds": seconds, "bytes": counted, "flops": flops, "floor": floor}
    stage.figure(f"{target.backend} N={rows} L={length}", backend=target.backend, **numbers)
    return f"{seconds * 1e3:.3f} ({floor / seconds:.0%})"


def rounds(stage: Stage) -> None:
    """Time whole rounds, plain and on the device, and a plain step beside transformers'."""
    layers = stage.size(8, 2)
    model = model_of(torch.float32 if stage.is_dry else torch.bfloat16, stage.device, layers, stage.is_dry)
    prompt, new = text_of(model.config.vocab_size, stage.size(4_096, 64)), stage.size(96, 8)
    backends = ("auto",) if stage.is_dry else ("auto", "triton")
    for backend in backends:
        for policy in ("plain", "adaptive"):
            for name in ("plain", "device") if stage.is_dry else ("plain", "device", "graphs"):
                label = f"{policy} policy, {name} rounds, {backend}"
                with stage.contained(label):
                    _time_rounds(stage, label, engine_of(model, policy, backend=backend, round=name), prompt, new)
    with stage.contained("transformers"):
        step = _transformers_step(stage, model, prompt, new)
        stage.figure(f"transformers' step, {layers} layers", f"{step * 1e3:.3f} ms", seconds=step)


def _time_rounds(stage: Stage, label: str, engine: Any, prompt: list[int], new: int) -> None:
    params = SamplingParams(max_new_tokens=new, temperature=0.0)
    engine.generate(prompt, params)
    stats = engine.generate(prompt, params).stats
    per_round, rate = stats["decode_s"] / max(stats["rounds"], 1), stats["decode_tokens_per_s"]
    by_stage = {name: s / max(stats["rounds"], 1) for name, s in stats["seconds_by_stage"].items() if name != "prefill"}
    outside = per_round - by_stage.get("verify", 0.0)
    said = f"{per_round * 1e3:.3f} ms a round, {outside * 1e3:.3f} of it outside the forward, {rate:.0f} tokens/s"
    stage.figure(label, said, seconds=per_round, by_stage=by_stage, tokens_per_s=rate)


def _transformers_step(stage: Stage, model: Any, prompt: list[int], new: int) -> float:
    """Return the seconds of one greedy step of transformers' own generate, its cache and sdpa."""
    ids = torch.tensor([prompt], device=stage.device)
    times = []
    for tokens in (1, 1 + new):
        for _ in range(2):
            stage.wait()
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, use_cache=True)
            stage.wait()
            seconds = time.perf_counter() - begin
        times.append(seconds)
    return (times[1] - times[0]) / new
