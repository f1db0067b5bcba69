"""The rows of a step that verifies drafts: which tokens of the guesses get one, and how many would be right."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels.draft_state import Guesses


def ranked(guesses: Guesses) -> tuple[Tensor, Tensor]:
    """The places [B * MOST_DRAFTED] of all guessed tokens by their chance of being right, the likeliest first, and the
    chances in this order, 0 where a draft has no token.
    """
    ordered = guesses.chances.flatten().sort(descending=True, stable=True)
    return ordered.indices, ordered.values


def allotted(guesses: Guesses, order: Tensor, chances: Tensor, rows: int) -> Tensor:
    """For each slot the number of its last row, plus 1 [B] int64: each sequence gets one of the `rows`, and the
    likeliest tokens get the others. `order` and `chances` come from `ranked`; there are at most `rows` sequences.
    """
    free = rows - guesses.live.sum()
    taken = torch.zeros_like(chances, dtype=torch.bool)
    # A token is never likelier than the one before it, and of equals the one before comes first.
    taken[order] = (torch.arange(len(order), device=order.device) < free) & (chances > 0)
    return (guesses.live + taken.view(len(guesses.live), -1).sum(1)).cumsum(0)


def expected(guesses: Guesses, chances: Tensor, sizes: Tensor) -> Tensor:
    """How many guessed tokens would be right in a step of each size [sizes] float32. `chances` come from `ranked`."""
    last = sizes - 1 - guesses.live.sum()
    return chances.cumsum(0)[last.clamp(0, len(chances) - 1)] * (last >= 0)
