"""The target: what it refuses, and that it computes no more than it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longgraft.cache import SequenceCache
from longgraft.config import GraftError, SamplingParams
from longgraft.target import Segment, Target, long_rope_threshold, rope_types
from tests import engines
from tests.cases import plain_generate
from tests.engines import engine_for, model_of, prompt_of
from tests.models import LONGROPE_FROM, VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LINEAR = {
    "num_hidden_layers": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "head_dim": 16,
}  # fmt: skip
_SHARED_KV = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "vocab_size_per_layer_input": 64, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16,
}  # fmt: skip
_SMALL = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2}
# model type, config, what the refusal must say besides the class
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "linear attention": ("qwen3_next", {**SIZES, **_LINEAR}, "supports attention backends"),
    "state space": ("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "attention backends"),
    "convolutions": ("lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "chunked attention": (
        "llama4_text",
        {**SIZES, "num_local_experts": 2, "intermediate_size_mlp": 32, "head_dim": 16},
        "layers of type chunked_attention",
    ),
    "shared K/V": ("gemma3n_text", {**SIZES, **_SHARED_KV}, "share K/V with earlier layers"),
    "an interface of its own": (
        "falcon",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "supports attention backends",
    ),
    "alibi": ("bloom", _SMALL, "supports attention backends"),
    "options dropped silently": ("nemotron", SIZES, "the flat batch did not reach the attention function"),
    "options dropped, class says so": ("stablelm", SIZES, "supports attention backends"),
    "two attentions a layer": ("diffllama", SIZES, "attends twice a forward"),
    "dynamic rope": (
        "llama",
        {**SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "RoPE type 'dynamic'",
    ),
    "encoder and decoder": (
        "bart",
        {
            "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        },
        "expected a",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    """One thread, and no advice from transformers on kernels that are not installed."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with engines.one_thread():
        yield
    logging.disable(level)


def model_from(model_type: str, config: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoConfig.for_model(model_type, **config)
        return AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


def attention_of(model: Any) -> Any:
    return model.config.get_text_config()._attn_implementation


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(kind: str) -> None:
    model_type, config, says = REFUSED[kind]
    model = model_from(model_type, config)
    before = attention_of(model)
    with pytest.raises(GraftError, match=says) as error:
        Target(model)
    assert attention_of(model) == before, "the model was not given back as it was"
    named = type(model).__name__.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    assert named in str(error.value) or "layer 0" in str(error.value)


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "opt", "gptj", "phi", "olmo2", "cohere", "starcoder2"])
def test_other_families_decode_as_they_do_themselves(model_type: str) -> None:
    """Learned positions, parallel blocks, rotary halves, biases: nothing of it is ours."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "rotary_dim": 8}
    config = {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 32, **(sizes if "gpt" in model_type else {})}
    if model_type == "gpt_neox":
        config = SIZES
    model = model_from(model_type, {k: v for k, v in config.items() if k != "head_dim"}).double()
    model.generation_config.eos_token_id = None
    prompt = [3, 9, 27, 17, 51] * 9
    output = engine_for(model=model).generate(prompt, SamplingParams(max_new_tokens=12, temperature=0.0))
    assert list(output.token_ids) == plain_generate(model, prompt, n=12)
    limit = engine_for(model=model).generate(prompt * 2 + [1] * 30, SamplingParams(temperature=0.0))
    assert (limit.finish_reason, len(limit.token_ids)) == ("context", 128 - 120)


def test_layer_shapes_are_found_not_read_from_a_config() -> None:
    """DeepSeek's keys and values differ in size, and no two releases name those sizes alike."""
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    extra = {
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
        "first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    target = Target(model_from("deepseek_v3", {**sizes, **extra}))
    assert [(s.kv_heads, s.key_dim, s.value_dim) for s in target.layers] == [(2, 24, 12)] * 2


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(GraftError, match="backend is 'quick': expected one of auto"):
        Target(model_of(), "quick")


def test_a_segment_must_fit_together() -> None:
    cache = SequenceCache(Target(model_of()).new_pool(1))
    ids = np.arange(3, dtype=np.int32)
    Segment(cache, ids, ids, np.eye(3, dtype=np.bool_))
    for token_ids, positions, mask in ((ids[:0], ids[:0], None), (ids, ids[:2], None), (ids, ids, np.eye(2) > 0)):
        with pytest.raises(ValueError, match="as many positions as token ids, and a mask rows x"):
            Segment(cache, token_ids, positions, mask)


# RoPE regimes -----------------------------------------------------------------------------------------------------


def test_rope_types_of_all_layer_types_are_seen() -> None:
    class Config:
        rope_parameters: Any = None
        max_position_embeddings = 77

    config = Config()
    assert rope_types(config) == set() and long_rope_threshold(config) is None
    config.rope_parameters = {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "default"}}
    assert rope_types(config) == {"yarn", "default"}
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 12}
    assert long_rope_threshold(config) == 12
    config.rope_parameters = {"rope_type": "longrope"}
    assert long_rope_threshold(config) == 77


@pytest.mark.parametrize(
    ("prompt_len", "new", "is_long"),
    [(20, 24, False), (LONGROPE_FROM - 24, 24, False), (LONGROPE_FROM - 23, 24, True), (LONGROPE_FROM + 5, 12, True)],
)
def test_longrope_keeps_one_regime_a_request(prompt_len: int, new: int, is_long: bool) -> None:
    """A text that will cross the border is in the second regime from its first token on."""
    prompt = prompt_of(prompt_len, arch="phi3_longrope")
    engine = engine_for("phi3_longrope")
    params = SamplingParams(max_new_tokens=new, temperature=0.0)
    assert engine.open(prompt, params).long_rope == is_long
    expected = plain_generate(model_of("phi3_longrope"), prompt, n=new, long_rope=is_long)
    assert list(engine.generate(prompt, params).token_ids) == expected


def test_a_text_that_cannot_cross_stays_in_the_first_regime() -> None:
    """However many tokens are allowed: the engine's own limit lies before the border."""
    prompt, params = prompt_of(30, arch="phi3_longrope"), SamplingParams(max_new_tokens=LONGROPE_FROM)
    assert not engine_for("phi3_longrope", max_context=LONGROPE_FROM).open(prompt, params).long_rope
    assert engine_for("phi3_longrope", max_context=LONGROPE_FROM + 1).open(prompt, params).long_rope


def test_regimes_share_no_forward() -> None:
    engine, model = engine_for("phi3_longrope"), model_of("phi3_longrope")
    prompts = [prompt_of(length, seed, "phi3_longrope") for seed, length in enumerate((30, LONGROPE_FROM - 4, 60))]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=10, temperature=0.0))
    for prompt, output in zip(prompts, outputs):
        is_long = len(prompt) + 10 > LONGROPE_FROM
        assert list(output.token_ids) == plain_generate(model, prompt, n=10, long_rope=is_long)


# Nothing that is not asked for ------------------------------------------------------------------------------------


class HeadRows:
    """Counts the rows that go through the output layer."""

    def __init__(self, model: Any) -> None:
        self.calls: list[int] = []
        self._handle = model.get_output_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.calls.append(inputs[0].numel() // inputs[0].shape[-1])

    def close(self) -> None:
        self._handle.remove()


def test_logits_are_computed_for_wanted_rows_only() -> None:
    engine, prompt = engine_for(prefill_rows=50), prompt_of(235)
    rows = HeadRows(engine.target.model)
    try:
        output = engine.generate(prompt, SamplingParams(max_new_tokens=20, temperature=0.0))
    finally:
        rows.close()
    reading = -(-(len(prompt) - 1) // 50)
    assert rows.calls[:reading] == [0] * reading, "the prompt needs no logits"
    nodes = [n for n, _ in output.stats["accepted_by_round"]]
    assert rows.calls[reading:] == [n + 1 for n in nodes]


def test_a_forward_of_mixed_segments() -> None:
    """A prompt chunk nobody reads beside a tree that is read."""
    target = Target(model_of())
    caches = [SequenceCache(target.new_pool(1)) for _ in range(2)]
    ids = np.array(prompt_of(40), np.int32)
    positions = np.arange(40, dtype=np.int32)
    with target.session():
        unread, read = target.forward(
            [Segment(caches[0], ids[:30], positions[:30], wants_logits=False), Segment(caches[1], ids, positions)]
        )
    with torch.no_grad():
        own = model_of()(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0]
    assert unread.shape == (0, VOCAB)
    assert torch.allclose(read, own, atol=1e-5)


class Largest(TorchDispatchMode):
    """Remembers the largest new tensor any operation makes; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_grows_with_the_square_of_the_prompt() -> None:
    """4K prompt, trees of 60 nodes: not even one layer's states of the whole prompt exist at once."""
    config = AutoConfig.for_model("llama", **{**SIZES, "vocab_size": 1024, "max_position_embeddings": 8192})
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompt = ([5, 9, 2, 4, 6] * 900)[:4096]
    engine = engine_for(model=model, source="very_long", truth=prompt + [1] * 80, prefill_rows=128)
    with Largest() as largest:
        output = engine.generate(prompt, SamplingParams(max_new_tokens=64, temperature=0.0))
    assert max(n for n, _ in output.stats["accepted_by_round"]) == 60
    assert 61 * 1024 <= largest.elements < len(prompt) * SIZES["hidden_size"]


def test_prefill_reads_on_one_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(model_of())
    cache, ids = SequenceCache(target.new_pool(1)), np.array(prompt_of(100), np.int32)
    told, forward = list[int](), target.forward
    with target.session():
        target.prefill(cache, ids[:30], 64)
        monkeypatch.setattr(target, "forward", lambda segments: (forward(segments), told.append(cache.length)))
        target.prefill(cache, ids[30:], 32)
    assert cache.length == 100
    assert told == [30, 32, 64, 96], "chunks end at multiples of 32, wherever reading began"
