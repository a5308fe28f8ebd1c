"""Finds the native index, or says once that there is none."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from typing import Any


@cache
def native_module() -> Any:
    """Return the native module, or None, having said so, where it was not built."""
    try:
        return import_module("longgraft.index._native")
    except ImportError:
        warnings.warn(
            "longgraft was installed without its native index (no C++ compiler): drafting from the context "
            "works but is some 50 times slower. Install a compiler and reinstall longgraft.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
