"""One thread a worker: several workers with several threads each wait for one another at every operation."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
