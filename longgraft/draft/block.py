"""Block drafting: one pass says what may stand at each of the next positions (DFlash behind the `Drafter` seam).

Knows the seam, features of committed tokens and a network with `open` and `run`; not where its weights came from, and
not what becomes of a proposal. The one idea: a block's marginals do not depend on the path to a node, so after one
pass every node of one depth has the same children, and the block can be read as a chain or as a tree (DDTree, arXiv
2604.12989) at no further cost.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longgraft.config import GraftError
from longgraft.cost import CostTable
from longgraft.draft.block_config import BlockConfig
from longgraft.draft.block_cost import PassCost
from longgraft.draft.block_draft import BlockDraft
from longgraft.draft.block_ends import Ends
from longgraft.draft.block_weights import load_block
from longgraft.draft.block_window import FeatureWindow
from longgraft.linear import wide
from longgraft.sequence import Sequence
from longgraft.tree import Acceptance, Verification

# Committed rows the drafter looks back on: at least so many where the text has them, at most twice as many.
WINDOW = 2048
# Passes timed for one entry of the cost table; the first ones warm up.
TIMINGS = 3


class BlockNet(Protocol):
    """What drafts: `BlockModel`, or one of transformers' own classes; `max_positions` it was trained on."""

    max_positions: int

    def open(self) -> Any:
        """Return an empty context."""

    def run(self, context: Any, block: Tensor, features: Tensor) -> Tensor:
        """Take in features `[n, F]`, return the hidden states of `block [B, H]`."""


class BlockState:
    """One sequence's features and the network's context made of them."""

    def __init__(self, window: int, capacity: int) -> None:
        self.rows = FeatureWindow(window, capacity)
        self.context: Any = None


class BlockDrafter:
    """A DFlash drafter: `feature_layers` feed its context, one pass a round drafts the whole block."""

    def __init__(
        self,
        target_model: Any,
        config: BlockConfig,
        net: BlockNet,
        ends: Ends,
        *,
        window: int = WINDOW,
        cost: CostTable | None = None,
    ) -> None:
        """`target_model`: a transformers model; `net`, `ends` as `block_weights.load_block` returns them.

        `cost`: seconds of a pass by rows (block and new context rows) and context rows; None = measured when first
        asked.
        """
        if window < 1:
            raise GraftError(f"window of the block drafter is {window}: expected 1 row or more")
        capacity = min(2 * window, net.max_positions - config.block_size)
        if capacity < 2:
            raise GraftError(
                f"the block drafter knows {net.max_positions} positions: too few for a block of {config.block_size}"
            )
        self.config, self.net, self.ends = config, net, ends
        self.feature_layers = config.layer_ids
        self.feature_window = min(window, capacity // 2)
        self.capacity = capacity
        self.cost = PassCost(config.block_size, self.feature_window, self._timed, cost)
        self.device, self.dtype = target_model.device, target_model.dtype
        self.hidden = int(target_model.get_input_embeddings().weight.shape[1])
        self._last_norm = last_norm(target_model) if self._reads_last(target_model) else None
        self._linear = wide(nn.ModuleList([part for part in (net, ends.head) if isinstance(part, nn.Module)]))

    @property
    def cost_table(self) -> CostTable:
        """What passes cost, by rows."""
        return self.cost.measured()

    def session(self) -> AbstractContextManager[Any]:
        """Hold our kernels for the drafter's linear layers."""
        return self._linear

    def prefill(self, sequence: Sequence, first: int, features: Tensor) -> None:
        """Keep features `[n, F]` of prompt rows at positions first..; nothing is computed."""
        self._state(sequence).rows.append(first, features)

    def begin(self, sequence: Sequence) -> BlockDraft | None:
        """Return this round's draft; None where the features do not reach the root."""
        state = sequence.draft_state
        if not isinstance(state, BlockState) or not state.rows.kept or state.rows.end != len(sequence.token_ids) - 1:
            return None
        root_token = sequence.root_token
        return BlockDraft(
            lambda: self.run(state, root_token),
            lambda caught_up: self._expected(state, caught_up),
            self.ends,
            self.config.drafts,
        )

    def _expected(self, state: BlockState, caught_up: bool) -> float:
        """Return the seconds of the next pass; `caught_up`: as if all but the newest row had been taken in."""
        new, held = state.rows.next_rows, state.rows.held
        return self.cost.seconds(1, held + new - 1) if caught_up and new else self.cost.seconds(new, held)

    def extend(self, sequence: Sequence, token_ids: list[int], result: Verification, accepted: Acceptance) -> None:
        """Keep the features of committed rows; a round without features leaves a gap, behind which all starts over."""
        path = accepted.path[: len(token_ids)]
        if result.features is None or not path:
            return
        first = len(sequence.token_ids) - 1 - len(path)
        self._state(sequence).rows.append(first, result.features[path])

    def reset(self, sequence: Sequence) -> None:
        """Forget this sequence."""
        sequence.draft_state = None

    def _state(self, sequence: Sequence) -> BlockState:
        if not isinstance(sequence.draft_state, BlockState):
            sequence.draft_state = BlockState(self.feature_window, self.capacity)
        state: BlockState = sequence.draft_state
        return state

    @torch.no_grad()
    def run(self, state: BlockState, root_token: int) -> Tensor:
        """Draft one block behind the rows known so far: log-probabilities `[drafts, V]`, float32 or finer."""
        new, held = state.rows.next_rows, state.rows.held
        begin = time.perf_counter()
        rows, restart = state.rows.take()
        if restart:
            state.context = self.net.open()
        try:
            logits = self._pass(state.context, root_token, rows)
        except BaseException:
            state.rows.taken = None  # interrupted: what the context holds is not known, so the next pass starts over
            raise
        self._wait()
        self.cost.learn(new, held, time.perf_counter() - begin)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def _pass(self, context: Any, root_token: int, features: Tensor) -> Tensor:
        ids = torch.full((self.config.block_size,), self.config.mask_token_id, dtype=torch.long, device=self.device)
        ids[0] = root_token
        features = self._finished(features.to(self.device, self.dtype))
        hidden = self.net.run(context, self.ends.embed(ids), features)
        logits = self.ends.logits(hidden[self.config.first :])
        if not bool(torch.isfinite(logits).all()):
            raise GraftError(
                f"the block drafter's scores are not finite in {self.dtype}: load the target in another dtype"
            )
        return logits

    def _reads_last(self, model: Any) -> bool:
        return int(model.config.get_text_config().num_hidden_layers) - 1 in self.feature_layers

    def _finished(self, features: Tensor) -> Tensor:
        """Norm what comes from the target's last layer: in transformers' `hidden_states` the last entry is normed."""
        if self._last_norm is None:
            return features
        last = max(self.feature_layers)
        parts = zip(self.feature_layers, features.split(self.hidden, dim=-1))
        return torch.cat([self._last_norm(part) if layer == last else part for layer, part in parts], dim=-1)

    @torch.no_grad()
    def _timed(self, held: int, new: int) -> float:
        """Return the seconds of a pass on made-up features, `new` rows behind about `held` ones: the best of a few."""
        context, size = self.net.open(), self.hidden * len(self.feature_layers)
        features = torch.zeros(max(held, new), size, dtype=self.dtype, device=self.device)
        with self.session():
            if held:
                self._pass(context, 0, features[:held])
            return min(self._seconds(context, features[:new]) for _ in range(TIMINGS))

    def _seconds(self, context: Any, features: Tensor) -> float:
        self._wait()
        begin = time.perf_counter()
        self._pass(context, 0, features)
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def last_norm(model: Any) -> Any:
    """Return the norm behind a target's last layer."""
    norm = getattr(model.get_decoder(), "norm", None)
    if not isinstance(norm, nn.Module):
        raise GraftError(
            f"the block drafter reads the state behind the last layer's norm, and {type(model).__name__} "
            "has none by the name of `norm`: this pair is not supported"
        )
    return norm


def load_block_drafter(folder: str | Path, target_model: Any, cost: CostTable | None = None) -> BlockDrafter:
    """Return the drafter in a local folder (config.json and safetensors) for a loaded target model.

    Raises a `GraftError` naming whatever is missing, unknown or made for another target.
    """
    return BlockDrafter(target_model, *load_block(folder, target_model), cost=cost)
