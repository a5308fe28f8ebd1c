"""What plain decoding says of the engine tests' prompts, and whether an engine left everything whole."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from longgraft.config import SamplingParams
from longgraft.engine import Engine
from tests.cases import plain_generate
from tests.engines import model_of

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
CHUNK = 2 * 2 * 2 * 16 * 256 * 8  # K and V, layers, heads, head size, rows, bytes of float64


class Trouble(Exception):
    """What tests raise where nothing of ours would."""


def trouble(*_: Any, **__: Any) -> Any:
    """Raise it, whatever it is called with."""
    raise Trouble("injected")


@lru_cache(maxsize=64)
def _truth(prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    return tuple(plain_generate(model_of(), prompt, n=new))


def truth_of(prompt: list[int], new: int = 24) -> list[int]:
    """What plain decoding says; not to be asked for while an engine runs the model."""
    return list(_truth(tuple(prompt), new))


def is_whole(engine: Engine) -> bool:
    """True if every chunk is free, and the model has its own attention."""
    pool = engine.pool
    own = engine.target.model.config.get_text_config()._attn_implementation
    return pool.num_free == pool.num_chunks and pool.check_integrity() == "" and own == "sdpa"
