"""Matrix products of a decode step: their protocol, and the choice of an implementation for given layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from qerl.kernels.activations import Activation
from qerl.layers.adapters import unwrap
from qerl.layers.dense_linear import BitsandbytesLinear, TorchLinear
from qerl.layers.packed_linear import PackedLinear
from qerl.layers.portable_linear import PortableLinear
from qerl.layers.w4_linear import W4Linear, is_hopper, serves
from qerl.settings.rollout import Kernels


class FusedLinear(Protocol):
    """Layers with the same input, as one product. Their outputs are concatenated."""

    #: N, the sum of the layers' outputs.
    out_features: int

    def sync(self) -> None:
        """Copy the present adapters and biases."""
        ...

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """Write out [B, N] = W x + b + B (A x) for x [B, K], all contiguous in the model's dtype.

        With `residual` the result is added to `out`. With `activation`, out [B, N / 2] is activation(first half) *
        second half.
        """
        ...


def product_class(
    capability: tuple[int, int] | None,
    weights_format: str,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    kernels: Kernels = "auto",
) -> type[W4Linear] | type[PortableLinear] | type[TorchLinear]:
    """The class of the product of layers of `shapes` [out, in] in a format, with activations of `dtype`.

    `capability` is the compute capability of the layers' GPU, and None on a CPU.
    """
    for_hopper = kernels == "auto" and is_hopper(capability)
    if for_hopper and serves(weights_format, shapes, dtype):
        return W4Linear
    if not for_hopper and PortableLinear.serves(capability, weights_format, shapes, dtype):
        return PortableLinear
    if BitsandbytesLinear.serves(capability, weights_format, dtype):
        return BitsandbytesLinear
    return TorchLinear


def fuse(
    layers: Sequence[nn.Module], dtype: torch.dtype, gated: bool = False, kernels: Kernels = "auto"
) -> FusedLinear:
    """Combine layers with the same input into one product: `nn.Linear`, `PackedLinear` or PEFT's LoRA around either.

    `dtype` is the activations' dtype. `gated` layers are gate and up, or one with both as its halves, called with
    an activation. `kernels` is the setting.
    """
    bases = [unwrap(layer).base for layer in layers]
    formats = {base.weights_format if isinstance(base, PackedLinear) else "bf16" for base in bases}
    shapes = [(base.out_features, base.in_features) for base in bases]
    # Layers in several formats have no common product.
    kind = product_class(_capability(bases[0]), formats.pop() if len(formats) == 1 else "", shapes, dtype, kernels)
    return W4Linear(layers, interleaved=gated) if issubclass(kind, W4Linear) else kind(layers, dtype)


def _capability(base: nn.Linear | PackedLinear) -> tuple[int, int] | None:
    device = (base.qweight if isinstance(base, PackedLinear) else base.weight).device
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
