"""A token tree as tensors of a fixed number of rows, and which of its nodes the target's draws agree with.

Knows no model, no cache and no index beyond the columns of a draft. The one idea: everything `TokenTree` and `accept`
work out by walking is a product of small matrices: ancestors by squaring the parents' relation, the agreeing path as
those nodes all of whose ancestors agree. Rows that hold no node agree with nothing and are seen by nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Columns(Protocol):
    """What is read of a draft; `longgraft.index.device.DeviceNodes` is the real one. All [most] but `num_nodes` [1].

    `parents`: -1 = hangs from the root, else an earlier entry. Entries from `num_nodes` on may hold anything.
    """

    @property
    def num_nodes(self) -> Tensor:
        """How many entries count."""

    @property
    def token_ids(self) -> Tensor:
        """Proposed tokens."""

    @property
    def parents(self) -> Tensor:
        """Where each hangs."""


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """Nodes to verify, node 0 the root: `token_ids`, `parents` (-1: none), `is_node`, `depths` [N], `mask` [N, N].

    `mask[i, j]`: node j lies on the path from the root to node i, itself included. A row without a node holds token 0
    and hangs from the root.
    """

    token_ids: Tensor
    parents: Tensor
    is_node: Tensor
    depths: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, root: Tensor, drafted: Columns | None, rows: int, vocab_size: int) -> DeviceTree:
        """Lay out the token `root [1]` and the first `rows` - 1 drafted nodes (likeliest first: they are a tree).

        What no tree may hold, a token twice under one parent or none of the vocabulary, or a parent that comes later,
        is no node, so that no draft can change what is accepted.
        """
        number = torch.arange(rows, device=root.device)
        if drafted is None or rows == 1:
            token_ids, parents = root.long().expand(rows), torch.where(number == 0, -1, 0)
            is_node = number == 0
        else:
            token_ids = torch.cat([root.long(), _first(drafted.token_ids, rows - 1)])
            parents = torch.cat([torch.full_like(number[:1], -1), _first(drafted.parents, rows - 1) + 1])
            is_node = (number <= drafted.num_nodes) & (token_ids >= 0) & (token_ids < vocab_size) & (parents < number)
            is_node &= (number == 0) | (parents >= 0)
            same = (parents[:, None] == parents) & (token_ids[:, None] == token_ids) & is_node
            is_node = is_node & ~(same & (number < number[:, None])).any(dim=1)
        token_ids, parents = torch.where(is_node, token_ids, 0), torch.where(is_node, parents, 0)
        mask = ancestors(parents)
        return cls(token_ids, parents, is_node, mask.sum(dim=1) - 1, mask)

    def agreed(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the agreeing path [N], of which the first `count` [1] nodes count, for what was drawn at each node.

        Entry i of the path is its node of depth i; the tokens it commits are `drawn[path]`, the last one the bonus.
        """
        number = torch.arange(len(self), device=drawn.device)
        agrees = self.is_node & (self.token_ids == drawn[self.parents.clamp_min(0)])
        agrees |= number == 0
        on_path = (agrees | ~self.mask).all(dim=1) & self.is_node
        path = torch.zeros(len(self) + 1, dtype=torch.int64, device=drawn.device)
        path.scatter_(0, torch.where(on_path, self.depths, len(self)), number)  # others: into a place behind the end
        return path[:-1], on_path.sum(dim=0, keepdim=True)


def _first(column: Tensor, count: int) -> Tensor:
    """Return the first `count` entries, filled up with -1 where there are fewer."""
    taken = column[:count].long()
    return torch.cat([taken, torch.full((count - len(taken),), -1, dtype=torch.int64, device=taken.device)])


def ancestors(parents: Tensor) -> Tensor:
    """Return `mask[i, j]` = node j is an ancestor of node i or itself, of `parents [N]` (-1: none). [N, N] bool"""
    number = torch.arange(len(parents), device=parents.device)
    mask = (parents[:, None] == number) | (number[:, None] == number)
    for _ in range(max(0, len(parents) - 1).bit_length()):  # paths of up to 1, 2, 4, ... edges
        reach = mask.float()  # products of integers are not to be had on CUDA; these are 0 and 1, summed below 2**24
        mask = reach @ reach > 0.5
    return mask


def clipped(new: Tensor, count: Tensor, ends: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of the first `count` [1] of `new [N]` may be committed [1], and whether that ends the text [1].

    `ends [E]`: EOS tokens, of which the first is kept; `remaining [1]`: tokens that may still come.
    """
    number = torch.arange(len(new), device=new.device)
    is_end = (new[:, None] == ends).any(dim=1)
    first_end = torch.where(is_end, number, len(new)).amin(dim=0, keepdim=True)
    kept = torch.minimum(torch.minimum(count, first_end + 1), remaining)
    return kept, (first_end < kept) | (kept >= remaining)
