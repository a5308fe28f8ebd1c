"""Compiles what the backend `flash` would ask of flash-attn 4: `python -m tests.kernels.flash4_cubins ARCH`.

The call is made once on the CPU with a stand-in that keeps its arguments; tensors of their shapes and strides, but
without contents, then go to the real function, which compiles its kernel for ARCH and launches nothing. Prints what
it would return for every case, once it left a cubin in CUTE_DSL_DUMP_DIR. A process of its own: the architecture is
read from the environment at import.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import flash_attn.cute
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longgraft.kernels import flash_calls
from longgraft.kernels.spec import AttentionSpec

CASES: dict[str, dict[str, Any]] = {
    "many pages": {"rows": 28, "heads": 8, "dim": 128, "pages": 128, "dtype": torch.bfloat16},
    "few pages": {"rows": 64, "heads": 2, "dim": 64, "pages": 3, "dtype": torch.float16},
    "softcap": {"rows": 17, "heads": 4, "dim": 128, "pages": 9, "dtype": torch.bfloat16, "softcap": 30.0},
}


class Stop(Exception):
    """Ends the call on the CPU once its arguments are known."""


def arguments_of(case: dict[str, Any], major: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what our call hands to flash-attn 4."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(*args: Any, **options: Any) -> None:
        found.append((args, options))
        raise Stop

    real, flash_attn.cute.flash_attn_varlen_func = flash_attn.cute.flash_attn_varlen_func, keep
    try:
        provider = flash_calls._flash_attn_4((major, 0))
    finally:
        flash_attn.cute.flash_attn_varlen_func = real
    assert not isinstance(provider, str), provider
    query = torch.zeros(case["rows"], case["heads"], case["dim"], dtype=case["dtype"])
    keys = torch.zeros(case["pages"], flash_calls.PAGE, case["heads"], case["dim"], dtype=case["dtype"])
    table = torch.arange(case["pages"], dtype=torch.int32)[None]
    spec = AttentionSpec(scale=0.1, window=None, softcap=case.get("softcap"), sinks=None)
    try:
        provider.call(query, flash_calls.Pages(keys, keys.clone(), table), spec)
    except Stop:
        return found[0]
    raise AssertionError("flash-attn 4 was not called")


def empty(value: Any) -> Any:
    """Return a tensor without contents in place of a tensor."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def main(arch: str) -> None:
    """Compile every case."""
    results = {}
    for name, case in CASES.items():
        args, options = arguments_of(case, int(arch.strip("sm_a")) // 10)
        with FakeTensorMode():
            found = flash_attn.cute.flash_attn_varlen_func(
                *map(empty, args), **{key: empty(value) for key, value in options.items()}
            )
        (cubin,) = Path(os.environ["CUTE_DSL_DUMP_DIR"]).rglob("*.cubin")  # all are named alike
        assert cubin.stat().st_size > 1000
        cubin.unlink()
        out, lse = found[:2]
        results[name] = [list(out.shape), str(out.dtype), list(lse.shape), str(lse.dtype)]
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
