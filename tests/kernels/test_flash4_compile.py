"""flash-attn 4 takes what the backend `flash` would ask of it: its kernels compile for GPUs that are not here."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAS_FLASH4 = find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_FLASH4, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_we_ask_for_compiles_without_a_gpu(arch: str, tmp_path: Path) -> None:
    settings = {
        "FLASH_ATTENTION_ARCH": arch,
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP": "cubin",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "FLASH_ATTENTION_FAKE_TENSOR": "1",
        "FLASH_ATTENTION_NUM_SMS": "132",  # a GPU is asked for it otherwise
    }
    command = [sys.executable, "-m", "tests.kernels.flash4_cubins", arch]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **settings})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {  # lanes x rows, heads, dim; heads, lanes x rows
        "many pages": [[32 * 28, 8, 128], "torch.bfloat16", [8, 32 * 28], "torch.float32"],
        "few pages": [[3 * 64, 2, 64], "torch.float16", [2, 3 * 64], "torch.float32"],
        "softcap": [[9 * 17, 4, 128], "torch.bfloat16", [4, 9 * 17], "torch.float32"],
    }
