"""Log-probabilities of a prompt's own tokens, gathered while the prompt is read.

Knows logits and token ids; no model, no cache and no order of requests. The one idea: **a row is reduced where it is
made**. Of the logits of one forward only a few numbers a row are kept, and rows are reduced a few at a time, so that
a long prompt never needs rows x vocabulary. What was reduced stays: a prompt that is read twice is scored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longgraft.config import GraftError, TokenLogprob

# Rows reduced at a time: their copies in fp32 are 64 x 152K x 4 bytes = 39 MB for the largest vocabularies.
ROWS = 64
_WIDE = (torch.float32, torch.float64)


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """One entry a prompt token: its `TokenLogprob`, or None for the first token and those that were not asked for.

    Held as arrays (12 bytes an alternative), since 128K prompt tokens with 20 alternatives each would be 300 MB of
    objects. Equal to another one if all entries are equal.
    """

    def __init__(self, prompt_len: int, num_top: int) -> None:
        self.token_ids = np.full(prompt_len, -1, np.int32)
        self.logprobs = np.full(prompt_len, np.nan)
        self.ranks = np.zeros(prompt_len, np.int32)
        self.top_ids = np.full((prompt_len, num_top), -1, np.int32)
        self.top_logprobs = np.full((prompt_len, num_top), np.nan)

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob | None]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not self.ranks[index]:
            return None
        top = tuple(zip(self.top_ids[index].tolist(), self.top_logprobs[index].tolist()))
        return TokenLogprob(int(self.token_ids[index]), float(self.logprobs[index]), top, int(self.ranks[index]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        return all(np.array_equal(mine, vars(other)[name], equal_nan=True) for name, mine in vars(self).items())

    def __hash__(self) -> int:
        return hash(self.logprobs.tobytes())


class PromptScores:
    """The scores of one prompt on their way; row p of a prompt says what follows token p.

    `next_row`: the first row whose logits are still wanted; rows before it need none. `first`: the first token that is
    scored, 1 at least, as nothing says anything about token 0.
    """

    def __init__(self, prompt_len: int, num_top: int, vocab_size: int, first: int = 0) -> None:
        self.logprobs = PromptLogprobs(prompt_len, min(num_top, vocab_size))
        self.next_row = max(first, 1) - 1
        self.end_row = prompt_len - 1

    @property
    def is_complete(self) -> bool:
        """True once every token that was asked for has its score."""
        return self.next_row >= self.end_row

    def wants(self, begin: int, end: int) -> bool:
        """Say whether the logits of one of the rows `begin` .. `end` - 1 are wanted."""
        return begin < self.end_row and end > self.next_row and not self.is_complete

    def take(self, begin: int, logits: Tensor, token_ids: Sequence[int]) -> None:
        """Reduce `logits [n, V]` of the rows `begin` .. of the text `token_ids`; raises `GraftError` for NaN.

        Rows come in the order of the text; those that were taken before are left alone.
        """
        end = min(begin + len(logits), self.end_row)
        if begin > self.next_row:
            raise ValueError(f"rows from {begin} on: row {self.next_row} is still missing")
        for row in range(self.next_row, end, ROWS):
            last = min(row + ROWS, end)
            self._reduce(row, logits[row - begin : last - begin], token_ids[row + 1 : last + 1])
        self.next_row = max(self.next_row, end)

    def _reduce(self, row: int, logits: Tensor, token_ids: Sequence[int]) -> None:
        held = self.logprobs
        at = slice(row + 1, row + 1 + len(token_ids))
        logits = logits.detach() if logits.dtype in _WIDE else logits.detach().float()
        tokens = torch.as_tensor(np.asarray(token_ids, np.int64), device=logits.device)[:, None]
        scores = torch.log_softmax(logits, dim=-1)
        own = logits.gather(1, tokens)
        if bool(torch.isnan(scores.gather(1, tokens)).any()):
            raise GraftError("the logits of the prompt contain NaN or only infinities: check the model and its dtype")
        columns = torch.arange(logits.shape[1], device=logits.device)
        before = (logits > own).sum(-1) + ((logits == own) & (columns < tokens)).sum(-1)
        held.token_ids[at] = tokens[:, 0].cpu().numpy()
        held.logprobs[at] = scores.gather(1, tokens)[:, 0].double().cpu().numpy()
        held.ranks[at] = 1 + before.cpu().numpy()
        if num_top := held.top_ids.shape[1]:
            top = likeliest(logits, num_top)
            held.top_ids[at] = top
            found = scores.gather(1, torch.as_tensor(top.astype(np.int64), device=logits.device))
            held.top_logprobs[at] = found.double().cpu().numpy()


def prompt_scores(prompt_len: int, num_top: int | None, vocab_size: int, first: int = 0) -> PromptScores | None:
    """Return what gathers the scores of a prompt, None if nobody asks for any (`num_top` None)."""
    return None if num_top is None else PromptScores(prompt_len, num_top, vocab_size, first)


def likeliest(rows: Tensor, count: int) -> npt.NDArray[np.int32]:
    """Return the columns of the `count` largest entries of each row, largest first, of equal ones the lower first."""
    edge = rows.topk(count, dim=-1).values[:, -1:]
    found = (rows >= edge).nonzero()  # by row, then by column
    values = rows[found[:, 0], found[:, 1]].cpu().numpy()
    row, column = found.cpu().numpy().T
    order = np.lexsort((column, -values, row))
    starts = np.searchsorted(row, np.arange(len(rows)))
    kept: npt.NDArray[np.int32] = column[order][starts[:, None] + np.arange(count)].astype(np.int32)
    return kept
