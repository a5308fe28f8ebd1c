"""What a user can turn, and what comes back. Every number has its home, unit and source here.

Knows no model and no tensor library; values are checked when they are made, so that a bad one is one
sentence at the door and not a failure later.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longgraft.trace import Trace


class GraftError(ValueError):
    """Something the user can mend. The message names the thing, what was expected and what to do."""


# Bits of packed linear weights, by the name that users give.
BITS = {"int8": 8, "int4": 4}


def check_quantize(name: str | None) -> None:
    """Raise `GraftError` for a width of weights that there is not."""
    _check(name in (None, *BITS), f"quantize {name!r}: expected {' or '.join(BITS)}, or nothing")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise GraftError(message)


def _finite(name: str, value: Any, optional: bool = False) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    _check(is_number or (optional and value is None), f"{name} is {value!r}: expected a finite number")


def _whole(name: str, value: Any, optional: bool = False) -> None:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    _check(is_whole or (optional and value is None), f"{name} is {value!r}: expected a whole number")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and where generation stops. `None` means: as the model's generation_config says.

    `temperature` 0 is greedy. `seed` None draws one (returned in the output). `sample_index` tells apart
    several answers to one prompt. `logprobs` 0-20 asks for the log-probability of each token and of that many
    alternatives, from the raw logits in fp32. `prompt_logprobs` asks the same of the prompt's tokens, from token
    `prompt_logprobs_from` on (the first token of a text has none); their rows are computed even where earlier requests
    left them. `max_new_tokens` counts committed tokens, the last one included; with 0 the prompt is only scored.
    `processors` are transformers `LogitsProcessor`s, applied after the built-in ones and before temperature.
    `grammar`: a `longgraft.Grammar` that the answer must match, up to its EOS token; applied last before temperature.
    `bad_words_ids` are token-id sequences that must not be completed; `logit_bias` maps token id to an addend.
    `trace` keeps the tree and the times of every round (`Output.trace`); it changes no token.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words_ids: Sequence[Sequence[int]] | None = None
    logit_bias: dict[int, float] | None = None
    min_new_tokens: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    sample_index: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    processors: tuple[Any, ...] = ()
    grammar: Any = None
    trace: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            _finite(name, getattr(self, name), optional=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _finite(name, getattr(self, name))
        for name in ("top_k", "seed", "logprobs", "prompt_logprobs"):
            _whole(name, getattr(self, name), optional=True)
        for name in ("max_new_tokens", "min_new_tokens", "sample_index", "prompt_logprobs_from"):
            _whole(name, getattr(self, name))
        t, k, p, m, r = self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        _check(t is None or t >= 0, f"temperature is {t}: expected 0 (greedy) or more")
        _check(k is None or k >= 0, f"top_k is {k}: expected 0 (off) or more")
        _check(p is None or 0 < p <= 1, f"top_p is {p}: expected above 0, at most 1")
        _check(m is None or 0 <= m <= 1, f"min_p is {m}: expected 0 to 1")
        _check(r is None or r > 0, f"repetition_penalty is {r}: expected above 0")
        _check(self.max_new_tokens >= 0, f"max_new_tokens is {self.max_new_tokens}: expected 0 or more")
        _check(self.min_new_tokens >= 0, f"min_new_tokens is {self.min_new_tokens}: expected 0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(count is None or 0 <= count <= 20, f"{name} is {count}: expected 0 to 20")
        first = self.prompt_logprobs_from
        _check(first >= 0, f"prompt_logprobs_from is {first}: expected 0 or more")
        _check(self.seed is None or 0 <= self.seed < 2**64, f"seed is {self.seed}: expected 0 to 2**64 - 1")
        _check(self.sample_index >= 0, f"sample_index is {self.sample_index}: expected 0 or more")
        is_list = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        _check(is_list, f"stop is {self.stop!r}: expected a tuple of strings")
        _check(all(isinstance(s, str) and s for s in self.stop), "stop: expected non-empty strings")


# plain: one token a pass. dense: EAGLE's fixed tree. pruned: the same behind the gate. paper: Graft as published.
# retrieval: no drafter. adaptive: all proposals in one currency, as many as are worth their cost.
POLICIES = ("plain", "dense", "pruned", "paper", "retrieval", "adaptive")


ROUNDS = ("plain", "device", "graphs")


def check_policy(name: Any) -> None:
    """Raise `GraftError` for anything but the name of a policy."""
    _check(name in POLICIES, f"policy is {name!r}: expected one of {', '.join(POLICIES)}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    `max_nodes`: most proposed nodes a round, root not counted (the paper's 60). `prefill_rows`: prompt rows
    in one forward. `round_rows`: rows of a forward in which some requests decode while prompts of others are read: more
    read faster, fewer let tokens come more evenly. `max_batch`: requests that run at a time, however much memory there
    is. `max_context`: longest prompt + output in tokens (None = the model's own limit). `kv_bytes`:
    cap of the KV pool (None = what `max_context` needs). `policy`: how a round's proposals come about, one of
    `POLICIES` (a request may name another one). `gates`: JSON file with a drafter's thresholds for `pruned` and
    `paper`, made by `longgraft.eval.calibrate_gates` (None = defaults). `exact`: compute everything with
    kernels whose rows do not depend on one another, so that grafted decoding is bitwise plain decoding in low
    precision too; refused where that cannot be had.
    `history_tokens`: how many tokens of answers are kept for later requests of the same tenant (0 = none).
    `prefix_cache`: keep K/V of requests, as long as the KV pool has room, for later ones that begin alike (of the same
    tenant). `prefix_rows`: reuse any rows, those of answers too; else, unless `exact`, only those that reading the same
    prompt anew would compute in the same forwards, `prefill_rows` at a time. `prefix_spill`: folder where what the pool
    has no room for is kept until the process ends, at most `prefix_spill_bytes` (None: nowhere).
    `cost_table`: JSON file with frozen round costs (None = measure). `backend`: attention backend, `auto`,
    `native`, `cpu` or `reference`; on CUDA `triton` or `flash`, which have never run on a GPU and check themselves.
    `round`: `plain`, or `device`: rounds of a request that decodes alone stay on the device, and `graphs`: as CUDA
    graphs (neither has run on a GPU).
    """

    max_nodes: int = 60
    prefill_rows: int = 512
    round_rows: int = 64
    max_batch: int = 64
    max_context: int | None = None
    kv_bytes: int | None = None
    policy: str = "adaptive"
    gates: str | None = None
    exact: bool = False
    history_tokens: int = 0
    prefix_cache: bool = True
    prefix_rows: bool = False
    prefix_spill: str | None = None
    prefix_spill_bytes: int = 8 << 30
    cost_table: str | None = None
    backend: str = "auto"
    round: str = "plain"

    def __post_init__(self) -> None:
        for name in ("max_nodes", "prefill_rows", "round_rows", "max_batch", "history_tokens", "prefix_spill_bytes"):
            _whole(name, getattr(self, name))
        _check(self.history_tokens >= 0, f"history_tokens is {self.history_tokens}: expected 0 (off) or more")
        _check(self.prefix_spill_bytes >= 0, f"prefix_spill_bytes is {self.prefix_spill_bytes}: expected 0 or more")
        for name in ("max_context", "kv_bytes"):
            _whole(name, getattr(self, name), optional=True)
        _check(0 <= self.max_nodes <= 1023, f"max_nodes is {self.max_nodes}: expected 0 to 1023")
        check_policy(self.policy)
        _check(self.round in ROUNDS, f"round is {self.round!r}: expected one of {', '.join(ROUNDS)}")
        for name in ("prefill_rows", "round_rows", "max_batch"):
            _check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: expected 1 or more")
        _check(
            self.max_context is None or self.max_context >= 1,
            f"max_context is {self.max_context}: expected 1 or more",
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token of an answer or prompt, and the likeliest alternatives (token id, log-probability).

    `rank`: 1 for the likeliest token of all, which greedy decoding takes; of equal ones the lower id comes first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One finished generation.

    `token_ids`: the new tokens, the one that completed a stop included. `text`: their text without a matched
    stop string. `finish_reason`: `eos`, `stop`, `length`, `context` (the model's limit), `deadline` or `cancelled`.
    `sources [n]`: the `Source` of each token (ROOT = drawn by the target, not proposed). `origins [n]`:
    (document, offset) it was copied from, or (-1, -1). `documents`: names by document number, 0 being the request
    itself (prompt and answer). `lines [n]`: line of its document that each token was copied from, from 1 on; 0 where
    there is none or no tokenizer knows. `prompt_logprobs [prompt_len]`: where asked for; None for the first token and
    those that were not asked for, or not read before the request was ended. `stats`: plain numbers, see README
    "Metrics". `trace`: every round, if `SamplingParams.trace` asked for it.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    seed: int
    prompt_len: int
    sources: tuple[int, ...]
    origins: tuple[tuple[int, int], ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    documents: tuple[str, ...] = ("",)
    lines: tuple[int, ...] = ()
    stats: dict[str, Any] = field(default_factory=dict)
    trace: "Trace | None" = None
