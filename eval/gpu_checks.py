"""Checks on a GPU: noise, draws, index and attention against the host or `reference`, and whole generations.

Knows every backend by name. Without a GPU (a dry run) the same checks run on the CPU: the index's kernel as host code,
Triton's in its interpreter. What needs a package that is not there is written down as not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longgraft import noise as host_noise
from longgraft.audit import compare
from longgraft.config import EngineConfig, SamplingParams
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.device_draw import Drawing, gumbel
from longgraft.engine import Engine
from longgraft.eval.gpu_cases import Case, Problem, model_of, problem, text_of, truth
from longgraft.eval.gpu_stage import Stage
from longgraft.index import nvrtc
from longgraft.index.dense_store import DenseStore
from longgraft.index.device import DeviceAutomaton, checked_launch, differs
from longgraft.index.device_keys import DeviceDense
from longgraft.index.host_kernel import host_launch
from longgraft.index.projection import Projection
from longgraft.index.suffix_automaton import SuffixAutomaton
from longgraft.kernels.bounded import bounded_attention
from longgraft.kernels.tree_attention import tree_attention
from longgraft.resolve import resolve
from longgraft.sampler import Sampler

DRAWS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.2, "top_k": 50})
NEAR = 0.0625  # logits of bfloat16 in steps of up to 1/32: two steps, since each of two attentions rounds by itself
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = (
    Case(rows=1, prefix=1024),
    Case(rows=17, prefix=257),
    Case(rows=64, prefix=1541),
    Case(rows=5, prefix=0),
    Case(rows=17, prefix=700, window=300),
    Case(rows=17, prefix=300, window=3, softcap=5.0, sinks=True, dim=64),
)
DRY_CASES = (
    Case(rows=5, prefix=300, kv_heads=1, group=2, dim=16),
    Case(rows=3, prefix=0, kv_heads=1, dim=16, sinks=True),
)


def noise(stage: Stage) -> None:
    """Noise and draws have the host's bits; how long a draw takes."""
    vocab, rows = stage.size(152_064, 1_003), 6
    positions = torch.arange(rows, device=stage.device) * 1_000_003 % 2**20
    ours = gumbel((2**63 + 5, 2**33 + 1), positions, 0, vocab).cpu()
    for row, at in zip(ours, positions.tolist()):
        same = np.array_equal(row.numpy(), host_noise.gumbel(2**63 + 5, 2**33 + 1, at, np.arange(vocab)))
        stage.check(f"noise at {at}", same, "" if same else "bits differ from the host's")
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    for fields in DRAWS:
        params = resolve(SamplingParams(**{"seed": 9, "top_k": 0, **fields}), None, vocab)
        drawing = Drawing.of(params, torch.bfloat16, stage.device)
        drawn = drawing.draw(logits.to(stage.device), positions)[0].tolist()
        sampler = Sampler(params, [1], vocab)
        expected = [sampler.draw(row, range(1 + at)).token_id for row, at in zip(logits, positions.tolist())]
        stage.check(f"draws {fields}", drawn == expected, f"{drawn} beside the host's {expected}")
        for n in (1, 16, 64) if not stage.is_dry else (1,):
            many, at = logits[:1].to(stage.device).repeat(n, 1), torch.arange(n, device=stage.device)
            seconds = timed(stage, partial(drawing.draw, many, at))
            stage.figure(f"draw {n} rows {fields}", f"{seconds * 1e3:.3f} ms", seconds=seconds)


def timed(stage: Stage, call: Callable[[], Any], repeats: int = 10) -> float:
    """Return the seconds a call takes when several are queued one behind another, the best of three."""
    repeats = 1 if stage.is_dry else repeats
    call()
    best = float("inf")
    for _ in range(1 if stage.is_dry else 3):
        stage.wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        stage.wait()
        best = min(best, (time.perf_counter() - begin) / repeats)
    return best


def index(stage: Stage) -> None:
    """The device automaton and the dense store give the host's results; what extending and drafting take."""
    with stage.contained("NVRTC"):
        arch = "sm_90" if stage.is_dry else "sm_{}{}".format(*torch.cuda.get_device_capability())
        begin = time.perf_counter()
        cubin = nvrtc.compile_kernel(arch)
        spilt = f"{cubin.registers} registers, {cubin.spill_stores} bytes spilt"
        stage.figure("NVRTC", f"{time.perf_counter() - begin:.2f} s for {arch}, {spilt}")
    with TemporaryDirectory() as folder:
        launch = host_launch(folder) if stage.is_dry else checked_launch(stage.device)
        where = differs(launch, stage.device)
        stage.check("automaton", where == "", where)
        for length in (1_000,) if stage.is_dry else (1_000, 32_000, 128_000):
            _time_index(stage, launch, length)
    rng = np.random.default_rng(1)
    states = rng.standard_normal((stage.size(20_000, 800), 256)).astype(np.float32)
    projection = Projection.fit(states[:500], 64)
    stores = [DenseStore(projection=projection, backend=name) for name in ("numpy", f"torch:{stage.device}")]
    device = DeviceDense(projection, len(states), stage.device)
    for store in stores:
        store.extend(states)
    device.extend(torch.from_numpy(states).to(stage.device))
    queries = states[:: len(states) // 20]
    found = [[store.search(query, 8)[0].tolist() for query in queries] for store in stores]
    there = [device.search(torch.from_numpy(query).to(stage.device), 8)[0].tolist() for query in queries]
    stage.check("dense store behind its protocol", found[0] == found[1])
    shared = [len(set(a) & set(b)) for a, b in zip(found[0], there)]  # cosines may tie within rounding
    stage.check("dense store without the host", min(shared) >= 7, f"of 8 each: {shared}")


def _time_index(stage: Stage, launch: Any, length: int) -> None:
    rng = np.random.default_rng(2)
    pieces = rng.integers(0, 5_000, (40, 50))
    text = pieces[rng.integers(0, 40, length // 50 + 1)].ravel()[:length]
    host = SuffixAutomaton(5_000)
    host.extend(text)
    mirror = DeviceAutomaton(host, stage.device, launch=launch)
    new = torch.from_numpy(text[:4].copy()).to(stage.device)
    extend, draft = (timed(stage, call) for call in (lambda: mirror.extend(new, learn=True), lambda: mirror.draft(60)))
    begin = time.perf_counter()
    for _ in range(20):
        host.extend(text[:4], learn=True)
        host.draft(60)
    own = (time.perf_counter() - begin) / 20
    said = f"extend by 4 {extend * 1e6:.0f} us, draft 60 {draft * 1e6:.0f} us; the host {own * 1e6:.0f} us for both"
    stage.figure(f"index, {length} tokens", said, extend=extend, draft=draft, host=own)


def attention(stage: Stage) -> None:
    """Every backend is as exact as torch's own attention, in every dtype."""
    for dtype in DTYPES[: stage.size(3, 2)]:
        for case in DRY_CASES if stage.is_dry else CASES[: 3 if dtype == torch.float16 else None]:
            made = problem(case, dtype, stage.device)
            true, allowed = truth(made.inputs)
            for name, call in _backends(made).items():
                label = f"{name} {str(dtype)[6:]} {case.rows}x{case.prefix} window {case.window} dim {case.dim}"
                with stage.contained(label):
                    off = float((call().double() - true).abs().max())
                    stage.check(label, off <= allowed, f"off by {off:.3g}, {allowed:.3g} allowed")


def _backends(made: Problem) -> dict[str, Callable[[], Tensor]]:
    inputs = made.inputs
    keys, values = inputs.tree or (None, None)

    def known(backend: str) -> Tensor:
        return tree_attention(
            inputs.query, inputs.prefix, keys, values, inputs.spec, inputs.mask, made.positions, backend
        )

    def bounded(backend: str) -> Tensor:
        assert inputs.tree is not None and inputs.mask is not None
        return bounded_attention(
            inputs.query, made.pool, made.prefix, inputs.tree, inputs.spec, inputs.mask, made.positions, backend
        )

    calls: dict[str, Callable[[], Tensor]] = {name: partial(known, name) for name in ("reference", "triton", "flash")}
    return calls | {f"bounded {name}": partial(bounded, name) for name in ("reference", "triton")}


def lossless(stage: Stage) -> None:
    """Grafted output is plain decoding's: exactly in float64; in bfloat16 until two tokens tie within rounding."""
    rounds = ("plain", "device") if stage.is_dry else ("plain", "device", "graphs")
    prompt_len, new = stage.size(1_500, 200), stage.size(96, 16)
    rough = torch.float32 if stage.is_dry else torch.bfloat16
    for dtype, is_small, near in ((torch.float64, True, 0.0), (rough, stage.is_dry, NEAR)):
        model = model_of(dtype, stage.device, 2, is_small)
        prompt = text_of(model.config.vocab_size, prompt_len)
        for backend in ("auto",) if dtype == torch.float64 or stage.is_dry else ("auto", "triton"):
            for fields in DRAWS:
                params = SamplingParams(**{"seed": 5, "top_k": 0, "max_new_tokens": new, **fields})
                judge = engine_of(model, backend=backend)
                for name in rounds:
                    label = f"{str(dtype)[6:]} {backend} {name} t={fields['temperature']}"
                    with stage.contained(label):
                        output = engine_of(model, backend=backend, round=name).generate(prompt, params)
                        found = compare(judge, prompt, output, params)
                        gaps = [difference.gap for difference in found.differences]
                        is_ok = all(gap is not None and gap <= near for gap in gaps)
                        detail = f"{found.verdict}, gaps {gaps}, {output.stats['acceptance_length']} tokens a round"
                        stage.check(label, is_ok, detail)


def engine_of(model: Any, policy: str = "adaptive", **config: Any) -> Engine:
    """Return an engine whose rounds verify as many nodes as there are: what is checked is that they do no harm."""
    cost = CostTable(np.full(len(ROW_BUCKETS), 1.0), np.zeros(len(ROW_BUCKETS)), frozen=True)
    settings = EngineConfig(policy=policy, max_context=1 << 13, prefix_cache=False, max_nodes=31, **config)
    return Engine(model, None, settings, cost=cost)
