"""One thread a worker: several workers with several threads each wait for one another at every operation.

Without a GPU, Triton's kernels run in its interpreter; that must be said before triton is first imported.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
