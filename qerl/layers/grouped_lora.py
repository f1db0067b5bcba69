"""LoRA of all experts of a mixture as grouped products, with its gradients, and its copies for the engine.

The base is read as in `qerl.layers.grouped_linear`, never unpacked. A x of a pair is computed by a grouped product of
few rows, and B (A x) is added in the base's product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.groups import GroupedLora, Groups
from qerl.layers.grouped_linear import DenseProducts, GroupedLinear, grouped_product


@dataclass(frozen=True)
class ExpertFactors:
    """A [experts, r, K] and B [experts, N, r] of layers of every expert that read the same input, in order."""

    downs: Sequence[Tensor]
    ups: Sequence[Tensor]
    scale: float

    def empty(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeros for all A, [experts, R, K], and for block-diagonal B, [experts, N, R]; R is the sum of the ranks."""
        rank, rows = (sum(part.shape[1] for part in parts) for parts in (self.downs, self.ups))
        (experts, _, columns), device = self.downs[0].shape, self.downs[0].device
        down = torch.zeros(experts, rank, columns, dtype=dtype, device=device)
        return down, torch.zeros(experts, rows, rank, dtype=dtype, device=device)

    def parts(self, down: Tensor, up: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The parts of each layer in tensors of the shapes of `empty`."""
        ranks, rows = ([part.shape[1] for part in parts] for parts in (self.downs, self.ups))
        diagonal = zip(up.split(rows, 1), ranks, strict=True)
        firsts = [sum(ranks[:number]) for number in range(len(ranks))]
        ups = [part[..., first : first + rank] for (part, rank), first in zip(diagonal, firsts, strict=True)]
        return list(zip(down.split(ranks, 1), ups, strict=True))

    @torch.no_grad()
    def write(self, down: Tensor, up: Tensor) -> None:
        """Copy A and the scale times B into tensors of `empty`, whose zeros stay."""
        for (to_down, to_up), a, b in zip(self.parts(down, up), self.downs, self.ups, strict=True):
            to_down.copy_(a)
            to_up.copy_(b * self.scale)

    def stacked(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All A and block-diagonal B with the scale, in `dtype`."""
        down, up = self.empty(dtype)
        self.write(down, up)
        return down, up


class GroupedAdapters:
    """Adapters of a grouped product in the dtype of its activations, at addresses that never change."""

    def __init__(self, factors: ExpertFactors, dense: DenseProducts, dtype: torch.dtype) -> None:
        self._factors, self._dense = factors, dense
        self._down, self._up = factors.empty(dtype)
        self.sync()

    def sync(self) -> None:
        """Copy the present adapters."""
        self._factors.write(self._down, self._up)

    def __call__(self, x: Tensor, groups: Groups) -> GroupedLora:
        """What the adapters add to the product of x [T, K] or [pairs, K]."""
        shrunk = x.new_empty(groups.count, self._down.shape[1])
        self._dense.dense_product(self._down, x, groups, shrunk)
        return GroupedLora(shrunk, self._up)


class _AdaptedProduct(torch.autograd.Function):
    """Outputs [pairs, N] of x [T, K] or [pairs, K], with the gradients of x, A and B. It saves x and A x.

    A and s B are cast to the dtype of x in each direction. Their gradients are sums in float32. `adapters` has all A,
    then all B.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, linear: GroupedLinear, scale: float, *adapters: Tensor) -> Tensor:
        down, up = _factors(adapters, scale).stacked(x.dtype)
        shrunk = x.new_empty(groups.count, down.shape[1])
        linear.dense.dense_product(down, x, groups, shrunk)
        out = x.new_empty(groups.count, linear.out_features)
        linear(x, groups, out, lora=GroupedLora(shrunk, up))
        ctx.save_for_backward(x, shrunk, *adapters)
        ctx.groups, ctx.linear, ctx.scale = groups, linear, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, shrunk, *adapters = ctx.saved_tensors
        groups, dense, grad = ctx.groups, ctx.linear.dense, grad.contiguous()
        factors = _factors(adapters, ctx.scale)
        down, up = factors.stacked(x.dtype)
        of_shrunk = torch.empty_like(shrunk)
        dense.dense_input_gradient(up, grad, groups, of_shrunk)
        of_down = dense.dense_weight_gradient(of_shrunk, x, groups, len(down))
        of_up = dense.dense_weight_gradient(grad, shrunk, groups, len(down)).mul_(ctx.scale)
        parts = factors.parts(of_down, of_up)
        of_adapters = [part.to(adapters[0].dtype) for side in zip(*parts, strict=True) for part in side]
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, *of_adapters
        of_x = x.new_empty(groups.count, x.shape[1])
        ctx.linear.input_gradient(grad, groups, of_x)
        dense.dense_input_gradient(down, of_shrunk, groups, of_x, add=True)
        if len(x) != groups.count:
            of_x = of_x.view(len(x), groups.chosen, -1).sum(1)
        return of_x, None, None, None, *of_adapters


def _factors(adapters: Sequence[Tensor], scale: float) -> ExpertFactors:
    half = len(adapters) // 2
    return ExpertFactors(adapters[:half], adapters[half:], scale)


def adapted_product(x: Tensor, groups: Groups, linear: GroupedLinear, factors: ExpertFactors | None) -> Tensor:
    """Outputs [pairs, N] of each pair's expert for x [T, K] by tokens or [pairs, K], with gradients of x, A and B."""
    if factors is None:
        return grouped_product(x, groups, linear)
    return _AdaptedProduct.apply(x.contiguous(), groups, linear, factors.scale, *factors.downs, *factors.ups)
