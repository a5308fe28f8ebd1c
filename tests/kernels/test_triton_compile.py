"""What the Triton backend would launch compiles for GPUs that are not here: no spills, tensor cores, async copies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
ROOT = Path(__file__).parents[2]
LONG = {"prefix": 8192, "kv_heads": 2, "group": 4, "dim": 128, "dtype": "bfloat16"}
CASES = {
    "tree": {**LONG, "rows": 17},
    "one row": {**LONG, "rows": 1, "tree": "chain"},
    "prompt chunk": {**LONG, "prefix": 1000, "kv_heads": 8, "rows": 512, "tree": "chain"},
    "all options": {**LONG, "rows": 33, "window": 4096, "softcap": 30.0, "sinks": True},
    "one row, all options": {**LONG, "rows": 1, "window": 4096, "softcap": 30.0, "sinks": True},
    "head of 64": {**LONG, "rows": 17, "dim": 64, "group": 7, "dtype": "float16"},
    "head of 80": {**LONG, "rows": 9, "dim": 80},
    "head of 256": {**LONG, "rows": 17, "dim": 256, "softcap": 50.0},
    "fp32": {**LONG, "rows": 17, "dtype": "float32"},
}
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities)."""


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED)
def test_compiles_without_a_gpu(arch: int, tmp_path: Path) -> None:
    quiet = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "tests.kernels.triton_cubins", json.dumps(CASES), str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **quiet})
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert list(results) == list(CASES)
    for name, kernels in results.items():
        part, merge = kernels[0], kernels[1:]
        tensor_cores = part["HMMA"] + part["HGMMA"] + part["UTCHMMA"]
        assert part["LDGSTS"] > 0, (name, part)
        assert part["shared"] <= SHARED[arch], (name, part)
        if name == "fp32":  # no tensor cores at full precision: sums of products in registers, some of them spilt
            assert part["stack"] <= 512 and not tensor_cores, (name, part)
        else:
            assert part["stack"] == part["LDL"] == part["STL"] == 0 and tensor_cores, (name, part)
        assert all(kernel["stack"] == 0 for kernel in merge), (name, merge)
        assert len(merge) == (name != "prompt chunk"), name
