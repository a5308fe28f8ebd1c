"""Compiles what the Triton backend would launch for the cases and architectures named, and prints what came out.

Runs in a process of its own, without TRITON_INTERPRET and without a GPU:
`python -m tests.kernels.triton_cubins '{"bushy": {"rows": 17, "dtype": "bfloat16"}}' 90`. Each kernel's signature is
read off the very arguments of the launch, with Triton's own hints: without "divisible by 16" code looks far worse.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longgraft.kernels import triton as backend
from longgraft.kernels import triton_plan
from longgraft.kernels.triton_kernels import merge_kernel, part_kernel
from tests.kernels.attention_cases import Case, make

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    int: "i32",
    float: "fp32",
}
PROCESSORS = 132
# What the machine code of these kernels is made of: asynchronous copies, tensor cores, local memory (spills).
OPS = ("LDGSTS", "HMMA", "HGMMA", "UTCHMMA", "LDL", "STL")


def source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """Return the kernel as Triton would specialise it for these arguments."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        sized = kernel.params[place].do_not_specialize
        if name.isupper() or value is None or (isinstance(value, int) and value == 1 and not sized):
            signature[name], constants[(place,)] = "constexpr", value
        elif isinstance(value, tuple):
            signature[name] = ("i32",) * len(value)
            hints |= {(place, i): [["tt.divisibility", 16]] for i, number in enumerate(value) if number % 16 == 0}
        else:
            signature[name] = f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else TYPES[type(value)]
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not sized):
                hints[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, hints)


def compiled(kernel: Any, arguments: dict[str, Any], arch: int, **options: Any) -> dict[str, Any]:
    """Return registers, stack bytes, shared bytes and how often each of `OPS` occurs."""
    made = triton.compile(source(kernel, arguments), target=GPUTarget("cuda", arch, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        use, code = (
            subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", use)[-1])
    counts = {op: len(re.findall(rf"\b{op}\b", code)) for op in OPS}
    return {"registers": registers, "stack": stack, "shared": made.metadata.shared, **counts}


def both_kernels(fields: dict[str, Any], arch: int) -> list[dict[str, Any]]:
    """Compile the kernel of parts, and of their merge if there is one, for one case."""
    inputs = make(Case(**{**fields, "dtype": getattr(torch, fields["dtype"])})).inputs
    if fields.get("tree") == "chain":
        inputs = replace(inputs, mask=None)
    plan = triton_plan.make_plan(inputs)
    tree_blocks = -(-len(inputs.query) // triton_plan.block_keys(inputs))
    cut = backend.tiles(inputs, plan.blocks + tree_blocks, 2 * PROCESSORS)
    query, lse = inputs.query, torch.empty(cut.splits, *inputs.query.shape[:2])
    out = query.new_empty(*query.shape[:2], inputs.value_dim)
    parts = out if cut.splits == 1 else torch.empty(cut.splits, *out.shape)
    arguments = backend.part_arguments(inputs, plan, cut, (query, parts, lse))
    results = [compiled(part_kernel, arguments, arch, **cut.options)]
    if cut.splits > 1:
        arguments = backend.merge_arguments((parts, lse, out, lse[0]), inputs.spec.sinks)
        results.append(compiled(merge_kernel, arguments, arch, **backend.MERGE_OPTIONS))
    return results


if __name__ == "__main__":
    assert not backend.INTERPRETED
    torch.set_num_threads(1)
    cases, arch = json.loads(sys.argv[1]), int(sys.argv[2])
    print(json.dumps({name: both_kernels(fields, arch) for name, fields in cases.items()}))
