"""Joint passes: policies of several runs on one base compute one row of tokens, in which each run has a segment.

The modules of the first policy compute. Base products read all rows at once; adapters, trained norms and noise are
those of a segment's run. No number of a run enters another run's sums, so that NaN in one reaches no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.models.blocks import NoisyRMSNorm
from qerl.models.linear import Cohort, weight_of
from qerl.models.lora import LeanLoraLinear, read_lora
from qerl.models.policy import Policy


@dataclass(frozen=True)
class Segments:
    """The runs whose segments follow one another in a row, and their numbers of tokens."""

    runs: list[int]
    lengths: list[int]
    device: torch.device

    @cached_property
    def index(self) -> Tensor:
        """The runs, as an index."""
        return torch.tensor(self.runs, device=self.device)

    @cached_property
    def are_equal(self) -> bool:
        """Whether all have one length, so that products of all segments are one operation."""
        return len(set(self.lengths)) == 1

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Each segment of x [M, K] by its run's weight of [runs, K, N]: [M, N]."""
        if self.are_equal:
            return (x.unflatten(0, (len(self.runs), -1)) @ weights).flatten(0, 1)
        out = x.new_empty(len(x), weights.shape[-1])
        for rows, weight, part in zip(x.split(self.lengths), weights, out.split(self.lengths), strict=True):
            torch.mm(rows, weight, out=part)
        return out

    def products_of_columns(self, a: Tensor, b: Tensor) -> Tensor:
        """a^T b of each segment of a [M, K] and b [M, N]: [runs, K, N]."""
        if self.are_equal:
            a, b = (x.unflatten(0, (len(self.runs), -1)) for x in (a, b))
            return a.mT @ b
        return torch.stack([x.T @ y for x, y in zip(a.split(self.lengths), b.split(self.lengths), strict=True)])


class _Stack:
    """A tensor of each run, one behind the other: [runs, ...] in the dtype of passes, and its gradient."""

    def __init__(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, scales: Sequence[float]) -> None:
        """A run's values are its tensor times its one of `scales`. They are zero until they are copied."""
        self.values = torch.zeros(shape, dtype=dtype, device=like.device)
        self.grad = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._scales = torch.tensor(scales, dtype=like.dtype, device=like.device)[:, None, None]

    def of(self, segments: Segments) -> Tensor:
        """The values of the segments' runs."""
        return self.values if len(segments.runs) == len(self.values) else self.values[segments.index]

    def add_gradient(self, grad: Tensor, segments: Segments) -> None:
        """Add the gradient of the values [runs, ...], times the scales, to the gradient of the segments' runs."""
        if len(segments.runs) == len(self.values):
            self.grad.addcmul_(grad, self._scales)
        else:
            self.grad.index_add_(0, segments.index, grad * self._scales[segments.index])


class _Adapters:
    """The adapters of layers with the same input, of all runs. Ranks are padded to the largest one."""

    def __init__(self, layers: Sequence[Sequence[LeanLoraLinear]], dtype: torch.dtype) -> None:
        """`layers` are the same layers of each run."""
        runs = [read_lora(own) for own in layers]
        self.bases = [one.base for one in runs[0][0]]
        first, count = runs[0][1][0], len(runs)
        self.rank = rank = max(down.shape[0] for _, adapters in runs for down in adapters[::2])
        self.down = _Stack(first, (count, len(self.bases) * rank, first.shape[1]), dtype, [1.0] * count)
        self.ups = [
            _Stack(first, (count, base.out_features, rank), dtype, [own[place].scale for own, _ in runs])
            for place, base in enumerate(self.bases)
        ]
        #: A, and B with its scale, of all layers and runs, with their places in the stacks' values.
        self._downs, self._ups = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor, float]]()
        #: The gradient of each.
        self.grads: list[tuple[Tensor, Tensor]] = []
        for run, (frozen, adapters) in enumerate(runs):
            for place, (one, down, up) in enumerate(zip(frozen, adapters[::2], adapters[1::2], strict=True)):
                rows, columns = (run, slice(place * rank, place * rank + len(down))), (run, ..., slice(len(down)))
                self._downs.append((down, self.down.values[rows]))
                self._ups.append((up, self.ups[place].values[columns], one.scale))
                self.grads += [(down, self.down.grad[rows]), (up, self.ups[place].grad[columns])]
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the present adapters."""
        (downs, to_downs), (ups, to_ups, scales) = (zip(*side, strict=True) for side in (self._downs, self._ups))
        torch._foreach_copy_(to_downs, downs)
        torch._foreach_copy_(to_ups, torch._foreach_mul(ups, scales))


class _JointProducts(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T of layers with the same x [M, in], by the A and B of each segment's run.

    The gradients of A and B are added to their stacks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, adapters: _Adapters, segments: Segments) -> tuple[Tensor, ...]:
        shrunk = segments.product(x, adapters.down.of(segments).mT)
        outs = []
        for base, up, part in zip(adapters.bases, adapters.ups, shrunk.split(adapters.rank, 1), strict=True):
            out = segments.product(part, up.of(segments).mT)
            if base.bias is not None:
                out += base.bias
            outs.append(out.addmm_(x, weight_of(base, x.dtype).T))
        ctx.save_for_backward(x, shrunk)
        ctx.adapters, ctx.segments = adapters, segments
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, shrunk = ctx.saved_tensors
        adapters, segments = ctx.adapters, ctx.segments
        grad_parts = []
        for grad, up, part in zip(grads, adapters.ups, shrunk.split(adapters.rank, 1), strict=True):
            grad_parts.append(segments.product(grad, up.of(segments)))
            up.add_gradient(segments.products_of_columns(grad, part), segments)
        grad_shrunk = torch.cat(grad_parts, 1)
        adapters.down.add_gradient(segments.products_of_columns(grad_shrunk, x), segments)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        grad_x = segments.product(grad_shrunk, adapters.down.of(segments))
        for base, grad in zip(adapters.bases, grads, strict=True):
            grad_x.addmm_(grad, weight_of(base, grad.dtype))
        return grad_x, None, None, None


class JointModel:
    """The policies of several runs, whose modules but adapters and norms are the same, as one for joint passes."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.runs = len(policies)
        self._trained = [[parameter for _, parameter in policy.trainable()] for policy in policies]
        self._cohort = Cohort([policy.lm for policy in policies])
        self._modules = [m for m in policies[0].lm.modules() if isinstance(m, (LeanLoraLinear, NoisyRMSNorm))]
        norms = [module for module in self._modules if isinstance(module, NoisyRMSNorm)]
        self._norms: dict[NoisyRMSNorm, list[Any]] = {norm: self._cohort.of(norm) for norm in norms}
        known = {id(parameter) for module in self._modules for parameter in module.parameters()}
        if not all(id(parameter) in known for parameter in self._trained[0]):
            raise ValueError("joint passes train adapters of linear layers, and norms that feed these, alone")
        self._adapters: dict[tuple[LeanLoraLinear, int, torch.dtype], _Adapters] = {}
        self._grads: dict[Tensor, Tensor] = {}
        #: Whether adapters have changed since the last `sync`.
        self._stale = True
        self._segments: Segments | None = None
        # The backward pass of a first layer is called for its adapters, though its input has no gradient.
        self._anchor = torch.zeros((), device=policies[0].device, requires_grad=True)

    @contextmanager
    def at(self, segments: Segments) -> Iterator[None]:
        """A context in which the first policy's modules compute rows of these segments, backward passes included."""
        self._segments = segments
        if self._stale:
            for adapters in self._adapters.values():
                adapters.sync()
            self._stale = False
        try:
            for module in self._modules:
                module.joint = self.products if isinstance(module, LeanLoraLinear) else self.normed
            yield
        finally:
            for module in self._modules:
                module.joint = None
            self._segments = None

    def use_trained(self) -> None:
        """Let the next pass read the present adapters."""
        self._stale = True

    def clear_gradients(self, run: int) -> None:
        """Give a run's trained tensors gradients of zero, to which backward passes add."""
        for parameter in self._trained[run]:
            parameter.grad = self._gradient(parameter)
        torch._foreach_zero_([self._grads[parameter] for parameter in self._trained[run]])

    @contextmanager
    def gradients_in_place(self, runs: Sequence[int]) -> Iterator[None]:
        """A context in which a backward pass adds to the tensors that these runs' gradients have in other passes."""
        without = [parameter for run in runs for parameter in self._trained[run] if parameter.grad is None]
        for parameter in without:
            parameter.grad = self._gradient(parameter)
        try:
            yield
        finally:
            for parameter in without:
                parameter.grad = None

    def _gradient(self, parameter: Tensor) -> Tensor:
        if parameter not in self._grads:
            self._grads[parameter] = torch.zeros_like(parameter)
        return self._grads[parameter]

    def products(self, x: Tensor, layers: Sequence[LeanLoraLinear]) -> tuple[Tensor, ...]:
        """The outputs [M, out] of layers with the same x [M, in], by the adapters of each segment's run."""
        key, segments = (layers[0], len(layers), x.dtype), self._of_rows(len(x))
        if key not in self._adapters:
            self._adapters[key] = self._stacked(layers, x.dtype)
        return _JointProducts.apply(x, self._anchor, self._adapters[key], segments)

    def normed(self, norm: NoisyRMSNorm, hidden: Tensor) -> Tensor:
        """`hidden` [..., L, features] by the weight and noise of each segment's run."""
        segments = self._of_rows(hidden.shape[-2])
        rows = zip(segments.runs, hidden.split(segments.lengths, -2), strict=True)
        return torch.cat([self._norms[norm][run].by_own_weight(part) for run, part in rows], -2)

    def _of_rows(self, count: int) -> Segments:
        segments = self._segments
        if segments is None or count != sum(segments.lengths):
            raise RuntimeError(f"a layer of a joint pass got {count} rows, which aren't the segments {segments}")
        return segments

    def _stacked(self, layers: Sequence[LeanLoraLinear], dtype: torch.dtype) -> _Adapters:
        """The adapters of layers of all runs. Their gradients, to which no pass has added yet, move to the stacks."""
        adapters = _Adapters(list(zip(*map(self._cohort.of, layers), strict=True)), dtype)  # type: ignore[arg-type]
        for tensor, grad in adapters.grads:
            if tensor.grad is not None:
                tensor.grad = grad
            self._grads[tensor] = grad
        return adapters
