"""The operations of a mixture of experts in plain PyTorch.

CPUs use them, and the kernels are tested against them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qerl.kernels.groups import Groups, block_size, most_blocks


def scores(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Scores [T, E] of the experts for x [T, H] in float32, by a router's weight [E, H] and bias [E] in float32."""
    return torch.nn.functional.linear(x.float(), weight, bias)


def route(scores: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Numbers int32 [T, k] and weights float32 [T, k] of the experts with the highest scores [T, E], in float32.

    The weights are probabilities of a softmax over all experts; `normalised` ones add up to 1.
    """
    weights, numbers = torch.softmax(scores, -1, dtype=torch.float32).topk(chosen)
    return numbers.int(), weights / weights.sum(-1, keepdim=True) if normalised else weights


def group(numbers: Tensor, experts: int) -> Groups:
    """The pairs of tokens and their experts `numbers` [T, k], in blocks. Doesn't wait for the device."""
    tokens, chosen = numbers.shape
    count, size = tokens * chosen, block_size(tokens, chosen, experts)
    blocks = most_blocks(tokens, chosen, experts, size)
    expert, order = numbers.flatten().long().sort(stable=True)
    every = torch.arange(experts + 1, device=numbers.device)
    edges = torch.searchsorted(expert, every)
    ends = ((edges.diff() + size - 1) // size).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    place = starts[expert] * size + torch.arange(count, device=numbers.device) - edges[expert]
    pairs = torch.full((blocks * size,), count, dtype=torch.int32, device=numbers.device)
    pairs.scatter_(0, place, order.int())
    block = torch.arange(blocks, device=numbers.device)
    owner = torch.searchsorted(ends, block, right=True).int()
    return Groups(pairs.view(blocks, size), owner.where(owner < experts, -1), count, chosen)


def combine(y: Tensor, weights: Tensor, out: Tensor, residual: bool) -> None:
    """Write, or with `residual` add, the sums of y [T k, H] by weights [T, k] to out [T, H], in float32."""
    total = (y.view(*weights.shape, -1).float() * weights[..., None]).sum(1)
    out.copy_(total + out.float() if residual else total)


def combine_gradients(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y, in its dtype, and of the weights, in float32, of that of the sums [T, H] in `combine`."""
    of_y = grad[:, None] * weights[..., None].to(y.dtype)
    of_weights = torch.bmm(y.view(*weights.shape, -1), grad[..., None])[..., 0]
    return of_y.view_as(y), of_weights.to(weights.dtype)


def product(x: Tensor, groups: Groups, weight: Callable[[int], Tensor], bias: Tensor | None, out: Tensor) -> None:
    """Write out [pairs, N] = W x + b of each pair's expert, of x [T, K] by tokens or [pairs, K].

    `weight` gives an expert's W [N, K]; `bias` is [experts, N].
    """
    for number, pairs in _of_experts(groups):
        y = x[_rows(x, pairs, groups)] @ weight(number).T
        out[pairs] = y if bias is None else y + bias[number].to(y.dtype)


def input_gradient(grad: Tensor, groups: Groups, weight: Callable[[int], Tensor], out: Tensor) -> None:
    """Write the gradient out [pairs, K] of each pair's input, of that of its output by tokens [T, N] or [pairs, N]."""
    for number, pairs in _of_experts(groups):
        out[pairs] = grad[_rows(grad, pairs, groups)] @ weight(number)


def dense_product(weights: Tensor, x: Tensor, groups: Groups, out: Tensor) -> None:
    """Write out [pairs, N] = W x of each pair's expert, of dense weights [experts, N, K]."""
    product(x, groups, weights.__getitem__, None, out)


def dense_input_gradient(weights: Tensor, grad: Tensor, groups: Groups, out: Tensor, add: bool = False) -> None:
    """Write, or with `add` add, the gradient out [pairs, K] of each pair's input with weights [experts, N, K]."""
    gradient = torch.empty_like(out) if add else out
    input_gradient(grad, groups, weights.__getitem__, gradient)
    if add:
        out += gradient


def dense_weight_gradient(grad: Tensor, x: Tensor, groups: Groups, experts: int) -> Tensor:
    """The gradient [experts, N, K] of experts' weights, by outputs' gradients [pairs, N] and inputs x as in `product`.

    It is float32, or float64 if x is.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(experts, grad.shape[1], x.shape[1], dtype=wide)
    for number, pairs in _of_experts(groups):
        out[number] = grad[pairs].T.to(wide) @ x[_rows(x, pairs, groups)].to(wide)
    return out


def _of_experts(groups: Groups) -> list[tuple[int, Tensor]]:
    """Each expert that has pairs, and these."""
    experts = []
    for number in groups.experts.unique().tolist():
        pairs = groups.pairs[groups.experts == number].flatten()
        if number >= 0:
            experts.append((number, pairs[pairs < groups.count].long()))
    return experts


def _rows(x: Tensor, pairs: Tensor, groups: Groups) -> Tensor:
    """The rows of x that pairs read: their own, or those of their tokens."""
    return pairs if len(x) == groups.count else pairs // groups.chosen
