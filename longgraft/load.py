"""Loads a target and its tokenizer: a hub id, a local folder or a GGUF file. Every failure is one sentence.

Knows names, dtypes and devices, not files. The one idea: whatever could go wrong later is asked for first.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from longgraft.config import BITS, GraftError, check_quantize
from longgraft.gguf_header import quick_headers
from longgraft.load_lazily import TELLING, generation_config, gguf_weights, read, unread_weights
from longgraft.memory import loading_bytes, require, skeleton
from longgraft.quantize import quantized, replaceable
from longgraft.quantized_linear import QuantizedLinear

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}
# What libraries raise for files that are not what they should be.
FAILURES = (
    OSError,
    ValueError,
    LookupError,
    ImportError,
    RuntimeError,
    AssertionError,
    SafetensorError,
    struct.error,
)


def load(name: str, dtype: str = "auto", device: str | None = None, quantize: str | None = None) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a causal LM, in evaluation mode on `device` (default: CUDA if there is one).

    `name`: hub id, folder, `FILE.gguf` or `hub/id:FILE.gguf`. `dtype`: `auto` (as stored; GGUF: bfloat16) or a
    key of `DTYPES`. `quantize`: "int8" or "int4" packs its linear weights (CPU only; see `longgraft.quantize`).
    Of a GGUF file, and of safetensors to be packed, one tensor after the other is read and put in its place, packed if
    it is to be; where that is not possible (`longgraft.load_lazily` says when) the whole model is read, then packed.
    """
    check_quantize(quantize)
    if dtype != "auto" and dtype not in DTYPES:
        raise GraftError(f"dtype {dtype!r}: expected auto or one of {', '.join(DTYPES)}")
    source, options = _source(name)
    try:
        place = device or ("cpu" if quantize or not torch.cuda.is_available() else "cuda")
        with quick_headers() if options else nullcontext():
            return _load(source, options, dtype, torch.device(place), quantize)
    except GraftError:
        raise
    except FAILURES as error:
        reason = " ".join(str(error).split())[:300]
        raise GraftError(f"model {name!r} could not be loaded: {reason}") from error


def fetched_folder(name: str, what: str, patterns: Collection[str]) -> Path:
    """Return the folder `name` is, or the one its files of these patterns are fetched to if it is a hub id.

    `what` stands before the name in the `GraftError` for anything else.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")):
        raise GraftError(f"{what} {name!r}: no such folder; expected a folder or a hub id")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise GraftError(f"{what} {name!r}: no such folder, and it could not be fetched: {reason}") from error


def _source(name: str) -> tuple[str, dict[str, str]]:
    """Split a name into what `from_pretrained` takes and its extra arguments."""
    if not name.endswith(".gguf"):
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise GraftError(f"model {name!r}: no such folder; expected a folder, a GGUF file or a hub id")
        return str(Path(name).expanduser()) if name.startswith("~") else name, {}
    path = Path(name).expanduser()
    if path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    repository, colon, file = name.rpartition(":")
    if not colon:
        raise GraftError(f"model {name!r}: no such file; expected a local GGUF file or hub/id:FILE.gguf")
    return repository, {"gguf_file": file}


def _load(
    source: str, options: dict[str, Any], dtype: str, device: torch.device, quantize: str | None
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    if quantize and device.type != "cpu":
        raise GraftError(f"{BITS[quantize]}-bit weights need the whole model on the CPU; asked for {device}")
    file = options.get("gguf_file")
    config = AutoConfig.from_pretrained(source, **options)
    if dtype == "auto":
        stored = getattr(config, "dtype", None)
        wanted = stored if isinstance(stored, torch.dtype) and not options else torch.bfloat16
    else:
        wanted = DTYPES[dtype]
    empty = skeleton(config)
    weights = gguf_weights(source, file, empty, wanted) if file else unread_weights(source, config, quantize)
    what = f"loading {source} in {quantize or str(wanted).removeprefix('torch.')}"
    needed = loading_bytes(empty, wanted, quantize, file is not None, weights is not None)
    require(what, needed, device, "choose a smaller model or dtype, or free memory")
    kind = type(empty)
    del empty
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if weights is None:
        model, found = _read_at_once(source, options, config, wanted)
    else:
        model, found = read(weights, kind, config, wanted, quantize)
        model.name_or_path = model.config.name_or_path = source
        if file is None:
            model.generation_config = generation_config(source)
    refuse_incomplete(found["missing_keys"])
    refuse_other_shapes(found["mismatched_keys"])
    refuse_mismatch(model, tokenizer)
    if quantize and (replaceable(model) or not any(isinstance(layer, QuantizedLinear) for layer in model.modules())):
        quantized(model, bits=BITS[quantize])
    return model.to(device).eval(), tokenizer


def _read_at_once(source: str, options: dict[str, Any], config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return the model as transformers loads it, and what it found."""
    from transformers import AutoModelForCausalLM

    more = {**options, **TELLING}
    if options:
        more["quantization_config"] = _dequantized()
    model, found = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, **more)
    return model, found


def _dequantized() -> Any:
    """Ask transformers to expand GGUF weights; releases before `GgufConfig` do so by themselves."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return config(dequantize=True) if config is not None else None


def refuse_incomplete(missing: Collection[str]) -> None:
    """Raise if weights are missing: transformers would leave random ones in their place."""
    if missing:
        raise GraftError(
            f"the weights lack {len(missing)} tensors the model needs, {min(missing)} among them; "
            "expected a complete checkpoint: fetch it again"
        )


def refuse_other_shapes(mismatched: Collection[tuple[str, Any, Any]]) -> None:
    """Raise if weights have shapes that are not the model's, given as (name, shape there, shape expected)."""
    if mismatched:
        name, there, expected = min(mismatched)
        raise GraftError(
            f"{len(mismatched)} weights do not fit the model, {name} among them: {list(there)}, expected "
            f"{list(expected)}; its config and its weights do not belong together: fetch both again"
        )


def refuse_mismatch(model: Any, tokenizer: Any) -> None:
    """Raise if the tokenizer makes token ids that the model's embedding does not have."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise GraftError(
            f"tokenizer and model do not belong together: the tokenizer has token id {highest}, "
            f"the model {rows} embeddings; load both from one place"
        )
