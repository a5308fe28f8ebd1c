"""What a policy benchmark is asked to measure, and the folder its finished cells lie in.

Knows names of policies, tasks and peers; loads no model. A folder holds cells of one identity: what changes a cell
cannot change between two runs into one folder, what only adds cells can.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longgraft import __version__
from longgraft.config import POLICIES, GraftError
from longgraft.eval.bench import environment
from longgraft.eval.peers import PEERS
from longgraft.eval.policy_tasks import TASKS

MOST_NEW = 256
# Policies that can be had without a drafter.
DRAFTLESS = ("plain", "retrieval", "adaptive")
# What may differ between two runs that share a folder: it adds cells and changes none.
GROWING = ("tasks", "contexts", "seeds", "pairs")


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is measured. `new`: most tokens a run; `pairs`: repeats of every cell; `gguf`: the model for llama.cpp.

    `gates`: as `EngineConfig` takes it. `policies` empty: all that can be had with this drafter. `seeds`: each is
    another prompt of the same kind.
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
        for name, known in (("policies", POLICIES), ("tasks", tuple(TASKS)), ("peers", tuple(PEERS))):
            _refuse_others(name, getattr(self, name), known)
        if lacking := [name for name in self.policies if name not in DRAFTLESS and not self.draft]:
            raise GraftError(f"policies: {', '.join(lacking)} needs a drafter: give --draft NAME, or leave it out")
        for name, least, most in (("contexts", 64, 2**24), ("seeds", 0, 2**32)):
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
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += [f"--{name.replace('_', '-')}", text]
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
    if len(set(given)) < len(given):
        raise GraftError(f"{name}: {', '.join(given)} names one twice")


def _refuse_outside(name: str, given: tuple[int, ...], least: int, most: int) -> None:
    for one in given:
        if not least <= one <= most:
            raise GraftError(f"{name}: {one}; expected {least} to {most}")
    if len(set(given)) < len(given):
        raise GraftError(f"{name}: {', '.join(map(str, given))} names one twice")


def _digest_of(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise GraftError(f"{file}: cannot be read ({error.strerror or error})") from None


class Folder:
    """Where finished cells lie. A folder holds cells of one identity; anything else is refused."""

    def __init__(self, path: str, identity: dict[str, Any]) -> None:
        self.path = Path(path)
        try:
            (self.path / "cells").mkdir(parents=True, exist_ok=True)
            found = self.path / "settings.json"
            if any((self.path / "cells").glob("*.json")):
                self._refuse_other(json.loads(found.read_text()), identity)
            elif not found.exists() or json.loads(found.read_text()) != identity:
                # Nothing was measured yet, so nothing is lost; but the tables belong to what was asked for before.
                for stale in self.path.glob("*cost_table.json"):
                    stale.unlink()
                write_whole(found, identity)
        except (OSError, ValueError) as error:
            if isinstance(error, GraftError):
                raise
            raise GraftError(f"--out {path}: cannot be used ({error}); give another folder") from None

    def _refuse_other(self, before: Any, identity: dict[str, Any]) -> None:
        before = before if isinstance(before, dict) else {}
        differing = [name for name, value in identity.items() if before.get(name) != value]
        if differing or before.keys() - identity.keys():
            raise GraftError(
                f"--out {self.path} holds cells of other settings ({', '.join(differing) or 'of another version'}): "
                "give another folder, or the settings it was begun with"
            )

    def cell(self, prompt: tuple[str, int, int], repeat: int) -> Path:
        """Return the file of one cell of (task, context, seed)."""
        task, context, seed = prompt
        return self.path / "cells" / f"{task}-{context}-seed{seed}-{repeat}.json"

    def cells(self) -> list[dict[str, Any]]:
        """Return every finished cell, in the order of the files' names."""
        found = []
        for path in sorted((self.path / "cells").glob("*.json")):
            try:
                found.append(json.loads(path.read_text()))
            except (OSError, ValueError) as error:
                raise GraftError(f"{path}: not a cell of a benchmark ({error}); delete it, and it is redone") from None
        return found


def write_whole(path: Path, values: Any) -> None:
    """Write JSON so that the file is either whole or not there."""
    beside = path.with_suffix(f".{os.getpid()}.part")
    beside.write_text(json.dumps(values, indent=1) + "\n")
    beside.replace(path)
