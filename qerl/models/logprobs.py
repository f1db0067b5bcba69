"""Log-probabilities of tokens from hidden states, for M tokens and V words of the vocabulary.

Logits are computed tile by tile, unless all are to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels import operations, reference

#: Rows and columns of a tile of logits. One tile exists at a time, of 64 MB in 16 bits.
ROWS, COLUMNS = 2048, 16384


@dataclass(frozen=True)
class SoftCap:
    """Logits y = limit tanh(scale p) of the head's products p, such as Gemma 2's with limit 30 and scale 1/30."""

    limit: float
    scale: float

    def apply_(self, products: Tensor) -> Tensor:
        """The logits, in place of the products."""
        return products.mul_(self.scale).tanh_().mul_(self.limit)

    def slope(self, logits: Tensor) -> Tensor:
        """dy/dp, of the same shape and dtype as the logits."""
        return (1 - (logits / self.limit).square()).mul_(self.limit * self.scale)


def logprobs_and_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    keep: bool = False,
    *,
    bias: Tensor | None = None,
    cap: SoftCap | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` [M] under softmax(logits / temperature), and the distributions' entropy.

    The logits are hidden head^T + bias, with `cap` after it. `hidden` [M, H] sets the dtype of the products; `head`
    [V, H] and `bias` [V] may have another. Both results are [M], float32, or float64 for float64 `hidden`. One tile of
    logits exists at a time, and the backward pass recomputes it. Gradients of the head and the bias are computed only
    if they require one, and the entropy's share only if the loss reads the entropy.

    With `keep` on a GPU, all logits [M, V] are kept for the backward pass in the dtype of `hidden`, and nothing is
    recomputed. The results are the same up to rounding.
    """
    return _Logprobs.apply(hidden, head, bias, targets, temperature, cap, keep and _has_kernels(hidden))


class _Logprobs(torch.autograd.Function):
    """See `logprobs_and_entropy`; bias and head may have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        cap: SoftCap | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        kernels = _operations(hidden)
        # Not a saved tensor, because the only backward pass overwrites it.
        ctx.logits = _logits(hidden, head.to(hidden.dtype), bias, cap) if keep else None
        if keep:
            chosen, lse, entropy = kernels.tile_statistics([(0, ctx.logits)], targets, temperature)
        else:
            space, parts = _space(hidden, head), []
            for rows, aims in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
                tiles = ((first, logits) for first, _, logits in _tiles(rows, head, bias, cap, space))
                parts.append(kernels.tile_statistics(tiles, aims, temperature))
            chosen, lse, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, head, bias, targets, lse, entropy)
        ctx.temperature, ctx.cap = temperature, cap
        ctx.set_materialize_grads(False)  # no gradient of the entropy unless a loss reads it
        return chosen - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, bias, targets, lse, entropy = ctx.saved_tensors
        grad = torch.zeros_like(lse) if grad is None else grad
        needs_head, needs_bias = ctx.needs_input_grad[1:3]

        def gradient(logits: Tensor, first: int, rows: slice) -> Tensor:
            """The gradient of the head's products in some rows; it may take the place of `logits`."""
            slope = None if ctx.cap is None else ctx.cap.slope(logits)
            of_entropy = None if grad_entropy is None else grad_entropy[rows]
            given = targets[rows], lse[rows], grad[rows], ctx.temperature, entropy[rows], of_entropy
            found: Tensor = _operations(logits).tile_gradient(logits, first, *given)
            return found if slope is None else found.mul_(slope)

        if ctx.logits is not None:
            logits, ctx.logits = ctx.logits, None
            grad_logits = gradient(logits, 0, slice(None))
            grad_head = (grad_logits.T @ hidden).to(head.dtype) if needs_head else None
            grad_bias = grad_logits.sum(0).to(head.dtype) if needs_bias else None
            return grad_logits @ head.to(hidden.dtype), grad_head, grad_bias, *[None] * 4
        space = _space(hidden, head)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if needs_head else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        for start in range(0, len(hidden), ROWS):
            part = slice(start, start + ROWS)
            grad_rows = torch.zeros_like(hidden[part], dtype=lse.dtype)
            for first, weight, logits in _tiles(hidden[part], head, bias, ctx.cap, space):
                grad_logits = gradient(logits, first, part)
                _add_product(grad_rows, grad_logits, weight)
                if grad_head is not None:
                    _add_product(grad_head[first : first + len(weight)], grad_logits.T, hidden[part])
                if grad_bias is not None:
                    grad_bias[first : first + len(weight)] += grad_logits.sum(0)
            grad_hidden[part] = grad_rows
        return grad_hidden, grad_head, grad_bias, *[None] * 4


def _has_kernels(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _operations(hidden: Tensor) -> ModuleType:
    """Triton's operations on a GPU, or PyTorch's on other devices and for float64."""
    return operations(hidden.device) if _has_kernels(hidden) else reference


def _space(hidden: Tensor, head: Tensor) -> Tensor:
    """Memory for the largest tile, which all tiles share; allocating each tile would need memory for two."""
    return hidden.new_empty(min(ROWS, len(hidden)) * min(COLUMNS, len(head)))


def _tiles(
    hidden: Tensor, head: Tensor, bias: Tensor | None, cap: SoftCap | None, space: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each range of the vocabulary: its first token, its part of the head, and its logits, stored in `space`."""
    for first in range(0, len(head), COLUMNS):
        weight = head[first : first + COLUMNS].to(hidden.dtype)
        logits = space[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        part = None if bias is None else bias[first : first + COLUMNS]
        yield first, weight, _logits(hidden, weight, part, cap, logits)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cap: SoftCap | None, out: Tensor | None = None
) -> Tensor:
    """The logits [M, V] by a part of the head in the dtype of `hidden`."""
    if bias is None:
        products = torch.mm(hidden, weight.T, out=out)
    else:
        products = torch.addmm(bias.to(hidden.dtype), hidden, weight.T, out=out)
    return products if cap is None else cap.apply_(products)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left right; on a GPU cuBLAS adds, in float32 for 16-bit factors if `total` is float32."""
    if total.is_cuda and total.dtype in (left.dtype, torch.promote_types(left.dtype, torch.float32)):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
