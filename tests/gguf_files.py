"""Tiny models written as GGUF files by the `gguf` package, each weight in a format of its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.small_tokenizers import byte_level

FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
VOCAB = 352


def made(model_type: str = "llama", **more: Any) -> Any:
    """Return a model of random weights whose rows are whole blocks of every format."""
    options = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **{**options, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def write(path: Path, model: Any, leave: str | None = None, change: dict[str, np.ndarray] | None = None) -> Path:
    """Write the model's numbers as they are (what converters permute is not permuted), but for the tensor `leave`."""
    import gguf

    config = model.config
    name = ARCHITECTURES[config.model_type]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_vocabulary(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for number, (key, value) in enumerate(_tensors(model)):
        stem, _, suffix = key.rpartition(".")
        if key == leave:
            continue
        array = (change or {}).get(key, value.numpy())
        plain = array.ndim == 1 or key in (change or {})
        kind = gguf.GGMLQuantizationType["F32" if plain else FORMATS[number % len(FORMATS)]]
        placed = names.get_name(stem)
        assert placed is not None, key
        writer.add_tensor(f"{placed}.{suffix}", gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return name and weight of each tensor of the file: experts by projection, what is tied once."""
    tensors = []
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if key.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            stem = key.removesuffix("gate_up_proj")
            tensors += [(f"{stem}gate_proj.weight", gate.contiguous()), (f"{stem}up_proj.weight", up.contiguous())]
        else:
            tensors.append((f"{key}.weight" if key.endswith("experts.down_proj") else key, value))
    return tensors


def _add_vocabulary(writer: Any) -> None:
    told = json.loads(byte_level().backend_tokenizer.to_str())["model"]
    tokens = sorted(told["vocab"], key=told["vocab"].get)
    tokens += [f"<|filler{number}|>" for number in range(len(tokens), VOCAB - 8)]  # transformers adds some of its own
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number < 2 else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in told["merges"]])
    writer.add_eos_token_id(1)
