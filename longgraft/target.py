"""The target model: the only file that calls it. One flat forward carries any mix of segments.

Does not know drafting, retrieval or sampling. Rows of a forward are laid side by side, `input_ids [1, rows]`;
every segment is the new rows of one sequence with its own positions and its own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longgraft.attention import AnyPart, FlatBatch, Part, borrowed
from longgraft.cache import ChunkPool, LayerShape, SequenceCache
from longgraft.config import GraftError
from longgraft.features import Features
from longgraft.kernels.rows_linear import DTYPES as EXACT_DTYPES
from longgraft.kernels.rows_linear import is_available as kernels_available
from longgraft.kernels.tree_attention import BACKENDS
from longgraft.linear import output_rows, wide
from longgraft.tree import IntArray

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# Rows done, rows in all, seconds that the rest is expected to take.
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Segment:
    """The new rows of one sequence: `token_ids [n]`, `positions [n]`, `mask [n, n]` or None for a causal chain.

    The mask is rows x rows, never rows x prefix. `wants_logits`: False for prompt rows nobody reads. `earlier`: so
    many rows that a forward before this one left reserved stay, and the mask `[n, earlier + n]` says who sees them.
    """

    cache: SequenceCache
    token_ids: IntArray
    positions: IntArray
    mask: npt.NDArray[np.bool_] | None = None
    wants_logits: bool = True
    earlier: int = 0

    def __post_init__(self) -> None:
        n, m = len(self.token_ids), self.earlier
        is_whole = self.mask.shape == (n, m + n) if self.mask is not None else m == 0
        if n == 0 or len(self.positions) != n or not is_whole:
            raise ValueError("Segment: expected as many positions as token ids, and a mask rows x (earlier + rows)")


class Target:
    """A transformers causal LM behind our attention and chunk pool."""

    def __init__(self, model: Any, backend: str = "auto", exact: bool = False) -> None:
        """Wrap a loaded model; with `exact` only kernels whose rows do not depend on one another are used."""
        refuse_unsupported(model)
        if exact and (not kernels_available() or model.dtype not in EXACT_DTYPES or model.device.type != "cpu"):
            raise GraftError(
                "exact mode needs the native kernels (a C++ compiler when longgraft was installed, an x86 processor "
                f"with AVX2) and float32, bfloat16 or float16 on the CPU; this model is {model.dtype} on {model.device}"
            )
        if backend not in BACKENDS:
            raise GraftError(f"backend is {backend!r}: expected one of {', '.join(BACKENDS)}")
        self.model = model.eval()
        self.linear = wide(model, always=exact)
        self.backend = "native" if exact else backend
        self.config = model.config.get_text_config()
        self.vocab_size = output_rows(model.get_output_embeddings())
        self.device = model.device
        self.dtype = model.dtype
        self.long_rope_from = long_rope_threshold(self.config)
        self.layers = self._discover_layers()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Run the model with our attention and linear kernels; its own come back on every exit."""
        with borrowed(self.model), self.linear:
            yield

    @property
    def context_limit(self) -> int | None:
        """Longest text in tokens that the model was made for, or None if its config does not say."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit) if limit else None

    def new_pool(self, num_chunks: int, side: int = 0) -> ChunkPool:
        """Return a chunk pool of the model's shapes, with `side` further columns a row."""
        return ChunkPool(self.layers, num_chunks, self.dtype, self.device, side=side)

    def forward(
        self, segments: Sequence[Segment], long_rope: bool = False, features: Features | None = None
    ) -> list[Tensor]:
        """Run one flat forward; K/V land in rows reserved behind each segment's prefix.

        Returns, per segment, logits `[n, V]` in the model's dtype (`[0, V]` where none are wanted). Callers
        then `keep` the rows that stay. `long_rope` holds models with two RoPE regimes in the long one. `features`
        takes the hidden states of some layers, of all rows.
        """
        for segment in segments:
            segment.cache.reserve(len(segment.token_ids), segment.earlier)
        token_ids = np.concatenate([segment.token_ids for segment in segments])
        positions = np.concatenate([segment.positions for segment in segments])
        wanted = np.concatenate([np.full(len(segment.token_ids), segment.wants_logits) for segment in segments])
        parts = self._parts(segments)
        if long_rope and self.long_rope_from is not None and positions.max() < self.long_rope_from:
            # The rotary module picks its regime from the largest position of the forward: one padding row holds it.
            token_ids, positions = np.append(token_ids, 0), np.append(positions, self.long_rope_from)
        with features.taken() if features else nullcontext():
            logits = self._call(token_ids, positions, np.flatnonzero(wanted), FlatBatch(parts, self.backend))
        sizes = [len(segment.token_ids) * segment.wants_logits for segment in segments]
        return list(logits.split(sizes))

    def forward_on_device(self, token_ids: Tensor, positions: Tensor, part: AnyPart) -> Tensor:
        """Run one flat forward whose rows `[N]`, all of one part, are tensors; return logits `[N, V]`."""
        every = torch.arange(len(token_ids), device=token_ids.device)
        return self._call(token_ids, positions, every, FlatBatch([part], self.backend))

    def prefill(self, cache: SequenceCache, token_ids: IntArray, rows: int, **options: Any) -> None:
        """Compute K/V of `token_ids` behind the cache's prefix, `rows` at a time on one grid from position 0.

        `options` go to `forward`.
        """
        first, end = cache.length, cache.length + len(token_ids)
        begin = first
        while begin < end:
            stop = min(end, begin // rows * rows + rows)
            chunk = token_ids[begin - first : stop - first]
            positions = np.arange(begin, stop, dtype=np.int32)
            self.forward([Segment(cache, chunk, positions, wants_logits=False)], **options)
            cache.keep(range(len(chunk)))
            begin = stop

    def _parts(self, segments: Sequence[Segment]) -> list[Part]:
        parts, begin = [], 0
        for segment in segments:
            end = begin + len(segment.token_ids)
            places, seen = (segment.positions, segment.mask) if not segment.earlier else _square(segment)
            positions = torch.as_tensor(places, dtype=torch.long, device=self.device)
            mask = None if seen is None else torch.as_tensor(seen, device=self.device)
            parts.append(Part(segment.cache, begin, end, positions, mask, segment.earlier))
            begin = end
        return parts

    def _call(self, token_ids: Any, positions: Any, wanted: Any, batch: FlatBatch) -> Tensor:
        with torch.no_grad():
            output = self.model(
                input_ids=torch.as_tensor(token_ids, dtype=torch.long, device=self.device).unsqueeze(0),
                position_ids=torch.as_tensor(positions, dtype=torch.long, device=self.device).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.as_tensor(wanted, dtype=torch.long, device=self.device),
                longgraft_batch=batch,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _discover_layers(self) -> list[LayerShape]:
        """Learn each layer's K/V shape by one forward of one token, whatever the config calls them."""
        recorder = _ShapeRecorder()
        part = Part(recorder, 0, 1, torch.zeros(1, dtype=torch.long, device=self.device), None)
        with self.session():
            self._call(
                np.zeros(1, np.int32),
                np.zeros(1, np.int32),
                np.zeros(1, np.int64),
                FlatBatch([part], self.backend),
            )
        expected = int(self.config.num_hidden_layers)
        if sorted(recorder.shapes) != list(range(expected)):
            raise GraftError(
                f"{type(self.model).__name__}: {len(recorder.shapes)} of {expected} layers used our attention; "
                "expected a causal LM in which every layer is softmax attention"
            )
        return [recorder.shapes[layer] for layer in range(expected)]


def _square(segment: Segment) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return positions and mask of earlier and new rows; what earlier rows see does not matter any more."""
    n, m = len(segment.token_ids), segment.earlier
    mask = np.eye(m + n, dtype=np.bool_)
    mask[m:] = segment.mask
    return np.concatenate([np.full(m, segment.positions.min(), np.int32), segment.positions]), mask


class _ShapeRecorder:
    """Stands in for a cache and writes down what each layer would store."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor, behind: int = 0) -> None:
        if layer in self.shapes:
            raise GraftError(f"layer {layer} attends twice a forward: expected one attention a layer")
        self.shapes[layer] = LayerShape(keys.shape[1], keys.shape[2], values.shape[2])

    def runs(self, layer: int, reserved: int = 0) -> list[tuple[Tensor, Tensor]]:
        return []


def refuse_unsupported(model: Any) -> None:
    """Raise a `GraftError` that names what about this model cannot be right with our attention."""
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise GraftError(f"{name}: an encoder-decoder model; expected a causal LM")
    if not getattr(model, "_supports_attention_backend", False):
        raise GraftError(
            f"{name}: expected a model class that supports attention backends (transformers' AttentionInterface)"
        )
    unknown = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if unknown:
        raise GraftError(
            f"{name}: layers of type {', '.join(sorted(unknown))} are not supported; expected full or sliding attention"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise GraftError(f"{name}: layers that share K/V with earlier layers are not supported")
    if any("dynamic" in kind for kind in rope_types(config)):
        raise GraftError(f"{name}: RoPE type 'dynamic' depends on the length of a forward; use yarn or linear")


def rope_types(config: Any) -> set[str]:
    """Return the RoPE types of a config; there is one set of parameters, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    return {str(s["rope_type"]) for s in sets if s.get("rope_type")}


def long_rope_threshold(config: Any) -> int | None:
    """Return the position from which a `longrope` model changes regime, or None for any other model."""
    if "longrope" not in rope_types(config):
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    found = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(found) if found else int(config.max_position_embeddings)
