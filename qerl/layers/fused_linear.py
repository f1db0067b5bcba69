"""Matrix products of a decode step: their protocol, and the choice of an implementation for given layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from qerl.layers.dense_linear import BitsandbytesLinear, TorchLinear
from qerl.layers.w4_linear import W4Linear, serves


class FusedLinear(Protocol):
    """Layers with the same input, as one product. Their outputs are concatenated."""

    #: N, the sum of the layers' outputs.
    out_features: int

    def sync(self) -> None:
        """Copy the present adapters and biases."""
        ...

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, silu: bool = False) -> None:
        """Write out [B, N] = W x + b + B (A x) for x [B, K], all contiguous in the model's dtype.

        With `residual` the result is added to `out`. With `silu`, out [B, N/2] = silu(first half) * second half.
        """
        ...


def fuse(layers: Sequence[nn.Module], dtype: torch.dtype, gated: bool = False) -> FusedLinear:
    """Combine layers with the same input into one product: `nn.Linear`, `PackedLinear` or PEFT's LoRA around either.

    `dtype` is the activations' dtype. `gated` layers are gate and up, called with `silu`.
    """
    if serves(layers, dtype):
        return W4Linear(layers, interleaved=gated)
    if BitsandbytesLinear.serves(layers, dtype):
        return BitsandbytesLinear(layers, dtype)
    return TorchLinear(layers, dtype)
