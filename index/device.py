"""The automaton of one sequence on a GPU: uploaded once, then extended and drafted from without waiting for it.

Knows no model; storage is torch tensors, the code is `csrc/device.cu` (one thread), the caller's stream is
torch's current one. The idea: all that changes lies in a control block on the device, so rounds are queued one
after another and tokens may come straight from the sampler's tensor. Room is reserved at the upload; a kernel
that finds none left keeps the text, notes a fault and drafts nothing. The fault reaches the host with a later
call's asynchronous copy, and that call builds a larger automaton from the kept text.

**Never run on a GPU yet.** Nothing chooses this path by itself; the first use on a device compares it with the
host and refuses on any difference (`checked_launch`). Its logic is tested as host code.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longgraft.config import GraftError
from longgraft.index.nvrtc import FIELDS, Launch, cuda_launch
from longgraft.index.suffix_automaton import MAX_TOKENS, MIN_PROBABILITY, NO_LIMIT, SuffixAutomaton

if TYPE_CHECKING:
    import torch

PENDING_BYTES = 40  # of a draft's working memory, for each node and each queued one
MIN_ROOM = 4096
FULL, BAD_TOKEN = 1, 2  # faults, as in device.cu
_AT = {name: place for place, name in enumerate(FIELDS)}


class DeviceNodes(NamedTuple):
    """A drafted tree on the device, likeliest node first; [budget] each but `num_nodes` [1], entries behind it are old.

    As `Nodes`, with `probabilities` of the whole path (float64, the host's bit for bit) in place of scores. Views
    of buffers that the next draft overwrites.
    """

    num_nodes: torch.Tensor
    token_ids: torch.Tensor
    parents: torch.Tensor
    match_lens: torch.Tensor
    origins: torch.Tensor
    cells: torch.Tensor
    probabilities: torch.Tensor


class DeviceAutomaton:
    """A mirror of a native `SuffixAutomaton`, with the same text, lists, hazards and learning from the upload on.

    `room`: tokens that fit before it is built anew (default: a quarter of the text). `launch`: how the kernel is
    run (default: on a CUDA `device`, checked once).
    """

    def __init__(
        self,
        host: SuffixAutomaton,
        device: str | torch.device = "cuda",
        *,
        room: int | None = None,
        max_budget: int = 64,
        launch: Launch | None = None,
    ) -> None:
        import torch

        if max_budget < 1 or (room is not None and room < 1):
            raise GraftError(f"max_budget {max_budget}, room {room}: expected 1 or more")
        self._launch = checked_launch(torch.device(device)) if launch is None else launch
        self.device = torch.empty(0, device=device).device  # with its number
        self.max_budget = max_budget
        self.upload(host, room)

    def upload(self, host: SuffixAutomaton, room: int | None = None) -> None:
        """Become what `host` is now, with space for `room` more tokens."""
        room = max(MIN_ROOM, len(host) // 4) if room is None else room
        if len(host) + 2 * room > MAX_TOKENS:
            raise GraftError(f"{len(host)} tokens and room for {room}: expected at most {MAX_TOKENS} in all")
        self._host, self._room = host, room
        self._vocab_size, self._ranking = host.vocab_size, host.ranking
        fields = self._ranking_fields() | self._text_fields(room) | self._draft_fields()
        values = np.array([fields[name] for name in FIELDS], np.int64)
        self._control = self._put(values)
        self._fault = self._pinned_zero()
        del self._host

    def _put(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array).to(self.device)

    def _pinned_zero(self) -> torch.Tensor:
        import torch

        return torch.zeros(1, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _text_fields(self, room: int) -> dict[str, int]:
        states, clone_lens, tokens, edges, counts = self._host.image(room)
        size, num_clones, num_edges, match_len, match_end, prefixes, clones, slots = counts.tolist()
        tokens = np.concatenate([tokens, np.zeros(room, np.int32)])  # as much text again where there is no room
        self._arrays = [self._put(array) for array in (states, clone_lens, tokens, edges)]
        at = [array.data_ptr() for array in self._arrays]
        return {
            "STATES": at[0] + 16 * clones,  # clones lie before, by negative numbers
            "CLONE_LENS": at[1] + 4 * clones,
            "TOKENS": at[2],
            "EDGES": at[3],
            "SIZE": size,
            "NUM_CLONES": num_clones,
            "NUM_EDGES": num_edges,
            "MATCH_LEN": match_len,
            "MATCH_END": match_end,
            "PREFIXES": prefixes,
            "CLONES": clones,
            "SLOTS": slots,
            "TEXT_LEN": size,
            "TEXT_ROOM": len(tokens),
            "SIZE_BEFORE": size,
            "FAULT": 0,
            "VOCAB_SIZE": self._vocab_size,
        }

    def _ranking_fields(self) -> dict[str, int]:
        lengths, shares, totals, ages, contexts, num_orders, priors, weight, decay = self._ranking.tables()
        trials, hits = self._host.learnt()
        seen = trials > 0
        hazards = np.where(seen, (weight * priors + hits) / (weight + trials), priors)
        self._bins = self._put(np.concatenate([lengths, totals, ages, contexts]))
        self._values = self._put(np.concatenate([priors, hazards, trials, hits, shares, [weight, decay]]))
        return {
            "BINS": self._bins.data_ptr(),
            "NUM_LENGTHS": len(lengths),
            "NUM_TOTALS": len(totals),
            "NUM_AGES": len(ages),
            "NUM_CONTEXTS": len(contexts),
            "NUM_SHARES": len(shares),
            "NUM_ORDERS": num_orders,
            "NUM_CELLS": len(priors),
            "HAZARDS": self._values.data_ptr(),
        }

    def _draft_fields(self) -> dict[str, int]:
        import torch

        n = self.max_budget
        self._work = torch.empty(2 * n * PENDING_BYTES, dtype=torch.uint8, device=self.device)
        self._nodes = torch.empty(5, n, dtype=torch.int32, device=self.device)
        self._probabilities = torch.empty(n, dtype=torch.float64, device=self.device)
        self._num_nodes = torch.zeros(1, dtype=torch.int32, device=self.device)
        arrays = {
            "WORK": self._work,
            "NODES": self._nodes,
            "PROBABILITIES": self._probabilities,
            "NUM_NODES": self._num_nodes,
        }
        return {name: array.data_ptr() for name, array in arrays.items()} | {"MAX_BUDGET": n}

    def extend(
        self,
        token_ids: torch.Tensor,
        count: torch.Tensor | None = None,
        learn: bool = False,
        successors: torch.Tensor | None = None,
    ) -> None:
        """Queue committed tokens [n] on the device, or the first `count` [1] of them; does not wait.

        A token id outside the vocabulary is found by the kernel; a later call raises its `GraftError`.
        """
        self.recover()
        ids = self._ids(token_ids, "token_ids")
        if count is not None and (count.numel() != 1 or count.device != self.device):
            raise GraftError(f"count has shape {tuple(count.shape)} on {count.device}: expected [1] on {self.device}")
        number = None if count is None else count.long()
        self._run((ids, number, ids.numel(), int(learn and self._ranking.learns)), None, 0, MIN_PROBABILITY, successors)
        self._fault.copy_(self._control[_AT["FAULT"] : _AT["FAULT"] + 1], non_blocking=True)

    def draft(
        self,
        budget: int,
        path: torch.Tensor | None = None,
        threshold: float = MIN_PROBABILITY,
        successors: torch.Tensor | None = None,
    ) -> DeviceNodes:
        """Queue a draft of at most `budget` nodes after the text and `path` [n]; does not wait.

        `successors`: int32 table [vocabulary, k] on the device. No nodes after a path that holds anything but token
        ids, nor while a fault is unknown to the host.
        """
        if not 0 < budget <= self.max_budget:
            raise GraftError(f"budget is {budget}: expected 1 to {self.max_budget}, the max_budget of the upload")
        if not 0 < threshold < 1:
            raise GraftError(f"threshold is {threshold}: expected between 0 and 1")
        self.recover()
        ids = None if path is None else self._ids(path, "path")
        self._run((None, None, 0, 0), ids, budget, threshold, successors)
        tokens, parents, match_lens, origins, cells = self._nodes[:, :budget]
        probabilities = self._probabilities[:budget]
        return DeviceNodes(self._num_nodes, tokens, parents, match_lens, origins, cells, probabilities)

    def _ids(self, ids: torch.Tensor, name: str) -> torch.Tensor:
        import torch

        if ids.device != self.device:
            raise GraftError(f"{name} lie on {ids.device}: expected {self.device}")
        if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise GraftError(f"{name} are {ids.dtype} of shape {tuple(ids.shape)}: expected one row of integers")
        if ids.dtype.itemsize > 4 or ids.dtype == torch.uint32:  # what int32 does not hold stays outside the vocabulary
            ids = ids.long().clamp(-2, NO_LIMIT)
        return ids.to(torch.int32).contiguous()

    def _run(
        self, given: tuple[Any, ...], path: Any, budget: int, threshold: float, successors: torch.Tensor | None
    ) -> None:
        """Launch; tensors stay valid because the allocator reuses their memory on this stream only, and later."""
        import torch

        tokens, count, n, learns = given
        shape = (0, 0)
        if successors is not None:
            fits = successors.dtype == torch.int32 and successors.ndim == 2 and successors.is_contiguous()
            if not fits or successors.device != self.device:
                found = f"{successors.dtype} {tuple(successors.shape)} on {successors.device}"
                raise GraftError(f"successors are {found}: expected contiguous int32 [V, k] on {self.device}")
            shape = (successors.shape[0], successors.shape[1])
        at = [0 if array is None else array.data_ptr() for array in (tokens, count, path, successors)]
        path_len = 0 if path is None else path.numel()
        self._launch(
            self._control.data_ptr(), at[0], at[1], n, learns, at[2], path_len, budget, threshold, at[3], *shape
        )

    def recover(self) -> bool:
        """Act on a fault whose copy has arrived: build anew with more room (True) or raise. Replays must ask before."""
        if found := bool(int(self._fault)):
            self.upload(self.to_host(), 2 * self._room)
        return found

    def to_host(self) -> SuffixAutomaton:
        """Return a host automaton with this text and learning; waits for the device. Raises on faults but lack of room.

        Tokens that came while there was no room are in the text but were not learnt from.
        """
        control = self._control.cpu()
        fault, length, room = (int(control[_AT[name]]) for name in ("FAULT", "TEXT_LEN", "TEXT_ROOM"))
        if fault == BAD_TOKEN:
            raise GraftError(
                f"the device was given a token id outside -1 to {self._vocab_size - 1} after {length} tokens"
            )
        if length > room:
            raise GraftError(f"{length - room} tokens came after the device's text was full: upload the index again")
        host = SuffixAutomaton(self._vocab_size, ranking=self._ranking, native=True)
        host.extend(self._arrays[2][:length].cpu().numpy())
        cells = len(self._ranking.priors)
        values = self._values.cpu().numpy()
        host.set_learnt(values[2 * cells : 3 * cells], values[3 * cells : 4 * cells])
        return host

    @property
    def memory_bytes(self) -> int:
        """Bytes held on the device."""
        arrays = [*self._arrays, self._bins, self._values, self._work, self._nodes, self._probabilities, self._control]
        return sum(array.numel() * array.element_size() for array in arrays)


def differs(launch: Launch, device: str | torch.device) -> str:
    """Return "" or where a device's automaton leaves the host's: 300 tokens with copies, then 60 learnt from."""
    import torch

    rng = np.random.default_rng(0)
    text = np.concatenate([rng.integers(0, 40, 150), np.tile(rng.integers(0, 40, 30), 5)]).astype(np.int32)
    host = SuffixAutomaton(64, native=True)
    host.extend(text)
    mirror = DeviceAutomaton(host, device, launch=launch)
    for start in range(0, 60, 3):
        new = text[start : start + 3]
        host.extend(new, learn=True)
        mirror.extend(torch.from_numpy(new).to(device), learn=True)
        ours, theirs = mirror.draft(40), host.draft(40)
        n = int(ours.num_nodes)
        columns = (ours.token_ids, ours.parents, ours.match_lens, ours.origins, ours.cells)
        expected = (theirs.token_ids, theirs.parents, theirs.match_lens, theirs.origins, theirs.cells)
        if n != len(theirs.token_ids) or any(
            not np.array_equal(column[:n].cpu().numpy(), known) for column, known in zip(columns, expected)
        ):
            return f"after {len(host)} tokens"
    learnt = zip(mirror.to_host().learnt(), host.learnt())
    return "" if all(np.array_equal(x, y) for x, y in learnt) else "in what it learnt"


@cache
def checked_launch(device: torch.device) -> Launch:
    """Return the kernel's launcher for a CUDA device once it has given the host's results there."""
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        raise GraftError(f"the index cannot run on {device}: this torch sees no such CUDA device")
    launch = cuda_launch(torch.cuda.current_device() if device.index is None else device.index)
    where = differs(launch, device)
    if where:
        raise GraftError(f"the index on {device} differs from the host's {where}: use the host's, and report this")
    return launch
