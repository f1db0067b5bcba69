"""Layers with the same input as one product: in PyTorch for any layer and device, by bitsandbytes for NF4."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from qerl.formats import nf4
from qerl.kernels.activations import Activation, gated
from qerl.layers.adapters import StackedAdapters, unwrap
from qerl.layers.packed_linear import PackedLinear


class TorchLinear:
    """A `FusedLinear` in plain PyTorch. Packed weights are unpacked in every call."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        adapted = [unwrap(layer) for layer in layers]
        self._bases = [layer.base for layer in adapted]
        self._dtype = dtype
        self._adapters = StackedAdapters(adapted, dtype)
        dense = [base for base in self._bases if isinstance(base, nn.Linear)]
        self._weight = stacked(dense) if len(dense) == len(self._bases) else None  # else some layers are packed
        self.out_features = sum(base.out_features for base in self._bases)
        biases = [base.bias for base in self._bases]
        self._bias = None
        if any(bias is not None for bias in biases):
            self._bias = torch.zeros(
                self.out_features, dtype=dtype, device=next(b for b in biases if b is not None).device
            )
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """See `FusedLinear`."""
        self._adapters.sync()
        if self._bias is not None:
            for part, base in zip(self._parts(self._bias), self._bases, strict=True):
                if base.bias is not None:
                    part.copy_(base.bias)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """See `FusedLinear`."""
        if activation:
            both = torch.empty(len(x), self.out_features, dtype=out.dtype, device=out.device)
            self._product(x, both, residual=False)
            gated(both, activation, out)
        else:
            self._product(x, out, residual)

    def _product(self, x: Tensor, out: Tensor, residual: bool) -> None:
        if self._weight is not None:
            _multiply(x, self._weight, self._bias, out, residual)
        else:
            biases = [None] * len(self._bases) if self._bias is None else self._parts(self._bias)
            for part, bias, base in zip(self._parts(out), biases, self._bases, strict=True):
                self._multiply_base(x, base, bias, part, residual)
        if self._adapters.rank:
            out.addmm_(x @ self._adapters.down.T, self._adapters.up.T)

    def _multiply_base(
        self, x: Tensor, base: nn.Linear | PackedLinear, bias: Tensor | None, out: Tensor, residual: bool
    ) -> None:
        weight = base.dense_weight(self._dtype) if isinstance(base, PackedLinear) else base.weight
        _multiply(x, weight, bias, out, residual)

    def _parts(self, joint: Tensor) -> tuple[Tensor, ...]:
        """The columns of each layer's output."""
        return joint.split([base.out_features for base in self._bases], dim=-1)


class BitsandbytesLinear(TorchLinear):
    """A `FusedLinear` of NF4 layers on a GPU by bitsandbytes, which has one fused kernel for few rows."""

    @staticmethod
    def serves(capability: tuple[int, int] | None, weights_format: str, dtype: torch.dtype) -> bool:
        """Whether this class supports layers in a format on a GPU of this capability, with activations of `dtype`."""
        return capability is not None and weights_format == "nf4" and dtype in nf4.KERNEL_DTYPES

    def _multiply_base(
        self, x: Tensor, base: nn.Linear | PackedLinear, bias: Tensor | None, out: Tensor, residual: bool
    ) -> None:
        assert isinstance(base, PackedLinear)
        product = nf4.multiply(x, base.packed.tensors, (base.out_features, base.in_features), bias)
        if residual:
            out += product
        else:
            out.copy_(product)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, residual: bool) -> None:
    if residual:
        out.addmm_(x, weight.T)
        if bias is not None:
            out += bias
    elif bias is not None:
        torch.addmm(bias, x, weight.T, out=out)
    else:
        torch.mm(x, weight.T, out=out)


@torch.no_grad()
def stacked(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The weights of `layers` as one tensor [N, K]; the layers' weights become views of it. None without layers."""
    if not layers:
        return None
    weights = [layer.weight for layer in layers]
    rows, columns = sum(len(weight) for weight in weights), weights[0].shape[1]
    if not _adjacent(weights):
        joint = torch.cat([weight.data for weight in weights])
        for weight, part in zip(weights, joint.split([len(weight) for weight in weights]), strict=True):
            weight.data = part
    return weights[0].data.as_strided((rows, columns), (columns, 1))


def _adjacent(weights: Sequence[Tensor]) -> bool:
    """Whether the weights are contiguous and adjacent in the same storage."""
    return all(weight.is_contiguous() for weight in weights) and all(
        after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and after.data_ptr() == before.data_ptr() + before.numel() * before.element_size()
        for before, after in pairwise(weights)
    )
