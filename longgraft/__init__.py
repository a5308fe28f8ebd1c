"""longgraft: faster long-context generation with any Hugging Face causal LM, without changing its output.

Names are loaded when first used, so that `import longgraft.index` needs numpy alone.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "longgraft.engine",
    "EngineConfig": "longgraft.config",
    "GraftError": "longgraft.config",
    "Grammar": "longgraft.grammar",
    "Output": "longgraft.config",
    "References": "longgraft.references",
    "SamplingParams": "longgraft.config",
    "Service": "longgraft.service",
}
__all__ = [
    "Engine",
    "EngineConfig",
    "GraftError",
    "Grammar",
    "Output",
    "References",
    "SamplingParams",
    "Service",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'longgraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
