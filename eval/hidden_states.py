"""What a target thought at every position of a known text: states of a few layers, and its likeliest next tokens.

Knows plain transformers and no part of the engine. The text is fed chunk by chunk with a KV cache; one file a text
is kept, so that measuring again costs nothing. A text that begins like the one before it is read on from there.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.eval.replay import Trace

CHUNK = 512
NUM_TOP = 8
LEAST_SHARED = 256  # tokens in common with the last text for which its cache is kept


@dataclass(frozen=True, slots=True, eq=False)
class Thoughts:
    """A trace, `states [n, layers, hidden]` after layer `layers[i]` (counted from 1), `top_ids [n, NUM_TOP]`."""

    trace: Trace
    layers: tuple[int, ...]
    states: npt.NDArray[np.float16]
    top_ids: npt.NDArray[np.int32]


class Reader:
    """A model that reads texts and remembers what it thought."""

    def __init__(self, model_name: str, layers: Sequence[int] = ()) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()
        count = self.model.config.get_text_config().num_hidden_layers
        self.layers = tuple(layers) or tuple(sorted({max(1, round(count * part)) for part in (1 / 3, 1 / 2, 2 / 3, 1)}))
        if any(not 1 <= layer <= count for layer in self.layers):
            raise GraftError(f"layers {self.layers}: the model has layers 1 to {count}")
        self._seen: dict[int, npt.NDArray[np.float16]] = {}
        stack = self.model.get_decoder().layers
        for layer in self.layers:
            stack[layer - 1].register_forward_hook(self._keep(layer))
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed between releases
        self._cache: Any = None
        self._last: tuple[npt.NDArray[np.int32], npt.NDArray[np.float16], npt.NDArray[np.int32]] | None = None

    def _keep(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            rows = (output[0] if isinstance(output, tuple) else output)[0]
            self._seen[layer] = rows.clamp(-60000, 60000).half().numpy()

        return hook

    def read(self, trace: Trace) -> Thoughts:
        """Feed a trace; O(n) forwards of `CHUNK` tokens."""
        import torch

        shared, states, top_ids = self._begin(trace.token_ids)
        parts, tops = [states], [top_ids]
        with torch.no_grad():
            for start in range(shared, len(trace.token_ids), CHUNK):
                ids = torch.from_numpy(trace.token_ids[start : start + CHUNK].astype(np.int64))[None]
                logits = self.model(ids, use_cache=True, **{self._cache_name: self._cache}).logits[0]
                tops.append(logits.topk(NUM_TOP).indices.int().numpy())
                parts.append(np.stack([self._seen[layer] for layer in self.layers], axis=1))
        self._last = (trace.token_ids, np.concatenate(parts), np.concatenate(tops))
        return Thoughts(trace, self.layers, self._last[1], self._last[2])

    def _begin(self, token_ids: npt.NDArray[np.int32]) -> tuple[int, Any, Any]:
        from transformers import DynamicCache

        if self._last is not None:
            before, states, top_ids = self._last
            n = min(len(before), len(token_ids))
            shared = int(np.append(before[:n] != token_ids[:n], True).argmax())
            if shared >= LEAST_SHARED:
                if shared < len(before):
                    self._cache.crop(shared - len(before))  # a negative count removes
                return shared, states[:shared], top_ids[:shared]
        self._cache = DynamicCache(config=self.model.config)
        hidden = self.model.config.get_text_config().hidden_size
        return 0, np.zeros((0, len(self.layers), hidden), np.float16), np.zeros((0, NUM_TOP), np.int32)


def file_of(folder: Path, model_name: str, layers: Sequence[int], trace: Trace) -> Path:
    """Return where the thoughts on a trace are kept: the name tells model, layers and text."""
    key = hashlib.sha256(f"{model_name}|{tuple(layers)}|{trace.prompt_len}|".encode() + trace.token_ids.tobytes())
    return folder / f"{trace.family}-{key.hexdigest()[:16]}.npz"


def save(path: Path, thoughts: Thoughts) -> None:
    """Write thoughts aside, then move them into place."""
    trace, aside = thoughts.trace, path.with_suffix(".part.npz")
    np.savez(
        aside,
        states=thoughts.states,
        layers=np.array(thoughts.layers),
        top_ids=thoughts.top_ids,
        token_ids=trace.token_ids,
        prompt_len=np.int64(trace.prompt_len),
        family=trace.family,
        group=trace.group,
    )
    aside.replace(path)


def load(path: Path) -> Thoughts:
    """Read what `save` wrote; raises `GraftError` for anything else."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            trace = Trace(str(data["family"]), str(data["group"]), data["token_ids"], int(data["prompt_len"]))
            thoughts = Thoughts(trace, tuple(data["layers"].tolist()), data["states"], data["top_ids"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise GraftError(f"hidden states in {path} cannot be read ({error}): delete the file") from None
    n = len(trace.token_ids)
    if thoughts.states.shape[:2] != (n, len(thoughts.layers)) or thoughts.top_ids.shape != (n, NUM_TOP):
        raise GraftError(f"hidden states in {path} do not fit its {n} tokens: delete the file")
    return thoughts


def thoughts_on(
    traces: Sequence[Trace], model_name: str, layers: Sequence[int], folder: Path
) -> Iterator[tuple[int, Thoughts]]:
    """Yield (number, thoughts) of each trace, from `folder` where they are, else read now and kept there."""
    folder.mkdir(parents=True, exist_ok=True)
    reader: Reader | None = None
    for number, trace in enumerate(traces):
        path = file_of(folder, model_name, layers, trace)
        if path.exists():
            yield number, load(path)
            continue
        reader = reader or Reader(model_name, layers)
        thoughts = reader.read(trace)
        save(path, thoughts)
        yield number, thoughts
