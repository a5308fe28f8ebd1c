"""What a block drafter's config.json says, in one form for all layouts.

Knows the layouts of z-lab (`dflash_config`), of speculators (`speculators_model_type` "dflash") and of transformers'
own classes; no weights, no target. The one idea: whatever a config does not say, or says in words not known here, is
a refusal that names it; nothing is guessed.

Layer numbers. z-lab and transformers count layer OUTPUTS from 0 (they read `hidden_states[id + 1]`); speculators counts
entries of `hidden_states`, entry 0 being the embeddings, so that its id i is the output of layer i - 1 (its converter
adds 1 to z-lab's ids). Here ids always mean outputs, counted from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longgraft.config import GraftError

# Default of speculators' DFlashSpeculatorConfig.
SPECULATORS_BLOCK = 8
_ZLAB_OPTIONS = {"mask_token_id", "target_layer_ids", "block_size"}
_ZLAB_SHAPES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Fields that speculators writes and that say nothing about how to draft.
_SPECULATORS_KNOWN = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "dtype",
    "has_no_defaults_at_init",
    "mask_token_id",
    "model_type",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "tie_word_embeddings",
    "torch_dtype",
    "transformer_layer_config",
    "transformers_version",
}


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """How a block drafter is asked.

    `block_size`: rows of a block, the root among them. `first`: the first row that predicts something new (1; 0 where
    the root's own row predicts the token after it). `layer_ids`: target layers whose outputs it reads, counted from
    0. `layers`: the decoder's own settings (keywords of transformers' Qwen3Config). `draft_vocab`: rows of the
    drafter's own output matrix, None where the target's is used. `layout`: "z-lab", "speculators" or "transformers".
    `anchored` and `causal` say how layers with a sliding window look: see `block_model.BlockModel`.
    """

    layout: str
    block_size: int
    mask_token_id: int
    layer_ids: tuple[int, ...]
    layers: Mapping[str, Any]
    first: int = 1
    draft_vocab: int | None = None
    anchored: bool = False
    causal: bool = False

    @property
    def drafts(self) -> int:
        """Tokens one pass proposes in a row."""
        return self.block_size - self.first


def layout_of(config: Mapping[str, Any]) -> str | None:
    """Return the layout a config.json is in, or None if it describes no block drafter."""
    if "speculators_model_type" in config:
        return "speculators" if config["speculators_model_type"] == "dflash" else None
    if "dflash_config" in config or "DFlashDraftModel" in (config.get("architectures") or ()):
        return "z-lab"
    return "transformers" if {"block_size", "mask_token_id", "target_layer_ids"} <= set(config) else None


def read_config(config: Mapping[str, Any]) -> BlockConfig:
    """Return what `config` (a parsed config.json) says, or raise a `GraftError` that names what is wrong with it."""
    readers = {"z-lab": _zlab, "speculators": _speculators, "transformers": _transformers}
    layout = layout_of(config)
    if layout is None:
        raise GraftError(
            "config.json describes no block drafter: expected `dflash_config` (z-lab), `speculators_model_type` "
            "dflash, or `block_size`, `mask_token_id` and `target_layer_ids` (transformers)"
        )
    try:
        return _checked(readers[layout](config))
    except GraftError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise GraftError(f"config.json of the block drafter has an option of the wrong type ({error})") from error


def _zlab(config: Mapping[str, Any]) -> BlockConfig:
    options = config.get("dflash_config") or {}
    unknown = sorted(key for key, value in options.items() if key not in _ZLAB_OPTIONS and value is not None)
    if unknown:
        raise GraftError(f"dflash_config has the option {unknown[0]!r}, which is not supported")
    missing = [name for name in _ZLAB_SHAPES if config.get(name) is None]
    if missing:
        raise GraftError(f"config.json of the block drafter lacks {missing[0]!r}")
    ids = options.get("target_layer_ids")
    if ids is None:
        ids = spread(_need(config, "num_target_layers"), int(config["num_hidden_layers"]))
    # Older files have block_size at the top, newer ones inside dflash_config.
    size = config.get("block_size") or _need(options, "block_size")
    return BlockConfig("z-lab", size, _need(options, "mask_token_id"), tuple(ids), config)


def _speculators(config: Mapping[str, Any]) -> BlockConfig:
    unknown = sorted(key for key, value in config.items() if key not in _SPECULATORS_KNOWN and value is not None)
    if unknown:
        raise GraftError(f"the speculators config has the option {unknown[0]!r}, which is not supported")
    layers = _need(config, "transformer_layer_config")
    hidden, target_hidden = layers.get("hidden_size"), config.get("target_hidden_size")
    if target_hidden is not None and target_hidden != hidden:
        raise GraftError(
            f"target_hidden_size is {target_hidden} and the drafter's hidden_size {hidden}: "
            "drafters of another width than their target are not supported"
        )
    ids = tuple(i - 1 for i in _need(config, "aux_hidden_state_layer_ids"))
    if min(ids, default=0) < 0:
        raise GraftError("aux_hidden_state_layer_ids holds 0, the embeddings: only outputs of layers are supported")
    return BlockConfig(
        "speculators",
        config.get("block_size", SPECULATORS_BLOCK),
        _need(config, "mask_token_id"),
        ids,
        layers,
        first=0 if config.get("sample_from_anchor") else 1,
        draft_vocab=_need(config, "draft_vocab_size"),
        anchored=True,
        causal=not config.get("sliding_window_non_causal", False),
    )


def _transformers(config: Mapping[str, Any]) -> BlockConfig:
    ids = tuple(_need(config, "target_layer_ids"))
    return BlockConfig("transformers", config["block_size"], config["mask_token_id"], ids, config)


def spread(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return z-lab's default layer ids: evenly from 1 to n - 3, or the middle layer for a single one."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def _need(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise GraftError(f"config.json of the block drafter lacks {name!r}")
    return config[name]


def _checked(config: BlockConfig) -> BlockConfig:
    numbers = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    numbers |= {f"target layer id {i}": i for i in config.layer_ids}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise GraftError(f"{name} of the block drafter is {value!r}: expected a whole number, 0 or more")
    if config.drafts < 1:
        raise GraftError(f"block_size of the block drafter is {config.block_size}: expected 2 or more")
    if len(set(config.layer_ids)) < len(config.layer_ids):
        raise GraftError(f"target layer ids of the block drafter are {config.layer_ids}: expected each once")
    if not config.layer_ids:
        raise GraftError("the block drafter reads no target layer: expected at least one target layer id")
    return config
