"""Finds out what kind of drafter a folder or hub id holds, and loads it for a target.

Knows the kinds; how each reads its weights is its own file's business.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.cost import CostTable
from longgraft.draft.base import Drafter
from longgraft.draft.block import load_block_drafter
from longgraft.draft.block_config import layout_of
from longgraft.draft.eagle import Eagle3Drafter
from longgraft.draft.lm import ModelDrafter
from longgraft.draft.weights import is_eagle3
from longgraft.kernels.packed_linear import KERNEL
from longgraft.kernels.rows_linear import DTYPES
from longgraft.linear import output_rows
from longgraft.load import fetched_folder, load


def load_drafter(name: str, target: Any, tokenizer: Any, cost_table: str | None = None) -> Drafter:
    """Return the drafter `name` (folder, hub id or GGUF file) holds, for a loaded target model and its tokenizer.

    An EAGLE-3 head, a block drafter (DFlash) or a smaller language model with the target's tokenizer; which one is
    read from config.json. `cost_table`: file with frozen costs of its passes, if it holds them (else measured).
    Raises `GraftError` for one that does not fit.
    """
    config, cost = config_of(name), CostTable.load_drafter(cost_table) if cost_table else None
    if is_eagle3(config):
        return Eagle3Drafter.from_pretrained(name, target, cost=cost)
    if layout_of(config):
        return load_block_drafter(fetched_folder(name, "drafter", ("*.json", "*.safetensors")), target, cost)
    dtype = str(target.dtype).removeprefix("torch.")
    # A drafter only guesses, so it may be another model than its file says, if that is faster.
    is_quicker = target.device.type == "cpu" and target.dtype in DTYPES and KERNEL is not None
    model, its_tokenizer = load(name, dtype, str(target.device), "int8" if is_quicker else None)
    refuse_other_tokenizer(name, tokenizer, its_tokenizer)
    return ModelDrafter(model, output_rows(target.get_output_embeddings()), cost=cost)


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a folder or hub id; empty for a GGUF file, which is a language model."""
    if name.endswith(".gguf"):
        return {}
    folder = Path(name).expanduser()
    if not folder.is_dir() and name.startswith((".", "/", "~")):
        raise GraftError(f"drafter {name!r}: no such folder; expected a folder, a hub id or a GGUF file")
    try:
        path = folder / "config.json" if folder.is_dir() else Path(_fetched(name, "config.json"))
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise GraftError(f"drafter {name!r}: its config.json could not be read: {reason}") from error
    if not isinstance(found, dict):
        raise GraftError(f"drafter {name!r}: its config.json holds a {type(found).__name__}: expected an object")
    return found


def _fetched(name: str, file: str) -> str:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(name, file)


def refuse_other_tokenizer(name: str, ours: Any, theirs: Any) -> None:
    """Raise if a drafter's tokenizer gives a token another id than the target's does, or lacks many of its tokens."""
    if ours is None or not hasattr(ours, "get_vocab"):
        return
    mine, other = ours.get_vocab(), theirs.get_vocab()
    wrong = next((token for token, number in mine.items() if other.get(token, number) != number), None)
    shared = sum(token in other for token in mine)
    if wrong is None and shared >= 0.95 * len(mine):
        return
    reason = f"token {wrong!r} has another id" if wrong is not None else f"only {shared} of {len(mine)} tokens agree"
    raise GraftError(
        f"drafter {name!r}: its tokenizer is not the target's ({reason}); choose a model of the target's family"
    )
