"""The head's layer, step by step, against the same written out densely."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longgraft.draft.head import attend
from tests.draft import dense_head as dense
from tests.draft.heads import head_for
from tests.engines import model_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True, "fc_norm": True},
    {"norm_before_fc": True},
    {"qk_norm": True, "attention_bias": True},
    {"kv_heads": 4},
    {"kv_heads": 1, "head_dim": 8, "layers": (1,)},
    {"rope": {"rope_type": "default", "rope_theta": 500.0}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_a_causal_chain(options: dict[str, Any]) -> None:
    head = head_for(model_of(), **options)
    n, hidden = 9, head.shape.hidden
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, hidden * len(head.shape.layers), generator=generator, dtype=torch.float64)
    embeds = torch.randn(n, hidden, generator=generator, dtype=torch.float64)
    fed = head.combine(features)
    assert torch.allclose(fed, dense.combined(head, features), atol=1e-9)
    rows = head.project(embeds, fed, torch.arange(n))
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    out = head.finish(attend(rows.query, rows.key, rows.value, causal), rows.residual)
    wanted = dense.outputs(head, embeds, fed)
    assert torch.allclose(out, wanted, atol=1e-5)  # transformers' rotary table is float32
    normed = dense.rms(wanted, head.norm.weight, head.shape.eps)
    assert torch.allclose(head.feedback(out), normed if head.shape.norm_output else wanted, atol=1e-5)
    assert torch.allclose(head.logits(out), normed @ head.lm_head.weight.T, atol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_sees_what_the_mask_says(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(kv_heads)
    query = torch.randn(3, 4, 8, generator=generator)
    key, value = (torch.randn(7, kv_heads, 8, generator=generator) for _ in range(2))
    mask = torch.rand(3, 7, generator=generator) < 0.5
    mask[:, 0] = True
    out = attend(query, key, value, mask)
    for row in range(3):
        for head in range(4):
            k, v = (x[mask[row], head * kv_heads // 4] for x in (key, value))
            wanted = torch.softmax(k @ query[row, head] / 8**0.5, 0) @ v
            assert torch.allclose(out[row, head], wanted, atol=1e-5)


def test_rope_settings_reach_the_rotary_table() -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain, scaled = (head_for(model_of(), rope=rope) for rope in ({"rope_type": "default", "rope_theta": 1e4}, llama3))
    assert not torch.allclose(plain.rotary.inv_freq, scaled.rotary.inv_freq)
    assert "rotary.inv_freq" not in scaled.state_dict()
