"""Products of a decode step: the interface of implementations, and the choice of one for given layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from qerl.layers.dense_linear import BitsandbytesLinear, TorchLinear
from qerl.layers.w4_linear import W4Linear, serves


class FusedLinear(Protocol):
    """Layers that read the same input, as one product. Their outputs are concatenated."""

    #: N, the sum of the layers' outputs.
    out_features: int

    def sync(self) -> None:
        """Take over adapters and biases as they are now."""
        ...

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, silu: bool = False) -> None:
        """x [B, K] to out [B, N] = W x + b + B (A x), all in the model's dtype and contiguous.

        With `residual` the result is added to `out`. With `silu`, out [B, N/2] = silu(first half) * second half.
        """
        ...


def fuse(layers: Sequence[nn.Module], dtype: torch.dtype, gated: bool = False) -> FusedLinear:
    """One product of layers that read the same input: `nn.Linear`, `PackedLinear` or PEFT's LoRA around either.

    `dtype` is that of the activations. `gated` layers are gate and up, called with `silu`.
    """
    if serves(layers, dtype):
        return W4Linear(layers, interleaved=gated)
    if BitsandbytesLinear.serves(layers, dtype):
        return BitsandbytesLinear(layers, dtype)
    return TorchLinear(layers, dtype)
