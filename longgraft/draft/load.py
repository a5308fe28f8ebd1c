"""Finds out what kind of drafter a folder or hub id holds, and loads it for a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.draft.base import Drafter
from longgraft.draft.lm import ModelDrafter
from longgraft.load import load


def load_drafter(name: str, target: Any, tokenizer: Any) -> Drafter:
    """Return a drafter for a loaded target model: a smaller LM with the same tokenizer.

    The kind is read from config.json; a GGUF file is a language model. Raises `GraftError` for anything else.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    model, its_tokenizer = load(name, dtype, str(target.device))
    refuse_other_tokenizer(name, tokenizer, its_tokenizer)
    return ModelDrafter(model, int(target.get_output_embeddings().weight.shape[0]))


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a folder or hub id; a GGUF file has none of its own, so an empty one."""
    if name.endswith(".gguf"):
        return {}
    path = Path(name).expanduser() / "config.json"
    if not path.is_file():
        raise GraftError(f"drafter {name!r}: no config.json there")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def refuse_other_tokenizer(name: str, ours: Any, theirs: Any) -> None:
    """Raise if a drafter's tokenizer gives any token another id than the target's does."""
    if ours is None:
        return
    mine, other = ours.get_vocab(), theirs.get_vocab()
    wrong = next((token for token, number in mine.items() if other.get(token, number) != number), None)
    shared = sum(token in other for token in mine)
    if wrong is not None or shared < 0.95 * len(mine):
        reason = (
            f"token {wrong!r} has another id" if wrong is not None else f"only {shared} of {len(mine)} tokens agree"
        )
        raise GraftError(
            f"drafter {name!r}: its tokenizer is not the target's ({reason}); choose one of the same family"
        )
