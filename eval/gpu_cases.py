"""What the checks on a GPU work on: attention problems in a mixed-up pool, and models of realistic layers.

Knows tensors and transformers; no stage. The one idea: sizes are those of real models (heads of 128, four queries a
key, layers of an 8B model), only the number of layers is small, since a wrong kernel is wrong in the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longgraft.kernels.bounded import BoundedPrefix
from longgraft.kernels.reference import attend as reference
from longgraft.kernels.reference import visible
from longgraft.kernels.spec import AttentionSpec, Run, TreeInput

CHUNK = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One call: a bushy tree of `rows` nodes behind `prefix` cached rows."""

    rows: int = 17
    prefix: int = 257
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A case's tensors: what attention takes, and the same prefix as a bounded table over one pool."""

    inputs: TreeInput
    pool: Run
    prefix: BoundedPrefix
    positions: Tensor


def problem(case: Case, dtype: torch.dtype, device: torch.device) -> Problem:
    """Make a case's tensors on a device; rows of the pool that nobody wrote hold NaN."""
    rng = torch.Generator().manual_seed(case.rows * 7919 + case.prefix)
    heads = case.kv_heads * case.group

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(device, dtype)

    chunks = case.prefix // CHUNK + 2
    order = torch.randperm(chunks, generator=rng).to(device)
    rows = (order[:, None] * CHUNK + torch.arange(CHUNK, device=device)).flatten()
    pool = tuple(
        torch.full((chunks * CHUNK, case.kv_heads, case.dim), torch.nan, dtype=dtype, device=device) for _ in "kv"
    )
    written = rows[: max(case.prefix, 1)]
    for part in pool:
        part[written] = randn(len(written), case.kv_heads, case.dim)
    spans = [slice(int(rows[a]), int(rows[a]) + min(CHUNK, case.prefix - a)) for a in range(0, case.prefix, CHUNK)]
    runs = [(pool[0][span], pool[1][span]) for span in spans]
    mask, depths = torch.eye(case.rows, dtype=torch.bool), [0] * case.rows
    for row in range(1, case.rows):
        parent = int(torch.randint(max(0, row - 6), row, (), generator=rng))
        mask[row] |= mask[parent]
        depths[row] = depths[parent] + 1
    positions = torch.tensor(depths, device=device) + case.prefix
    spec = AttentionSpec(case.dim**-0.5, case.window, case.softcap, randn(heads) if case.sinks else None)
    tree = (randn(case.rows, case.kv_heads, case.dim), randn(case.rows, case.kv_heads, case.dim))
    inputs = TreeInput(randn(case.rows, heads, case.dim), runs, tree, spec, mask.to(device), positions)
    prefix = BoundedPrefix(rows, torch.tensor([case.prefix], device=device), CHUNK)
    return Problem(inputs, (pool[0], pool[1]), prefix, positions)


def truth(inputs: TreeInput) -> tuple[Tensor, float]:
    """Return the answer in float64, and how far off one may be: twice torch's own error and two roundings."""
    spec = inputs.spec
    sinks = None if spec.sinks is None else spec.sinks.double()
    wide = AttentionSpec(spec.scale, spec.window, spec.softcap, sinks)
    runs = [(keys.double(), values.double()) for keys, values in inputs.prefix]
    assert inputs.tree is not None
    tree = (inputs.tree[0].double(), inputs.tree[1].double())
    true = reference(TreeInput(inputs.query.double(), runs, tree, wide, inputs.mask, inputs.positions))
    eps = torch.finfo(inputs.query.dtype).eps
    plain = AttentionSpec(spec.scale, spec.window)
    bare = TreeInput(inputs.query, inputs.prefix, inputs.tree, plain, inputs.mask, inputs.positions)
    exact = reference(TreeInput(inputs.query.double(), runs, tree, plain, inputs.mask, inputs.positions))
    own = float((_sdpa(bare).double() - exact).abs().max())
    return true, 2 * own + 2 * eps * float(true.abs().max())


def _sdpa(inputs: TreeInput) -> Tensor:
    """What torch's own attention gives for the same keys, in the same dtype."""
    assert inputs.tree is not None
    group = inputs.query.shape[1] // inputs.kv_heads
    keys, values = (
        torch.cat(x).repeat_interleave(group, dim=1).transpose(0, 1)[None] for x in zip(*inputs.prefix, inputs.tree)
    )
    query = inputs.query.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible(inputs), scale=inputs.spec.scale)
    return out[0].transpose(0, 1)


def model_of(dtype: torch.dtype, device: torch.device, layers: int, is_small: bool = False) -> Any:
    """Return a Llama with random weights and the layers of an 8B model (or small ones), made on the device itself."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128_256}
    small = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 2_003}
    config = LlamaConfig(
        **(small if is_small else large), num_hidden_layers=layers, num_key_value_heads=2 if is_small else 8,
        head_dim=32 if is_small else 128, max_position_embeddings=1 << 18, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device, dtype).eval()


def text_of(vocab_size: int, length: int) -> list[int]:
    """Return a prompt that repeats itself, with changes, so that retrieval has something to say."""
    rng = torch.Generator().manual_seed(1)
    piece = torch.randint(0, vocab_size, (60,), generator=rng)
    text = list[int]()
    while len(text) < length:
        piece[int(torch.randint(0, 60, (), generator=rng))] = int(torch.randint(0, vocab_size, (), generator=rng))
        text += piece.tolist()
    return text[:length]
