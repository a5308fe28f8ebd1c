"""What whoever starts the server can turn. Knows no protocol and no engine; every number has its unit here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from longgraft.config import GraftError
from longgraft.server.keys import Keys

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server.

    `names`: what clients may call the model, the first is shown. `keys`: who may ask, and as which tenant (none:
    anybody). `corpora`: names or folders that every tenant may copy from, and does unless a request names its own.
    `shelf`: folder of the corpora that clients bring (None: they may not). `max_requests`: answers on their way at a
    time. `max_choices`: prompts x n of a request. `max_corpora`: of one tenant. `new_tokens`: longest answer of a chat
    that names no length. `request_seconds`: an answer ends with what it has after so long (None: never).
    `ping_seconds`: a stream that has nothing to say is kept alive so often. `drain_seconds`: how long answers may go on
    once the server is to end. `vllm_metrics`: say all numbers under vLLM's names too.
    """

    names: tuple[str, ...]
    keys: Keys = field(default_factory=Keys)
    corpora: tuple[str, ...] = ()
    shelf: Path | None = None
    max_requests: int = 64
    max_choices: int = 32
    max_corpora: int = 64
    max_body_bytes: int = 16 * MIB
    new_tokens: int = 4096
    request_seconds: float | None = None
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0
    vllm_metrics: bool = False

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise GraftError("the model has no name: expected at least one that clients may use")
        for name in ("max_requests", "max_choices", "max_body_bytes", "new_tokens"):
            if getattr(self, name) < 1:
                raise GraftError(f"{name} is {getattr(self, name)}: expected 1 or more")
        if self.max_corpora < 0:
            raise GraftError(f"max_corpora is {self.max_corpora}: expected 0 (none) or more")
        for name in ("ping_seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise GraftError(f"{name} is {getattr(self, name)}: expected more than 0")
        if self.request_seconds is not None and not self.request_seconds > 0:
            raise GraftError(f"request_seconds is {self.request_seconds}: expected more than 0")
