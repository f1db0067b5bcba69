"""Log-probabilities of tokens from hidden states, without the logits of all of them: M tokens, V in the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Rows and columns of the logits that exist at once: 64 MB in float32.
ROWS, COLUMNS = 1024, 16384


def logprobs_and_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` [M] under softmax(hidden head^T / temperature), and the entropy of that.

    `hidden` [M, H] sets the dtype of the products, `head` [V, H] may be in another. Both results are [M], float32 or,
    of float64 `hidden`, float64; only the log-probabilities have a gradient. A tile of logits exists at a time, and is
    computed again in the backward pass; the head's gradient is computed only where it requires one.
    """
    return _TiledLogprobs.apply(hidden, head, targets, temperature)


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        parts = [
            _statistics(rows, head, aims, temperature)
            for rows, aims in zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
        ]
        chosen, lse, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, head, targets, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return chosen - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, head, targets, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ROWS):
            part = slice(start, start + ROWS)
            grad_rows = torch.zeros_like(hidden[part], dtype=lse.dtype)
            for first, weight, logits in _tiles(hidden[part], head, ctx.temperature):
                grad_logits = _grad_logits(logits, first, targets[part], lse[part], grad[part] / ctx.temperature)
                grad_logits = grad_logits.to(hidden.dtype)
                grad_rows += grad_logits @ weight
                if grad_head is not None:
                    grad_head[first : first + len(weight)] += grad_logits.T @ hidden[part]
            grad_hidden[part] = grad_rows
        return grad_hidden, grad_head, None, None


def _tiles(hidden: Tensor, head: Tensor, temperature: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each run of the vocabulary its first token, its part of the head and its logits by the temperature."""
    for first in range(0, len(head), COLUMNS):
        weight = head[first : first + COLUMNS].to(hidden.dtype)
        logits = hidden @ weight.T
        yield first, weight, logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _statistics(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logit, log-sum-exp and entropy, [rows] each.

    The entropy is put together from those of the tiles, H = sum w (H_tile - log w) with w the tile's probability: as
    log-sum-exp less the mean of the logits it would be a small difference of large numbers.
    """
    tiles = []
    for first, _, logits in _tiles(hidden, head, temperature):
        here, places = _inside(targets, first, logits.shape[1])
        chosen = logits.gather(-1, places)[:, 0] * here
        lse = logits.logsumexp(-1)
        logprobs = logits.sub_(lse[:, None])
        tiles.append((chosen, lse, -logprobs.exp().mul_(logprobs).sum(-1)))
    chosen, lses, entropies = (torch.stack(column) for column in zip(*tiles, strict=True))
    lse = lses.logsumexp(0)
    logs = lses - lse
    return chosen.sum(0), lse, (logs.exp() * (entropies - logs)).sum(0)


def _inside(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which targets [rows] a tile holds, and their columns [rows, 1] in it (any, of those that it doesn't)."""
    places = targets - first
    return (places >= 0) & (places < count), places.clamp(0, count - 1)[:, None]


def _grad_logits(logits: Tensor, first: int, targets: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    """grad (1[target] - softmax), in the place of `logits` [rows, columns]."""
    here, places = _inside(targets, first, logits.shape[1])
    scaled = logits.sub_(lse[:, None]).exp_().mul_(-grad[:, None])
    return scaled.scatter_add_(-1, places, (grad * here)[:, None])
