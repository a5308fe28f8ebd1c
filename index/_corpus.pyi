"""Types of the native part of corpora; `corpus_twin` has the same and says what they do."""

import numpy as np
import numpy.typing as npt

DEPTH: int
PAGE_BYTES: int

def sort_ends(tokens: npt.NDArray[np.int32], ends: npt.NDArray[np.int32]) -> None: ...
def crc32(data: npt.NDArray[np.uint8]) -> int: ...

class Segments:
    """Segments that are searched together."""

    def __init__(self) -> None: ...
    def add(
        self,
        data: npt.NDArray[np.uint8],
        sums: npt.NDArray[np.uint32],
        checked: npt.NDArray[np.uint8],
        *,
        tokens_at: int,
        ends_at: int,
        n: int,
        starts: npt.NDArray[np.int32],
    ) -> None: ...
    def lookup(
        self, context: npt.NDArray[np.int32], min_match: int, ends: npt.NDArray[np.int64]
    ) -> tuple[int, int, int]: ...
    def follow(
        self, ends: npt.NDArray[np.int64], vocab_size: int, out: npt.NDArray[np.int32]
    ) -> tuple[int, int, int]: ...
