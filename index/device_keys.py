"""The nearest of many unit keys on a device: one matrix with room for all of them, a product, a top-k.

Knows no text and no model; tensors are torch's, on any device. The one idea: how many keys there are is a number on
the device too, so that keys are appended and searched without the host waiting for anything; shapes follow from how
many keys were ever given, which the host knows. Products are plain float32 sums, never tensor-core roundings.

`TorchShortlist` serves `NearestRows` by the same matrix. **Never run on a GPU yet**; the tests run it on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longgraft.config import GraftError
from longgraft.index.projection import FloatArray, Projection

if TYPE_CHECKING:
    import torch

NO_HIT = -1
SLACK = 8  # scored beyond k, so that equal scores at the border are ordered too
BLOCK_ROWS = 1 << 20  # of a product, so that what it writes stays small beside the keys


class DeviceKeys:
    """Unit keys `[n, dim]` in order of arrival, on `device`, room for `capacity` reserved at once.

    `length [1]`: how many there are. `dtype`: of the stored keys; scores are float32.
    """

    def __init__(
        self, dim: int, capacity: int, device: str | torch.device = "cuda", dtype: torch.dtype | None = None
    ) -> None:
        import torch

        if dim < 1 or capacity < 1:
            raise GraftError(f"device keys: {capacity} of {dim} dimensions: expected 1 or more of each")
        try:
            # One row more than there is room for: where rows beyond the capacity go.
            self._keys = torch.zeros(capacity + 1, dim, dtype=dtype or torch.float32, device=device)
        except (RuntimeError, AssertionError) as error:  # no memory, no such device, a torch without CUDA
            raise GraftError(f"device keys: no room for {capacity} on {device}: {error}") from None
        self.dim, self.capacity = dim, capacity
        self.device = self._keys.device
        self.length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._most = 0  # no key lies beyond: what the host knows of `length`

    @property
    def memory_bytes(self) -> int:
        """Bytes held on the device."""
        return self._keys.numel() * self._keys.element_size()

    def extend(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Append keys [m, dim], or the first `count` [1] of them, as far as there is room; does not wait."""
        import torch

        if keys.ndim != 2 or keys.shape[1] != self.dim or keys.device != self.device:
            found = f"{tuple(keys.shape)} on {keys.device}"
            raise GraftError(f"device keys: rows are {found}: expected [n, {self.dim}] on {self.device}")
        at = self.length + torch.arange(len(keys), device=self.device)
        self._keys.index_copy_(0, at.clamp_max_(self.capacity), keys.to(self._keys.dtype))
        self.length.add_(len(keys) if count is None else count).clamp_max_(self.capacity)
        self._most = min(self._most + len(keys), self.capacity)

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` keys."""
        self.length.clamp_max_(length)
        self._most = min(self._most, length)

    def search(
        self, query: torch.Tensor, k: int, limit: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [k] and scores [k] of the keys most like `query [dim]` among the first `limit` [1]; no waiting.

        Best first, newest first of equals (which of many equal ones at the border come in is the top-k's choice).
        Where there are fewer: `NO_HIT`, -inf.
        """
        import torch

        rows = torch.full((max(k, 0),), NO_HIT, dtype=torch.int64, device=self.device)
        scores = torch.full((max(k, 0),), -torch.inf, device=self.device)
        if self._most == 0 or k < 1:
            return rows, scores
        every = self._scores(query)
        end = self.length if limit is None else torch.minimum(self.length, limit)
        every.masked_fill_(torch.arange(len(every), device=self.device) >= end, -torch.inf)
        found = torch.topk(every, min(k + SLACK, len(every))).indices.sort(descending=True).values
        best = every[found].sort(descending=True, stable=True)
        found, taken = found[best.indices][:k], best.values[:k]
        rows[: len(found)] = torch.where(taken == -torch.inf, NO_HIT, found)
        scores[: len(taken)] = taken
        return rows, scores

    def _scores(self, query: torch.Tensor) -> torch.Tensor:
        """Return the product of `query [dim]` with every key; with a vector no library takes tensor cores for it."""
        import torch

        wide = query.to(self.device, torch.float32)
        return torch.cat([torch.mv(block.float(), wide) for block in self._keys[: self._most].split(BLOCK_ROWS)])


class DeviceDense:
    """The dense store of one sequence on a device: states in, positions out, nothing waited for.

    `projection` is fixed, as fitted on the host (`Projection.fit`); key j is the state at position j. `recent`: as
    many of the newest positions are never returned.
    """

    def __init__(
        self, projection: Projection, capacity: int, device: str | torch.device = "cuda", recent: int = 2
    ) -> None:
        import torch

        self.keys, self.recent = DeviceKeys(projection.dim, capacity, device), recent
        self._mean = torch.from_numpy(projection.mean).to(self.keys.device)
        self._matrix = torch.from_numpy(projection.matrix).to(self.keys.device)

    def extend(self, states: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Take in the states [n, hidden] of the next positions, or the first `count` [1] of them."""
        self.keys.extend(self._projected(states), count)

    def search(self, state: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions [k] and cosines [k] of those most like `state [hidden]`; see `DeviceKeys.search`."""
        return self.keys.search(self._projected(state[None])[0], k, self.keys.length - self.recent)

    def _projected(self, states: torch.Tensor) -> torch.Tensor:
        keys = (states.float() - self._mean) @ self._matrix
        lengths = keys.norm(dim=1, keepdim=True)
        return keys / lengths.masked_fill(lengths == 0, 1.0)


class TorchShortlist:
    """What `NearestRows` asks of a mirror: rows of its matrix kept on a torch device; the answer is fetched."""

    is_precise = True

    def __init__(self, dim: int, capacity: int, device: str) -> None:
        self._keys = DeviceKeys(dim, capacity, device)
        self.covered = 0
        self.is_checked = False  # its first answer is compared with an exact one

    @property
    def memory_bytes(self) -> int:
        """Bytes held on the device."""
        return self._keys.memory_bytes

    def follow(self, matrix: FloatArray) -> None:
        """Take in the rows that are new."""
        import torch

        new: Any = np.ascontiguousarray(matrix[self.covered :])
        self._keys.extend(torch.from_numpy(new).to(self._keys.device))
        self.covered = len(matrix)

    def truncate(self, n: int) -> None:
        """Keep the first `n` rows."""
        self._keys.truncate(n)
        self.covered = min(n, self.covered)

    def search(self, query: FloatArray, k: int) -> npt.NDArray[np.int64]:
        """Return rows that may be among the `k` nearest, `NO_HIT` where there are fewer."""
        import torch

        found: npt.NDArray[np.int64] = self._keys.search(torch.from_numpy(query), k)[0].cpu().numpy()
        return found
