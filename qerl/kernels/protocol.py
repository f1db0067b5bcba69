"""Products of a decode step: what an implementation offers, and which one serves given layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from qerl.kernels.adapters import unwrap
from qerl.kernels.dense import TorchLinear
from qerl.kernels.tiles import fits
from qerl.quant.linear import PackedLinear


class FusedLinear(Protocol):
    """Layers that read the same input, as one product; their outputs lie one behind the other."""

    def sync(self) -> None:
        """Take over adapters and biases as they are now."""
        ...

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, silu: bool = False) -> None:
        """x [B, K] to out [B, N] = W x + b + B (A x), all in the model's dtype and contiguous.

        `residual`: added to what `out` holds. `silu`: out [B, N/2] = silu(first half) * second half.
        """
        ...


def fuse(layers: Sequence[nn.Module], dtype: torch.dtype, gated: bool = False) -> FusedLinear:
    """One product of layers that read the same input: `nn.Linear`, `PackedLinear` or PEFT's LoRA around either.

    `dtype`: of the activations; `gated`: gate and up, to be called with `silu`.
    """
    bases = [unwrap(layer).base for layer in layers]
    packed = [base for base in bases if isinstance(base, PackedLinear)]
    if len(packed) == len(bases) and _kernel_serves(packed, dtype):
        from qerl.kernels.linear import W4Linear

        return W4Linear(layers, interleaved=gated)
    return TorchLinear(layers, dtype)


def _kernel_serves(layers: Sequence[PackedLinear], dtype: torch.dtype) -> bool:
    """Whether the kernel for 4-bit weights can do it, which copies tiles as GPUs from Hopper on do."""
    device, formats = layers[0].qweight.device, {layer.weights_format for layer in layers}
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return len(formats) == 1 and fits(formats.pop(), [(layer.out_features, layer.in_features) for layer in layers])
