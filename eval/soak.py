"""`python -m longgraft.eval.soak --requests 1000 --seed 0`: many requests, some of which are cancelled, late or broken.

A tiny float64 model made from a config serves requests of random length and policy from several threads, while errors
are injected into tokenizer, index, drafter and target. Every request must end with a result or one clear error, a
result must be what plain decoding gives alone, and in the end nothing may be held: no chunk, no session, no request.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longgraft.cache import ChunkPool
from longgraft.config import EngineConfig, GraftError, Output, SamplingParams
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.draft.lm import ModelDrafter
from longgraft.engine import Engine
from longgraft.index.context_index import ContextIndex
from longgraft.service import Service

VOCAB, CONTEXT = 256, 1024
CHUNK_ROWS = 16  # small, so that little text makes a crowd
THREADS = 6
POLICIES = ("plain", "retrieval", "adaptive", "dense", "paper")
# One call in so many fails, in each place.
ONE_IN = {"tokenizer": 400, "index": 400, "drafter": 300, "target": 150}


class Injected(Exception):
    """An error that the soak put there."""


@dataclass
class Faults:
    """Raises `Injected` now and then, in any thread."""

    seed: int
    is_on: bool = True
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def maybe(self, where: str) -> None:
        """Fail, or not."""
        if self.is_on and self._random.randrange(ONE_IN[where]) == 0:
            self.counts[where] += 1
            raise Injected(where)

    def after(self, where: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and then may fail."""

        def calling(*args: Any, **options: Any) -> Any:
            done = call(*args, **options)
            self.maybe(where)
            return done

        return calling


class Letters:
    """A tokenizer that writes token i as the i-th letter of a long alphabet."""

    FIRST = 0x100

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Return the token ids of a text."""
        self._faults.maybe("tokenizer")
        return {"input_ids": [ord(letter) - self.FIRST for letter in text]}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        """Return the text of tokens."""
        self._faults.maybe("tokenizer")
        return "".join(chr(self.FIRST + int(i)) for i in token_ids)


class FaultyIndex(ContextIndex):
    """An index whose calls may fail."""

    faults: Faults

    def extend(self, token_ids: Any, learn: bool = False) -> None:
        """As ever, or not."""
        super().extend(token_ids, learn)
        self.faults.maybe("index")

    def draft(self, budget: int, path: Any = (), at: int = 0) -> Any:
        """As ever, or not."""
        self.faults.maybe("index")
        return super().draft(budget, path, at)


def tiny_model(seed: int, layers: int = 2) -> Any:
    """Return a random float64 model of the llama kind."""
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT, bos_token_id=None,
        eos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def rising(rise: float) -> CostTable:
    """Return a frozen table in which every further row costs `rise` of the first."""
    return CostTable(1.0 + rise * (np.array(ROW_BUCKETS) - 1.0), np.zeros(len(ROW_BUCKETS)), frozen=True)


def faulty_engine(faults: Faults, chunks: int) -> Engine:
    """Return an engine whose parts may fail, with a pool too small for what will be asked of it."""

    def index(vocab_size: int) -> FaultyIndex:
        made = FaultyIndex(vocab_size)
        made.faults = faults
        return made

    drafter = ModelDrafter(tiny_model(1, layers=1), VOCAB, window=32, cost=rising(0.05))
    config = EngineConfig(max_nodes=12, prefill_rows=64, round_rows=48, max_batch=24)
    faults.is_on = False
    engine = Engine(tiny_model(0), Letters(faults), config, drafter=drafter, index=index, cost=rising(0.1))
    engine.pool = ChunkPool(engine.target.layers, chunks, torch.float64, chunk_rows=CHUNK_ROWS)
    engine.target.forward = faults.after("target", engine.target.forward)  # type: ignore[method-assign]
    for name in ("begin", "extend", "prefill", "reset"):
        setattr(drafter, name, faults.after("drafter", getattr(drafter, name)))
    return engine


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request and what is done to it."""

    prompt: str
    params: SamplingParams
    policy: str
    deadline: float | None
    cancel_after: int | None


def wanted(rng: random.Random) -> Wanted:
    """Draw a request: mostly short, some long, with repetitions to copy."""
    piece = [rng.randrange(VOCAB) for _ in range(rng.randrange(4, 24))]
    length = rng.choice([1, 2, 8, 30, 30, 100, 100, rng.randrange(200, 700)])
    ids = (piece * (length // len(piece) + 1))[:length]
    temperature = rng.choice([0.0, 0.8])
    params = SamplingParams(
        max_new_tokens=rng.choice([0, 1, 6, 12, 24, 60]),
        temperature=temperature,
        seed=rng.randrange(1000),
        stop=rng.choice([(), (), (chr(Letters.FIRST + rng.randrange(VOCAB)),)]),
    )
    kind = rng.random()
    return Wanted(
        "".join(chr(Letters.FIRST + i) for i in ids),
        params,
        rng.choice(POLICIES),
        rng.choice([0.0, 0.02, 0.3]) if kind < 0.08 else None,
        rng.randrange(3) if kind > 0.9 else None,
    )


def serve(service: Service, one: Wanted) -> Output | GraftError:
    """Ask for one request as a client does, and return how it ended."""
    try:
        ticket = service.submit(one.prompt, one.params, policy=one.policy, deadline=one.deadline)
        if one.cancel_after is not None:
            for number, _ in enumerate(ticket):
                if number >= one.cancel_after:
                    break
            ticket.cancel()
        return ticket.result(1800)
    except GraftError as error:
        return error


def soak(requests: int, seed: int, chunks: int = 52) -> dict[str, Any]:
    """Run the soak and return what happened; `faults` lists whatever is not as it should be (empty: all is well)."""
    faults = Faults(seed)
    engine, rng = faulty_engine(faults, chunks), random.Random(seed)
    asked = [wanted(rng) for _ in range(requests)]
    ends: list[Output | GraftError | None] = [None] * requests
    unread = iter(range(requests))
    door, memory = threading.Lock(), list[float]()

    def client() -> None:
        while True:
            with door:
                number = next(unread, None)
            if number is None:
                return
            ends[number] = serve(service, asked[number])
            if number in (requests // 4, requests - 1):
                memory.append(resident_mib())

    begin = time.perf_counter()
    faults.is_on = True
    with Service(engine) as service:
        threads = [threading.Thread(target=client) for _ in range(THREADS * 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seconds = time.perf_counter() - begin
    faults.is_on = False
    wrong = held(engine) + different(engine, asked, ends)
    kinds = Counter("error" if isinstance(end, GraftError) else end.finish_reason for end in ends if end is not None)
    return {
        "requests": requests, "seconds": round(seconds, 1), "ends": dict(kinds), "injected": dict(faults.counts),
        "put_back": sum(end.stats["put_back"] for end in ends if isinstance(end, Output)),
        "mib_at_a_quarter_and_at_the_end": [round(one, 1) for one in memory], "wrong": wrong,
    }  # fmt: skip


def held(engine: Engine) -> list[str]:
    """Return what is still held though nothing runs."""
    wrong = []
    for name, pool in (("target", engine.pool), ("drafter", engine.drafter.pool)):  # type: ignore[attr-defined]
        if pool.num_free != pool.num_chunks or pool.check_integrity():
            wrong.append(f"{name}: {pool.num_chunks - pool.num_free} chunks held; {pool.check_integrity()}")
        if engine.target.model.config._attn_implementation == "longgraft":
            wrong.append("the model was not given back")
    return wrong


def different(engine: Engine, asked: list[Wanted], ends: list[Output | GraftError | None]) -> list[str]:
    """Return which requests did not end, and whose tokens are not those of plain decoding alone."""
    wrong = []
    for number, (one, end) in enumerate(zip(asked, ends)):
        if end is None:
            wrong.append(f"request {number} did not end")
        elif isinstance(end, GraftError):
            if "Injected" not in str(end):
                wrong.append(f"request {number}: {end}")
        else:
            alone = engine.generate(one.prompt, one.params, policy="plain")
            is_whole = end.finish_reason in ("cancelled", "deadline") or end.finish_reason == alone.finish_reason
            if end.token_ids != alone.token_ids[: len(end.token_ids)] or not is_whole:
                wrong.append(f"request {number} ({one.policy}): {end.token_ids} alone {alone.token_ids}")
    return wrong


def resident_mib() -> float:
    """Return the memory of this process in MiB; where the system does not tell, the most it ever was."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Parse arguments, run, print one line of JSON; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = soak(args.requests, args.seed)
    print(json.dumps(report))
    raise SystemExit(bool(report["wrong"]))


if __name__ == "__main__":
    main()
