"""Compiles the index's kernel for one GPU architecture and launches it; owns the dependency `cuda.bindings`.

Knows no automaton: `device.py` says what the arguments mean. The one idea: the kernel includes the very headers
that the CPU runs, and NVRTC compiles them from memory without a compiler, a driver or a GPU in some tenths of a
second, so the code path is checked wherever the package is tested. Products and sums are not contracted
(--fmad=false): probabilities are bit for bit the host's.

**This has never run on a GPU** (it compiles, and its logic runs as host code in the tests): `device.py` therefore
compares it with the host before its first use.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from longgraft.config import GraftError

KERNEL = "longgraft_round"
HEADERS = ("suffix_automaton.hpp", "ranking.hpp", "draft.hpp")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
# Of `longgraft_round`: control, tokens, count, n, learns, path, path_len, budget, threshold, rows, vocab_rows, width.
SIGNATURE = (_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT, ctypes.c_double, _POINTER, _INT, _INT)
# What each entry of the control block (int64) holds; the kernel is compiled with this list as its enum.
FIELDS = (
    "STATES CLONE_LENS TOKENS EDGES SIZE NUM_CLONES NUM_EDGES MATCH_LEN MATCH_END PREFIXES CLONES SLOTS TEXT_LEN "
    "TEXT_ROOM SIZE_BEFORE FAULT VOCAB_SIZE BINS NUM_LENGTHS NUM_TOTALS NUM_AGES NUM_CONTEXTS NUM_SHARES NUM_ORDERS "
    "NUM_CELLS HAZARDS WORK NODES PROBABILITIES NUM_NODES MAX_BUDGET"
).split()
Launch = Callable[..., None]


class Cubin(NamedTuple):
    """A compiled kernel and what it needs of a multiprocessor; bytes are per thread."""

    code: bytes
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def kernel_source() -> str:
    """Return the kernel's source text; it includes `HEADERS`."""
    return f"enum Field {{ {', '.join(FIELDS)} }};\n{_shipped('device.cu')}"


def _shipped(name: str) -> str:
    """Return a source of the package with every loop told not to unroll: half the code, half the compile time."""
    try:
        text = resources.files("longgraft.index").joinpath("csrc", name).read_text("utf-8")
    except OSError as error:
        raise GraftError(f"kernel source {name}: {error.strerror}; reinstall longgraft") from None
    return re.sub(r"(?m)^ *(?:for|while) \(", r"#pragma unroll 1\n\g<0>", text)


def _bindings(name: str) -> Any:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise GraftError(
            f"the index on a GPU needs cuda-bindings and nvidia-cuda-nvrtc ({error}): pip install 'longgraft[gpu]'"
        ) from None
    return {"driver": driver, "nvrtc": nvrtc}[name]


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """Return what a call of the bindings gave, or raise its error."""
    status, *values = result
    if int(status) != 0:
        raise GraftError(f"{what} failed: {status.name}")
    return values[0] if values else None


@cache
def compile_kernel(arch: str) -> Cubin:
    """Compile for one architecture, such as "sm_90"; raises `GraftError` with the compiler's first error."""
    nvrtc = _bindings("nvrtc")
    texts = [_shipped(name).encode() for name in HEADERS]
    names = [name.encode() for name in HEADERS]
    try:
        made = nvrtc.nvrtcCreateProgram(kernel_source().encode(), b"device.cu", len(texts), texts, names)
    except RuntimeError as error:  # the bindings are there, the library they load is not
        raise GraftError(f"NVRTC could not be loaded ({error}): pip install nvidia-cuda-nvrtc") from None
    program = _checked(made, "nvrtcCreateProgram")
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--fmad=false", b"--ptxas-options=-v"]
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
        _checked(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        text = log.rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            lines = [line for line in text.splitlines() if "error" in line] or [status.name]
            raise GraftError(f"the index's kernel does not compile for {arch}: {lines[0].strip()}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        _checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(bytes(code), *_needs(text))


def _needs(log: str) -> tuple[int, int, int, int]:
    """Read registers, stack frame, spill stores and spill loads, the most of any function, from ptxas' report."""
    kinds = (r"Used (\d+) registers", r"(\d+) bytes stack", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    found = [[int(number) for number in re.findall(kind, log)] for kind in kinds]
    if not all(found):
        raise GraftError(f"the compiler's report has changed, expected registers and spills: {log[:200]!r}")
    registers, stack, stores, loads = (max(numbers) for numbers in found)
    return registers, stack, stores, loads


@cache
def cuda_launch(device: int) -> Launch:
    """Return a function that launches the kernel on torch's current stream of a GPU, given `SIGNATURE`'s arguments."""
    import torch

    driver = _bindings("driver")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context, which modules load into, the current one
        major, minor = torch.cuda.get_device_capability()
        cubin = compile_kernel(f"sm_{major}{minor}")
        module = _checked(driver.cuModuleLoadData(cubin.code), "cuModuleLoadData")
        function = _checked(driver.cuModuleGetFunction(module, KERNEL.encode()), "cuModuleGetFunction")

    def launch(*values: Any) -> None:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            result = driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (values, SIGNATURE), 0)
        _checked(result, "launching the index's kernel")

    return launch
