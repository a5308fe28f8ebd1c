"""What cannot give what `generate` gives is refused by name."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor

from longgraft.config import GraftError
from longgraft.hf import Generate
from tests.hf.cases import Seen

# peft reads an attribute that transformers has renamed.
peft_is_behind = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam search is not supported"),
        ({"num_beams": 2, "do_sample": True}, "beam sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"dola_layers": "high"}, "dola generation"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor runs the model"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"position_ids": torch.arange(1, 91)[None]}, "position_ids"),
        ({"attention_mask": (torch.arange(90) < 80).long()[None]}, "other than left padding"),
        ({"attention_mask": (torch.arange(90) != 40).long()[None]}, "other than left padding"),
        ({"attention_mask": torch.zeros(1, 90, dtype=torch.long)}, "prompt of row 0 is empty"),
        ({"labels": torch.zeros(1, 90, dtype=torch.long)}, "labels"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(value),
)
def test_what_cannot_be_the_same_is_refused(llama: Any, graft: Any, prompt: Tensor, options: Any, message: str) -> None:
    with pytest.raises(GraftError, match=message):
        graft(llama, prompt, max_new_tokens=3, **options)


def test_an_assistant_is_refused(llama: Any, graft: Any, prompt: Tensor) -> None:
    with pytest.raises(GraftError, match="assisted generation"):
        graft(llama, prompt, max_new_tokens=3, assistant_model=llama)


def test_embeddings_and_caches_are_refused(llama: Any, graft: Any, prompt: Tensor) -> None:
    with pytest.raises(GraftError, match="inputs_embeds is not supported; pass input_ids"):
        graft(llama, inputs_embeds=llama.get_input_embeddings()(prompt), max_new_tokens=3)
    cache = hf.DynamicCache(config=llama.config)
    name = "cache" if "cache" in inspect.signature(llama.forward).parameters else "past_key_values"
    with torch.no_grad():
        llama(prompt[:, :50], **{name: cache})
    with pytest.raises(GraftError, match="a cache of your own"):
        graft(llama, prompt, max_new_tokens=3, **{name: cache})


def test_an_encoder_decoder_is_refused(graft: Any) -> None:
    config = hf.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config).eval()
    with pytest.raises(GraftError, match="encoder-decoder model T5ForConditionalGeneration"):
        graft(model, torch.tensor([[3, 4, 5]]), max_new_tokens=3)


def test_rows_must_be_independent(llama: Any, graft: Any, batch: Any) -> None:
    with pytest.raises(GraftError, match="in a batch without eos_token_id"):
        graft(llama, **batch, max_new_tokens=3, stopping_criteria=[Seen().criterion])
    with pytest.raises(GraftError, match="EncoderRepetitionPenaltyLogitsProcessor in a batch"):
        graft(llama, **batch, max_new_tokens=3, encoder_repetition_penalty=1.2)


@peft_is_behind
def test_prompt_tuning_is_refused(llama: Any, generate: Generate, prompt: Tensor) -> None:
    tuned = peft.get_peft_model(
        copy.deepcopy(llama), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(GraftError, match="prompt or prefix tuning"):
        tuned.generate(input_ids=prompt, max_new_tokens=2, custom_generate=generate)
