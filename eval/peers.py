"""What a user would pick instead, on the same prompt: transformers' own decodings and llama.cpp. Owns `llama_cpp`.

Knows nothing of our engine beyond the loaded model. A peer reads a prompt once (`read`) and then decodes behind it as
often as it is asked (`decode`); only decoding is timed, as it is for the engine.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from longgraft.config import GraftError
from longgraft.memory import GIB, available_bytes

# What --peers takes, and the rows each gives.
PEERS = {
    "transformers": ("transformers",),
    "lookup": ("transformers lookup",),
    "assistant": ("transformers assistant",),
    "llama": ("llama.cpp", "llama.cpp lookup"),
}
LOOKUP_TOKENS = 10
PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True)
class Decoded:
    """New tokens of one decoding, and what the last `timed` of them took: `seconds`, `cpu_seconds` (all threads).

    `read_s`: seconds in which the prompt was read, before that.
    """

    token_ids: tuple[int, ...]
    timed: int
    seconds: float
    cpu_seconds: float
    read_s: float


class Peer(Protocol):
    """One way to decode that is not ours."""

    name: str

    def read(self, token_ids: Sequence[int], new: int) -> None:
        """Read a prompt and keep it for `decode` of at most `new` tokens; raises `GraftError` if it cannot."""

    def decode(self, new: int) -> Decoded:
        """Decode greedily behind the prompt that was read."""

    def close(self) -> None:
        """Forget the prompt."""


class TransformersPeer:
    """`model.generate` as it is, behind a DynamicCache that holds the prompt but its last token."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self._model = name, model
        # The argument's name changed in transformers 5.24.
        self._argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._ids: Any = None
        self._cache: Any = None
        self._read_s = 0.0

    def read(self, token_ids: Sequence[int], new: int) -> None:
        """Read a prompt of at least two tokens."""
        from transformers import DynamicCache

        self._ids = torch.tensor([list(token_ids)], device=self._model.device)
        self._cache = DynamicCache(config=self._model.config)
        clock = _Clock(self._model.device)
        with torch.no_grad():
            for chunk in self._ids[:, :-1].split(PREFILL_ROWS, dim=1):
                self._model(input_ids=chunk, use_cache=True, logits_to_keep=1, **{self._argument: self._cache})
        self._read_s = clock.passed()[0]

    def decode(self, new: int) -> Decoded:
        """Call `generate` once, behind a copy of the cache."""
        given = {self._argument: copy.deepcopy(self._cache), "attention_mask": torch.ones_like(self._ids)}
        clock = _Clock(self._model.device)
        with torch.no_grad():
            out = self._model.generate(self._ids, max_new_tokens=new, do_sample=False, **given)
        tokens = tuple(out[0, self._ids.shape[1] :].tolist())
        return Decoded(tokens, len(tokens), *clock.passed(), self._read_s)

    def close(self) -> None:
        """Forget prompt and cache."""
        self._ids = self._cache = None


class AssistedPeer:
    """`model.generate` with `prompt_lookup_num_tokens` or an assistant model, else at its defaults.

    Given a filled cache, transformers' assisted decoding runs the whole prompt through it a second time (5.24, seen in
    the tokens). So the prompt is read in every `generate`, and the clock starts behind the first round.
    """

    def __init__(self, name: str, model: Any, **options: Any) -> None:
        self.name, self._model, self._options = name, model, options
        self._ids: Any = None

    def read(self, token_ids: Sequence[int], new: int) -> None:
        """Keep the prompt."""
        self._ids = torch.tensor([list(token_ids)], device=self._model.device)

    def decode(self, new: int) -> Decoded:
        """Call `generate` once; its first round counts as reading."""
        whole, started = _Clock(self._model.device), _Started(self._model.device)
        given = {"attention_mask": torch.ones_like(self._ids), "stopping_criteria": [started]}
        with torch.no_grad():
            out = self._model.generate(self._ids, max_new_tokens=new, do_sample=False, **given, **self._options)
        tokens = tuple(out[0, self._ids.shape[1] :].tolist())
        seconds, cpu = started.clock.passed()
        return Decoded(tokens, out.shape[1] - started.length, seconds, cpu, whole.passed()[0] - seconds)

    def close(self) -> None:
        """Forget the prompt."""
        self._ids = None


class LlamaPeer:
    """llama.cpp through llama-cpp-python on a GGUF of the same model: plain, or with its own prompt lookup.

    Its draft needs the logits of all tokens kept: `read` refuses a prompt for which they would not fit in memory.
    """

    def __init__(self, name: str, rivals: Rivals, *, lookup: bool = False) -> None:
        self.name, self._rivals, self._lookup = name, rivals, lookup
        self._llama: Any = None
        self._ids: list[int] = []
        self._read_s = 0.0

    def read(self, token_ids: Sequence[int], new: int) -> None:
        """Load the model with room for the prompt and `new` tokens, and read the prompt."""
        self.close()
        self._ids = list(token_ids)
        # Proposals past the end need room too.
        room = len(self._ids) + new + LOOKUP_TOKENS + 1
        options: dict[str, Any] = {"n_ctx": room, "n_threads": torch.get_num_threads()}
        options["n_threads_batch"] = options["n_threads"]
        if self._lookup:
            self._require_logits(room)
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            options["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
            options["logits_all"] = True  # a draft alone makes it keep them, but not make room for them
        self._llama = open_llama(str(self._rivals.gguf), **options)
        if self._llama.n_vocab() <= max(self._ids):
            raise GraftError(f"--gguf {self._rivals.gguf}: lacks token {max(self._ids)}; expected a GGUF of this model")
        clock = _Clock(torch.device("cpu"))
        self._llama.eval(self._ids[:-1])
        self._read_s = clock.passed()[0]

    def decode(self, new: int) -> Decoded:
        """Decode behind the prompt; what an earlier decoding left is dropped by llama.cpp's own prefix match."""
        found: list[int] = []
        clock = _Clock(torch.device("cpu"))
        options = {"temp": 0.0, "top_k": 1, "repeat_penalty": self._rivals.penalty}
        for token in self._llama.generate(self._ids, **options) if new else ():
            found.append(int(token))
            if len(found) == new or found[-1] in self._rivals.eos:
                break
        return Decoded(tuple(found), len(found), *clock.passed(), self._read_s)

    def close(self) -> None:
        """Free the model."""
        if self._llama is not None:
            self._llama.close()
        self._llama = None

    def _require_logits(self, rows: int) -> None:
        needed = rows * int(self._rivals.model.get_output_embeddings().weight.shape[0]) * 4
        free = available_bytes(torch.device("cpu"))
        if free is not None and needed > free / 2:
            raise GraftError(f"its draft keeps the logits of all {rows} tokens, {needed / GIB:.1f} GiB: too much here")


class _Clock:
    """Time on the wall and of the process since it was made; waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._now()

    def passed(self) -> tuple[float, float]:
        now = self._now()
        return now[0] - self._begin[0], now[1] - self._begin[1]

    def _now(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter(), time.process_time()


class _Started:
    """A stopping rule of transformers that never stops: it starts a clock when it is first asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.length = 0
        self.clock = _Clock(device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        if not self.length:
            self.length, self.clock = int(input_ids.shape[1]), _Clock(self._device)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def refuse_without_llama(file: str) -> None:
    """Raise `GraftError` where llama-cpp-python or the file is missing."""
    try:
        import llama_cpp  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise GraftError(
            f"peer llama: llama-cpp-python cannot be imported ({error}); pip install llama-cpp-python (it compiles for "
            "some minutes), or leave the peer out"
        ) from None
    if not Path(file).expanduser().is_file():
        raise GraftError(f"--gguf {file}: no such file; expected the model as one GGUF file")


def open_llama(file: str, **options: Any) -> Any:
    """Return a `llama_cpp.Llama`; raises `GraftError` for a file it cannot load."""
    from llama_cpp import Llama

    try:
        return Llama(str(Path(file).expanduser()), verbose=False, **options)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise GraftError(f"--gguf {file}: llama.cpp cannot load it ({error})") from None


@dataclass(frozen=True, slots=True)
class Rivals:
    """What peers are made of: the target's `model`, the `draft` model's name, its `dtype`, a `gguf` file.

    `eos`, `penalty`: what ends a greedy generation and the repetition penalty, as the model's generation config says.
    """

    model: Any
    draft: str | None = None
    dtype: str = "auto"
    gguf: str | None = None
    eos: tuple[int, ...] = ()
    penalty: float = 1.0


def open_peers(names: Sequence[str], rivals: Rivals) -> list[Peer]:
    """Return the peers of `--peers`; raises `GraftError` for one that is unknown or lacks what it needs."""
    found: list[Peer] = []
    for name in names:
        if name not in PEERS:
            raise GraftError(f"peer {name!r}: expected one of {', '.join(PEERS)}")
        if name == "llama":
            if rivals.gguf is None:
                raise GraftError("peer llama: it needs the model as a GGUF file: give --gguf FILE")
            refuse_without_llama(rivals.gguf)
            found += [LlamaPeer(row, rivals, lookup=row.endswith("lookup")) for row in PEERS[name]]
        elif name == "transformers":
            found.append(TransformersPeer(PEERS[name][0], rivals.model))
        else:
            options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "lookup" else _assistant(rivals)
            found.append(AssistedPeer(PEERS[name][0], rivals.model, **options))
    return found


def _assistant(rivals: Rivals) -> dict[str, Any]:
    """Load the draft model as an ordinary language model."""
    from longgraft.load import load

    if rivals.draft is None:
        raise GraftError("peer assistant: it needs a smaller language model: give --draft NAME")
    try:
        model, _ = load(rivals.draft, rivals.dtype, str(rivals.model.device))
    except GraftError as error:
        raise GraftError(f"peer assistant: expected --draft to be an ordinary language model; {error}") from None
    return {"assistant_model": model}
