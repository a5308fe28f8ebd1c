"""Memory while a prompt is read and a tree is verified: nothing of order rows x context, or of context squared.

A child process each, since a process's peak never falls. It prints its own peak before and after.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20
LAYERS, KV_HEADS, DIM, ROWS = 8, 2, 16, 1024
CHILD = """
import json, sys
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
from longgraft.cache import SequenceCache
from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.target import Segment

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

length, rows = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=32768, eos_token_id=None, bos_token_id=None)
settings = EngineConfig(prefill_rows=rows, prefix_cache=False, policy="plain")
engine = Engine(LlamaForCausalLM(config).eval(), None, settings)
prompt = np.random.default_rng(0).integers(0, 256, length).tolist()

engine.generate(prompt[:1024], SamplingParams(max_new_tokens=1))  # whatever is made once
before = peak()
seq = engine.open(prompt, SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True))
with engine.target.session():
    engine.prefill(seq)
    read_peak = peak()
    tokens = np.arange(rows, dtype=np.int32) % 256
    mask = np.eye(rows, dtype=np.bool_)
    mask[:, 0] = True
    positions = np.full(rows, length, np.int32)
    positions[0] = length - 1
    engine.target.forward([Segment(seq.cache, tokens, positions, mask=mask)])
print(json.dumps({"read": read_peak - before, "tree": peak() - before}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_reading_and_verifying_take_memory_for_keys_and_values_and_little_else() -> None:
    """One score per row, key and head of one layer would be 64 MiB."""
    length = 4 * 1024
    command = [sys.executable, "-c", CHILD, str(length), str(ROWS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    grown = json.loads(done.stdout.splitlines()[-1])
    kept = length * LAYERS * KV_HEADS * DIM * 2 * 4
    assert grown["read"] < kept + 32 * MIB, {name: f"{value / MIB:.0f} MiB" for name, value in grown.items()}
    assert grown["tree"] < kept + 32 * MIB, {name: f"{value / MIB:.0f} MiB" for name, value in grown.items()}
