"""One thread a worker: several workers with several threads each wait for one another at every operation.

Without a GPU, Triton's kernels run in its interpreter; that must be said before triton is first imported.
"""

import os
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


if TYPE_CHECKING:
    from longgraft import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with a tokenizer, saved as a folder."""
    from tests.saved_model import save

    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: str) -> "Engine":
    """The engine of the saved model."""
    from longgraft import Engine

    return Engine.from_pretrained(folder)
