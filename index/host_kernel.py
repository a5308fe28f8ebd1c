"""The device index's kernel compiled as plain C++: the same source, a launch is a call. For tests and dry runs.

Knows a C++ compiler by name, no GPU. The one idea: `device.cu` has one thread and no CUDA of its own but the word
`__global__`, so what runs here is the code that runs there, on the same flat buffers.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from longgraft.config import GraftError
from longgraft.index.nvrtc import KERNEL, SIGNATURE, Launch, kernel_source

COMPILERS = ("c++", "g++", "clang++")


def host_launch(folder: str | Path) -> Launch:
    """Compile the kernel into `folder` and return a function that runs it on host memory, given `SIGNATURE`'s values.

    Some seconds. Raises `GraftError` where there is no compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise GraftError(f"the index's kernel as host code needs a C++ compiler: expected one of {COMPILERS}")
    source, library = Path(folder, "device.cpp"), Path(folder, "device.so")
    source.write_text("#define __global__\n" + kernel_source())
    headers = Path(__file__).parent / "csrc"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", f"-I{headers}", "-Wno-unknown-pragmas"]
    done = subprocess.run(
        [compiler, *flags, str(source), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise GraftError(f"the index's kernel does not compile as host code: {done.stderr.strip().splitlines()[:1]}")
    kernel = getattr(ctypes.CDLL(str(library)), KERNEL)
    kernel.argtypes, kernel.restype = SIGNATURE, None
    return lambda *values: kernel(*values)
