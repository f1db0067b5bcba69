"""Layers of all experts of a mixture as one grouped product, with its gradient and with the sum of experts' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.formats import words as layout
from qerl.formats.words import Words
from qerl.kernels import mixture_reference
from qerl.kernels.groups import GroupedLora, Groups
from qerl.kernels.operations import mixture_operations
from qerl.layers.dense_linear import stacked
from qerl.layers.packed_linear import PackedLinear
from qerl.layers.portable_linear import words_of

#: A frozen layer of an expert.
Layer = nn.Linear | PackedLinear


class DenseProducts(Protocol):
    """Grouped products of dense weights, documented in `qerl.kernels.mixture_reference`."""

    def dense_product(self, weights: Tensor, x: Tensor, groups: Groups, out: Tensor) -> None:
        """See `mixture_reference.dense_product`."""
        ...

    def dense_input_gradient(
        self, weights: Tensor, grad: Tensor, groups: Groups, out: Tensor, add: bool = False
    ) -> None:
        """See `mixture_reference.dense_input_gradient`."""
        ...

    def dense_weight_gradient(self, grad: Tensor, x: Tensor, groups: Groups, experts: int) -> Tensor:
        """See `mixture_reference.dense_weight_gradient`."""
        ...


class GroupedLinear(Protocol):
    """Layers of every expert that read the same input, as one product; an expert's outputs are concatenated."""

    #: N, the outputs of an expert, and K, its inputs.
    out_features: int
    in_features: int

    @property
    def dense(self) -> DenseProducts:
        """The same products of dense tensors, for adapters."""
        ...

    def sync(self) -> None:
        """Do nothing: adapters are apart."""
        ...

    def __call__(
        self, x: Tensor, groups: Groups, out: Tensor, silu: bool = False, lora: GroupedLora | None = None
    ) -> None:
        """Write out [pairs, N] = W x + b of each pair's expert, plus `lora`, for x [T, K] by tokens or [pairs, K].

        With `silu`, out [pairs, N/2] = silu(first half) * second half. All tensors are contiguous and of one dtype.
        """
        ...

    def input_gradient(self, grad: Tensor, groups: Groups, out: Tensor) -> None:
        """Write the gradient out [pairs, K] of each pair's input, of that of its output [T, N] or [pairs, N]."""
        ...


class TorchGroupedLinear:
    """A `GroupedLinear` in plain PyTorch, one expert after the other, of which one is unpacked at a time.

    It waits for the device, so that no CUDA graph can have it.
    """

    def __init__(self, experts: Sequence[Sequence[Layer]]) -> None:
        self._experts = experts
        self.out_features = sum(layer.out_features for layer in experts[0])
        self.in_features = experts[0][0].in_features
        self._bias = _biases(experts)

    @property
    def dense(self) -> DenseProducts:
        """See `GroupedLinear`."""
        return mixture_reference

    def sync(self) -> None:
        """See `GroupedLinear`."""

    def __call__(
        self, x: Tensor, groups: Groups, out: Tensor, silu: bool = False, lora: GroupedLora | None = None
    ) -> None:
        """See `GroupedLinear`."""
        both = out.new_empty(groups.count, self.out_features) if silu else out
        mixture_reference.product(x, groups, lambda number: self._weight(number, x.dtype), self._bias, both)
        if lora is not None:
            added = torch.empty_like(both)
            mixture_reference.dense_product(lora.up, lora.shrunk, groups, added)
            both += added
        if silu:
            gate, up = both.chunk(2, dim=-1)
            torch.mul(nn.functional.silu(gate), up, out=out)

    def input_gradient(self, grad: Tensor, groups: Groups, out: Tensor) -> None:
        """See `GroupedLinear`."""
        mixture_reference.input_gradient(grad, groups, lambda number: self._weight(number, grad.dtype), out)

    def _weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """An expert's weights [N, K]."""
        layers = self._experts[number]
        return torch.cat([_dense(layer, dtype) for layer in layers]) if len(layers) > 1 else _dense(layers[0], dtype)


class PortableGroupedLinear:
    """A `GroupedLinear` by kernels in Triton: of NVFP4 or MXFP4 layers, or of dense ones.

    The layers' weights move into one tensor, of which each layer then reads its part, so there is only one copy.
    """

    @staticmethod
    def serves(device: torch.device, weights_format: str, columns: int, dtype: torch.dtype) -> bool:
        """Whether this class supports layers of a format ("bf16": dense) with this input, of activations of `dtype`."""
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float32):
            return False
        return weights_format in layout.FORMATS or (weights_format == "bf16" and columns % 64 == 0)

    def __init__(self, experts: Sequence[Sequence[Layer]], dtype: torch.dtype) -> None:
        from qerl.kernels.portable.grouped_launches import GroupedOperands

        layers = list(chain.from_iterable(experts))
        self.out_features = sum(layer.out_features for layer in experts[0])
        self.in_features = layers[0].in_features
        packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
        weights: Words | Tensor | None = words_of(packed) if packed else _stacked(layers)
        assert weights is not None
        factors = None
        if isinstance(weights, Words):
            parts = torch.tensor(weights.parts)
            factors = torch.tensor(weights.factors).repeat_interleave(parts).to(weights.data.device)
        bias = _biases(experts)
        self._dtype = dtype
        self.operands = GroupedOperands(
            weights, self.out_features, factors, None if bias is None else bias.float().flatten()
        )

    @property
    def dense(self) -> DenseProducts:
        """See `GroupedLinear`."""
        from qerl.kernels.portable import grouped_launches

        return grouped_launches

    def sync(self) -> None:
        """See `GroupedLinear`."""

    def __call__(
        self, x: Tensor, groups: Groups, out: Tensor, silu: bool = False, lora: GroupedLora | None = None
    ) -> None:
        """See `GroupedLinear`."""
        from qerl.kernels.portable.grouped_launches import multiply

        width = self.out_features // 2 if silu else self.out_features
        self._check(x, self.in_features, out, width, groups)
        multiply(self.operands, x, groups, out, silu, lora)

    def input_gradient(self, grad: Tensor, groups: Groups, out: Tensor) -> None:
        """See `GroupedLinear`."""
        from qerl.kernels.portable.grouped_launches import input_gradient

        self._check(grad, self.out_features, out, self.in_features, groups)
        input_gradient(self.operands, grad, groups, out)

    def _check(self, x: Tensor, columns: int, out: Tensor, width: int, groups: Groups) -> None:
        tokens = groups.count // groups.chosen
        if len(x) not in (tokens, groups.count) or x.shape[1] != columns or out.shape != (groups.count, width):
            raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)} don't fit these layers of experts")
        if any(tensor.dtype != self._dtype or not tensor.is_contiguous() for tensor in (x, out)):
            raise ValueError(f"activations must be contiguous {self._dtype}")


def grouped(experts: Sequence[Sequence[Layer]], dtype: torch.dtype) -> TorchGroupedLinear | PortableGroupedLinear:
    """One product of layers that read the same input, of each expert in order, with activations of `dtype`."""
    layers = list(chain.from_iterable(experts))
    formats = {layer.weights_format if isinstance(layer, PackedLinear) else "bf16" for layer in layers}
    device = device_of(layers[0])
    alike = len(formats) == 1 and (formats != {"bf16"} or {layer.weight.dtype for layer in layers} == {dtype})
    if alike and PortableGroupedLinear.serves(device, formats.pop(), layers[0].in_features, dtype):
        return PortableGroupedLinear(experts, dtype)
    return TorchGroupedLinear(experts)


def device_of(layer: Layer) -> torch.device:
    """The device of a layer's weights."""
    return (layer.qweight if isinstance(layer, PackedLinear) else layer.weight).device


def _dense(layer: Layer, dtype: torch.dtype) -> Tensor:
    return layer.dense_weight(dtype) if isinstance(layer, PackedLinear) else layer.weight.to(dtype)


def _stacked(layers: Sequence[Layer]) -> Tensor | None:
    return stacked([layer for layer in layers if isinstance(layer, nn.Linear)])


def _biases(experts: Sequence[Sequence[Layer]]) -> Tensor | None:
    """The biases [experts, N]; None without biases."""
    if all(layer.bias is None for layer in chain.from_iterable(experts)):
        return None
    rows = [[_bias(layer) for layer in layers] for layers in experts]
    return torch.stack([torch.cat(row) for row in rows])


def _bias(layer: Layer) -> Tensor:
    if layer.bias is None:
        return torch.zeros(layer.out_features, device=device_of(layer))
    return layer.bias.detach()


class _GroupedProduct(torch.autograd.Function):
    """Outputs [pairs, N] of x [T, K] or [pairs, K], with the gradient of x. It saves no activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, linear: GroupedLinear) -> Tensor:
        ctx.groups, ctx.linear, ctx.rows = groups, linear, len(x)
        out = x.new_empty(groups.count, linear.out_features)
        linear(x, groups, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        groups = ctx.groups
        out = grad.new_empty(groups.count, ctx.linear.in_features)
        ctx.linear.input_gradient(grad.contiguous(), groups, out)
        if ctx.rows != groups.count:
            out = out.view(ctx.rows, groups.chosen, -1).sum(1)
        return out, None, None


class _WeightedSum(torch.autograd.Function):
    """Sums [T, H] of y [T k, H] by weights float32 [T, k], in float32, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights)
        out = y.new_empty(len(weights), y.shape[1])
        mixture_operations(y.device).combine(y, weights, out, False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = ctx.saved_tensors
        return mixture_operations(y.device).combine_gradients(grad.contiguous(), y, weights)


def grouped_product(x: Tensor, groups: Groups, linear: GroupedLinear) -> Tensor:
    """Outputs [pairs, N] of each pair's expert for x [T, K] by tokens or [pairs, K], with the gradient of x."""
    return _GroupedProduct.apply(x.contiguous(), groups, linear)


def weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """Sums [T, H] of outputs y [T k, H] by weights float32 [T, k], with gradients of both."""
    return _WeightedSum.apply(y, weights.contiguous())
