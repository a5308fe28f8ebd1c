"""The same results as `model.generate`, and a model given back as it was."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor

from longgraft.config import EngineConfig, SamplingParams
from longgraft.draft.lm import ModelDrafter
from longgraft.engine import Engine
from longgraft.hf import Generate
from tests.engines import cost_of
from tests.hf.cases import NEW, PLAIN, Seen, new_ids
from tests.models import VOCAB, prompt_for, tiny_model

# peft reads an attribute that transformers has renamed.
peft_is_behind = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.mark.parametrize(
    ("arch", "dtype"), [("llama", "float64"), ("llama", "float32"), ("qwen3", "float32"), ("gemma3", "float32")]
)
def test_greedy_equals_generate(graft: Any, arch: str, dtype: str) -> None:
    model = tiny_model(arch, getattr(torch, dtype))
    ids, stats = torch.tensor([prompt_for(model, 70)]), dict[str, Any]()
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    assert torch.equal(graft(model, ids, max_new_tokens=30, do_sample=False, graft_stats=stats), expected)
    assert stats["rows"][0]["accepted"] > 0
    assert stats["seed"] is None


def test_greedy_with_processors_equals_generate(llama: Any, graft: Any, prompt: Tensor, greedy: list[int]) -> None:
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 9,
        "eos_token_id": greedy[5],
        "pad_token_id": 0,
    }
    expected = llama.generate(prompt, **options)
    assert torch.equal(graft(llama, prompt, **options), expected)
    assert new_ids(expected, prompt)[0] != greedy


def test_the_models_own_defaults_are_overridden_as_in_generate(llama: Any, graft: Any, prompt: Tensor) -> None:
    model = copy.deepcopy(llama)
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=5, repetition_penalty=2.0)
    options = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.0}
    assert torch.equal(graft(model, prompt, **options), llama.generate(prompt, **options))


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2},
    {"top_k": 0, "typical_p": 0.8},
]


@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_sampling_follows_the_global_seed_and_plain_decoding(
    llama: Any, graft: Any, prompt: Tensor, options: Any
) -> None:
    options = {"max_new_tokens": NEW, "do_sample": True, **options}
    torch.manual_seed(3)
    first, second = graft(llama, prompt, **options), graft(llama, prompt, **options)
    torch.manual_seed(3)
    assert torch.equal(graft(llama, prompt, graft_config=PLAIN, **options), first)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    recorded = graft(llama, prompt, return_dict_in_generate=True, output_scores=True, **options)
    assert torch.equal(recorded.sequences, first)


def test_a_drafter_changes_nothing(llama: Any, graft: Any, prompt: Tensor) -> None:
    drafter = ModelDrafter(tiny_model("llama", seed=5), VOCAB, cost=cost_of(0.01))
    expected = llama.generate(prompt, max_new_tokens=NEW, do_sample=False)
    for policy in ("adaptive", "dense"):
        stats: dict[str, Any] = {}
        config = EngineConfig(policy=policy, max_nodes=24)
        ours = graft(
            llama, prompt, max_new_tokens=NEW, do_sample=False, num_return_sequences=1, graft_config=config,
            graft_drafter=drafter, graft_stats=stats,
        )  # fmt: skip
        assert torch.equal(ours, expected)
        assert policy == "adaptive" or stats["rows"][0]["draft_passes"] > 0
    assert drafter.pool.num_free == drafter.pool.num_chunks


def test_sampling_is_the_engines_own(llama: Any, graft: Any, prompt: Tensor) -> None:
    options = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "max_new_tokens": NEW}
    stats: dict[str, Any] = {}
    hf.set_seed(11)
    ids = new_ids(graft(llama, prompt, do_sample=True, num_return_sequences=2, graft_stats=stats, **options), prompt)
    engine = Engine(llama, None, PLAIN)
    params = [SamplingParams(seed=stats["seed"], sample_index=i, **options) for i in (0, 1)]
    assert [list(engine.generate(prompt[0].tolist(), p).token_ids) for p in params] == ids
    assert ids[0] != ids[1]


def test_greedy_leaves_the_global_generator_alone(llama: Any, graft: Any, prompt: Tensor) -> None:
    before = torch.get_rng_state()
    graft(llama, prompt, max_new_tokens=2, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_left_padded_batch_equals_generate(llama: Any, graft: Any, batch: Any) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    ids = llama.generate(**batch, **options)
    assert torch.equal(graft(llama, **batch, **options), ids)
    eos = new_ids(ids, batch["input_ids"])[1][6]
    ended = llama.generate(**batch, **options, eos_token_id=eos)
    assert torch.equal(graft(llama, **batch, **options, eos_token_id=eos), ended)
    assert ended[1, -1] == 0 and ended[0, -1] != 0


def test_processors_are_shown_padded_rows_as_in_generate(llama: Any, graft: Any, batch: Any) -> None:
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 7}
    options |= {"repetition_penalty": 1.5, "min_new_tokens": 12, "no_repeat_ngram_size": 2}
    theirs, ours = Seen(), Seen()
    expected = llama.generate(**batch, **options, logits_processor=[theirs.process])
    assert torch.equal(graft(llama, **batch, **options, logits_processor=[ours.process]), expected)
    assert sorted(ours.rows) == sorted(theirs.rows)
    assert len(ours.rows) == 12 * 3


def test_rows_that_do_not_fit_together_run_one_after_another(llama: Any, graft: Any, batch: Any) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    one_chunk = 256 * 2 * 2 * (16 + 16) * 4
    small, seen = EngineConfig(policy="plain", kv_bytes=one_chunk), Seen()
    expected = llama.generate(**batch, **options)
    assert torch.equal(graft(llama, **batch, **options, graft_config=small, graft_streamer=seen), expected)
    assert seen.puts[1:] == expected[:, batch["input_ids"].shape[1] :].T.tolist()


def test_samples_of_one_prompt_share_its_prefill(llama: Any, graft: Any, batch: Any) -> None:
    stats: dict[str, Any] = {}
    torch.manual_seed(0)
    ids = graft(
        llama,
        **batch,
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=12,
        pad_token_id=0,
        graft_stats=stats,
        top_k=0,
        temperature=1.5,
    )
    assert ids.shape == (9, batch["input_ids"].shape[1] + 12)
    new = new_ids(ids, batch["input_ids"])
    assert all(len({tuple(row) for row in new[i : i + 3]}) == 3 for i in (0, 3, 6))
    engine, length = Engine(llama, None, PLAIN), int(batch["attention_mask"][1].sum())
    params = SamplingParams(seed=stats["seed"], sample_index=5, max_new_tokens=12, top_k=0, temperature=1.5)
    assert list(engine.generate(batch["input_ids"][1, -length:].tolist(), params).token_ids) == new[5]
    read = [row["prefill_tokens_per_s"] > 0 for row in stats["rows"]]
    assert read == [True, False, False] * 3


def test_prefix_constraints_know_their_row(llama: Any, graft: Any, batch: Any) -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return list(range(50 * row, 50 * row + 50))

    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "prefix_allowed_tokens_fn": allowed}
    expected = llama.generate(**batch, **options)
    assert torch.equal(graft(llama, **batch, **options), expected)
    options |= {"do_sample": True, "num_return_sequences": 2}
    theirs, ours = (run(**batch, **options) for run in (llama.generate, functools.partial(graft, llama)))
    first = [[row[0] // 50 for row in new_ids(ids, batch["input_ids"])] for ids in (theirs, ours)]
    assert first[0] == first[1] and len(set(first[1])) >= 3


@pytest.fixture(scope="module")
def adapted(llama: Any) -> Any:
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(llama), lora).eval()


@peft_is_behind
def test_a_lora_adapter_is_honoured(
    adapted: Any, generate: Generate, config: EngineConfig, prompt: Tensor, greedy: list[int]
) -> None:
    options: dict[str, Any] = {"input_ids": prompt, "max_new_tokens": NEW, "do_sample": False}
    ours = options | {"custom_generate": generate, "graft_config": config}
    expected = adapted.generate(**options)
    assert torch.equal(adapted.generate(**ours), expected)
    assert new_ids(expected, prompt)[0] != greedy
    with adapted.disable_adapter():
        assert new_ids(adapted.generate(**ours), prompt)[0] == greedy


class Stop(BaseException):
    """Like KeyboardInterrupt, but pytest does not take it for one."""


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("error", [None, ValueError, Stop])
@pytest.mark.parametrize("where", ["criterion", "processor", "streamer"])
def test_the_model_is_given_back_as_it_was(
    llama: Any, graft: Any, prompt: Tensor, attention: str, error: Any, where: str
) -> None:
    calls = []

    def fail(*_: Any, **__: Any) -> Any:
        calls.append(where)
        if error is not None and len(calls) == 3:
            raise error("here")
        return _[1] if where == "processor" else torch.tensor([False])

    streamer = Seen()
    streamer.put = fail  # type: ignore[method-assign]
    options = {
        "criterion": {"stopping_criteria": [fail]},
        "processor": {"logits_processor": [fail]},
        "streamer": {"graft_streamer": streamer},
    }[where]
    llama.set_attn_implementation(attention)
    llama.model.layers[1].train()
    try:
        if error is None:
            graft(llama, prompt, max_new_tokens=4, do_sample=False, **options)
        else:
            # As in a debugger or a notebook, the traceback and its frames are alive while the model is looked at.
            with pytest.raises(error, match="here") as caught:
                graft(llama, prompt, max_new_tokens=4, do_sample=False, **options)
            assert caught.tb is not None
        assert len(calls) >= 3
        assert llama.config._attn_implementation == attention
        assert not llama.training and llama.model.layers[1].mlp.training
    finally:
        llama.set_attn_implementation("sdpa")
        llama.eval()


def test_engines_are_kept_but_keep_no_model(llama: Any, prompt: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("longgraft.hf.dropin.Engine", lambda *a, **k: made.append(a[0]) or Engine(*a, **k))
    model, generate = copy.deepcopy(llama), Generate()
    options = {"max_new_tokens": 3, "do_sample": False, "graft_config": PLAIN, "custom_generate": generate}
    expected = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert len(made) == 1
    model.double()
    assert torch.equal(model.generate(prompt, **options), expected)
    assert len(made) == 2
    alive = weakref.ref(model)
    made.clear()
    del model
    gc.collect()
    assert alive() is None


def test_defaults_measure_and_work(llama: Any, prompt: Tensor, greedy: list[int]) -> None:
    ids = llama.generate(prompt, max_new_tokens=NEW, do_sample=False, custom_generate=Generate())
    assert new_ids(ids, prompt)[0] == greedy
