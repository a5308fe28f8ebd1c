"""What a benchmark is asked to measure. Knows names of policies, tasks and peers; loads no model and reads no suite.

A result folder holds cells of one identity: what changes a cell cannot change between two runs into one folder, what
only adds cells can.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longgraft import __version__
from longgraft.config import POLICIES, GraftError
from longgraft.eval.environment import environment
from longgraft.eval.peers import PEERS
from longgraft.eval.policy_tasks import TASKS
from longgraft.eval.suites import FEWEST_TOKENS, check_spec

MOST_NEW = 256
# Policies that can be had without a drafter.
DRAFTLESS = ("plain", "retrieval", "adaptive")
# What may differ between two runs that share a folder: it adds cells and changes none.
GROWING = ("tasks", "contexts", "seeds", "pairs")


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is measured. `new`: most tokens a run; `pairs`: repeats of every cell; `gguf`: the model for llama.cpp.

    `tasks`: as `eval/suites.py` names them. `gates`: as `EngineConfig` takes it. `policies` empty: all that can be had
    with this drafter. `seeds`: each is another prompt of the same kind.
    """

    model: str
    draft: str | None = None
    policies: tuple[str, ...] = ()
    tasks: tuple[str, ...] = tuple(TASKS)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    new: int = 128
    seeds: tuple[int, ...] = (0,)
    pairs: int = 1
    dtype: str = "auto"
    device: str | None = None
    quantize: str | None = None
    cost_table: str | None = None
    gates: str | None = None
    peers: tuple[str, ...] = ()
    gguf: str | None = None
    traces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.policies:
            object.__setattr__(self, "policies", POLICIES if self.draft else DRAFTLESS)
        _refuse_others("policies", self.policies, POLICIES)
        _refuse_others("peers", self.peers, tuple(PEERS))
        for task in self.tasks:
            check_spec(task)
        _refuse_twice("tasks", self.tasks)
        if lacking := [name for name in self.policies if name not in DRAFTLESS and not self.draft]:
            raise GraftError(f"policies: {', '.join(lacking)} needs a drafter: give --draft NAME, or leave it out")
        for name, least, most in (("contexts", FEWEST_TOKENS, 2**24), ("seeds", 0, 2**32)):
            _refuse_outside(name, getattr(self, name), least, most)
        _refuse_outside("new", (self.new,), 1, MOST_NEW)
        _refuse_outside("pairs", (self.pairs,), 1, 1000)
        if not (self.tasks and self.contexts and self.seeds):
            raise GraftError("tasks, contexts and seeds: expected at least one of each")

    def command(self, out: str) -> str:
        """Return the command line that asks for this."""
        words = ["longgraft", "bench"]
        for name, value in asdict(self).items():
            if value not in (None, (), "auto"):
                # Files are given one by one, everything else with commas.
                texts = (
                    value if name == "traces" else [",".join(map(str, value)) if isinstance(value, tuple) else value]
                )
                words += [word for text in texts for word in (f"--{name.replace('_', '-')}", str(text))]
        return shlex.join([*words, "--out", out])

    def identity(self) -> dict[str, Any]:
        """Return what every cell of a folder must have in common."""
        values = {name: value for name, value in asdict(self).items() if name not in GROWING}
        for name in ("cost_table", "gates", "traces"):
            files = [values[name]] if isinstance(values[name], str) else values[name] or ()
            values[name] = [_digest_of(file) for file in files]
        found: dict[str, Any] = json.loads(json.dumps({"longgraft": __version__, **values, **environment()}))
        return found


def _refuse_others(name: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for one in given:
        if one not in known:
            raise GraftError(f"{name}: {one!r} is not known; expected some of {', '.join(known)}")
    _refuse_twice(name, given)


def _refuse_twice(name: str, given: tuple[Any, ...]) -> None:
    if len(set(given)) < len(given):
        raise GraftError(f"{name}: {', '.join(map(str, given))} names one twice")


def _refuse_outside(name: str, given: tuple[int, ...], least: int, most: int) -> None:
    for one in given:
        if not least <= one <= most:
            raise GraftError(f"{name}: {one}; expected {least} to {most}")
    _refuse_twice(name, given)


def _digest_of(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise GraftError(f"{file}: cannot be read ({error.strerror or error})") from None
