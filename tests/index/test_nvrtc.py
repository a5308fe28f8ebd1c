"""The kernel compiles for real GPU architectures where NVRTC is installed; no GPU is needed."""

from __future__ import annotations

import sys

import pytest

from longgraft.config import GraftError
from longgraft.index import nvrtc


def need_nvrtc() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc (extra: gpu)")
    try:
        nvrtc.compile_kernel("sm_0")
    except GraftError as error:
        if "could not be loaded" in str(error):
            pytest.skip(str(error))


@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100", "sm_120"))]
)
def test_compiles_without_a_gpu(arch: str) -> None:
    """Nothing spills, and one thread's stack is small: measured 78 to 104 registers and 2,928 bytes of stack."""
    need_nvrtc()
    cubin = nvrtc.compile_kernel(arch)
    assert cubin.code[:4] == b"\x7fELF"
    assert nvrtc.KERNEL.encode() in cubin.code
    assert 16 <= cubin.registers <= 160
    assert cubin.spill_stores == cubin.spill_loads == 0
    assert cubin.stack <= 4096
    assert nvrtc.compile_kernel(arch) is cubin


def test_what_does_not_compile_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    need_nvrtc()
    with pytest.raises(GraftError, match=r"does not compile for sm_1:|NVRTC"):
        nvrtc.compile_kernel("sm_1")
    monkeypatch.setattr(nvrtc, "kernel_source", lambda: "__device__ int x = nonsense;")
    with pytest.raises(GraftError, match=r"sm_90a: .*nonsense"):
        nvrtc.compile_kernel("sm_90a")


def test_without_bindings_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(GraftError, match=r"longgraft\[gpu\]"):
        nvrtc.compile_kernel("sm_89")


def test_source_is_complete_and_rolled() -> None:
    source = nvrtc.kernel_source()
    for name in nvrtc.FIELDS:
        assert f"c[{name}]" in source
    assert "#pragma unroll 1\n  for (" in source
    for header in nvrtc.HEADERS:
        assert f'#include "{header}"' in "".join(map(nvrtc._shipped, nvrtc.HEADERS)) + source


def test_report_that_changed_is_named() -> None:
    with pytest.raises(GraftError, match="report has changed"):
        nvrtc._needs("nothing of the kind")
    assert nvrtc._needs("8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads Used 30 registers") == (
        30,
        8,
        0,
        4,
    )
