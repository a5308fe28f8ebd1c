"""One small model, prompts for it, and `graft`: its `generate` through a drop-in of this module."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longgraft.config import EngineConfig
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.hf import Generate
from tests.hf.cases import NEW, new_ids
from tests.models import prompt_for, tiny_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Rows cost nothing extra, so every proposal is verified, on any machine."""
    path = tmp_path_factory.mktemp("costs") / "flat.json"
    CostTable(np.ones(len(ROW_BUCKETS)), np.zeros(len(ROW_BUCKETS))).save(path)
    return EngineConfig(cost_table=str(path))


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama", torch.float32)


@pytest.fixture(scope="module")
def prompt(llama: Any) -> Tensor:
    return torch.tensor([prompt_for(llama, 90)])


@pytest.fixture(scope="module")
def batch(llama: Any) -> dict[str, Tensor]:
    """Three prompts of different lengths, padded on the left with token 0."""
    prompts = [prompt_for(llama, n, seed=n) for n in (60, 37, 48)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def generate() -> Generate:
    return Generate()


@pytest.fixture(scope="module")
def graft(generate: Generate, config: EngineConfig) -> Callable[..., Any]:
    def run(model: Any, *inputs: Tensor, **options: Any) -> Any:
        return model.generate(*inputs, custom_generate=generate, **({"graft_config": config} | options))

    return run


@pytest.fixture(scope="module")
def greedy(llama: Any, prompt: Tensor) -> list[int]:
    return new_ids(llama.generate(prompt, max_new_tokens=NEW, do_sample=False), prompt)[0]
