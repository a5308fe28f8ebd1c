"""Where a block drafter's tokens come in and go out: embedding, output matrix, and its own vocabulary if it has one.

Knows token ids and matrices; no layers, no rounds. The one idea: z-lab's and transformers' drafters borrow both ends
from the target; speculators' may bring their own, with fewer output rows than the target has tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longgraft.config import GraftError
from longgraft.linear import output_rows


@dataclass(frozen=True, slots=True)
class Ends:
    """`embed(ids [n]) -> [n, H]`, `logits(hidden [n, H]) -> [n, V]`, `ids [V]`: the target's id of each output row.

    `ids` None: output row i is token i. `rows [target V]`: output row of each token, -1 where there is none (None:
    the same).
    """

    embedding: Any
    head: Any
    ids: Tensor | None = None
    rows: Tensor | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return embeddings `[n, H]`, without a norm the target's embedding may end with.

        DFlash drafters are trained on embeddings before that norm (transformers' DFlash generator takes it out too).
        """
        if hasattr(self.embedding, "embed_norm"):
            return nn.functional.embedding(token_ids, self.embedding.weight)
        out: Tensor = self.embedding(token_ids)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[n, V]` in the output matrix's dtype."""
        out: Tensor = self.head(hidden)
        return out

    @property
    def size(self) -> int:
        """Output rows: how many tokens the drafter can propose."""
        return output_rows(self.head)


class RawEmbedding(nn.Module):
    """A target's embedding matrix without whatever else its module does (speculators reads the matrix alone)."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.__dict__["source"] = source  # no submodule: the matrix stays the target's

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return rows of the matrix. [n, H]"""
        return nn.functional.embedding(token_ids, self.__dict__["source"].weight)


def target_ends(model: Any) -> Ends:
    """Return both ends borrowed from the target `model`."""
    return Ends(model.get_input_embeddings(), model.get_output_embeddings())


def vocabulary(
    d2t: Tensor | None, t2d: Tensor | None, rows: int, target_rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return `ids [rows]` and `rows [target_rows]` of `Ends` from a checkpoint's maps; Nones if all tokens are known.

    `d2t [rows]` holds OFFSETS: output row i is token i + d2t[i]. `t2d [target_rows]` says of each token whether it is
    known.
    """
    if rows == target_rows:
        return None, None
    if d2t is None:
        raise GraftError(f"the drafter knows {rows} of {target_rows} tokens but its checkpoint has no map d2t")
    if d2t.shape != (rows,) or d2t.is_floating_point():
        raise GraftError(
            f"d2t of the drafter has shape {tuple(d2t.shape)} ({d2t.dtype}): expected {rows} whole numbers"
        )
    ids = torch.arange(rows) + d2t.cpu().long()
    if int(ids.min()) < 0 or int(ids.max()) >= target_rows or len(ids.unique()) != rows:
        raise GraftError(
            f"d2t of the drafter does not map its {rows} tokens to as many of the target's {target_rows}: "
            "expected offsets (target id minus draft id) made for this target"
        )
    back = torch.full((target_rows,), -1, dtype=torch.long)
    back[ids] = torch.arange(rows)
    if t2d is not None and (t2d.shape != back.shape or not bool((t2d.cpu().bool() == (back >= 0)).all())):
        raise GraftError(
            "t2d and d2t of the drafter contradict each other: expected maps of one vocabulary, this target's"
        )
    return ids, back
