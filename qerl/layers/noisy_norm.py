"""RMSNorm of a block with noise `z` on its weight `w`; `qerl.rl.noise` draws the noise.

The noise is in a separate buffer, so it never accumulates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.layers.structure import Structure, epsilon_of

#: What reads a norm's output: the projections of a block's attention, or those of its MLP.
ROLES = ("attention", "mlp")


def _forward(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qerl.kernels.norm_training.forward`.

    Products of a 16-bit and a float32 tensor are computed in float32 and rounded when they are written, which saves
    separate casts.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=wide)
    inverse = torch.rsqrt(norm.square() / hidden.shape[-1] + epsilon)
    return torch.mul(hidden * inverse, weight, out=torch.empty_like(hidden)), inverse


def _backward(
    grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, of_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `qerl.kernels.norm_training.backward`."""
    normed = hidden * inverse
    product = grad * normed
    grad_weight = product.flatten(0, -2).sum(0) if of_weight else None
    along = (product @ weight)[..., None] / hidden.shape[-1]
    grad_hidden = (grad * weight).addcmul_(normed, along, value=-1)
    return torch.mul(grad_hidden, inverse, out=torch.empty_like(hidden)), grad_weight


def _passes(hidden: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward pass, by Triton on a GPU, and by PyTorch elsewhere and for float64."""
    if not hidden.is_cuda or hidden.dtype == torch.float64:
        return _forward, _backward
    from qerl.kernels.norm_training import backward, forward

    return forward, backward


class _ScaledNorm(torch.autograd.Function):
    """w x / rms(x), computed in float32. It saves the input for the backward pass, without float32 copies."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        out, inverse = _passes(hidden)[0](hidden, weight, epsilon)
        ctx.save_for_backward(hidden, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        hidden, weight, inverse = ctx.saved_tensors
        grads = _passes(hidden)[1](grad, hidden, weight, inverse, ctx.needs_input_grad[1])
        return *grads, None


class NoisyRMSNorm(nn.Module):
    """RMSNorm with weight `w + z`, computed in float32 for any dtype of the input.

    A norm of the form (1 + w) x / rms(x) has the `offset` 1. `layer` and `role` say where it is.
    """

    noise: torch.Tensor

    def __init__(
        self, weight: nn.Parameter, variance_epsilon: float, offset: float = 0.0, layer: int = 0, role: str = ROLES[0]
    ) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = variance_epsilon
        self.offset = offset
        self.layer = layer
        self.role = role
        self.register_buffer("noise", torch.zeros_like(weight, dtype=torch.float32), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise `hidden` [..., features] over the last dimension, and return the same dtype."""
        weight = self.weight.float() + self.noise
        return _ScaledNorm.apply(hidden, weight + self.offset if self.offset else weight, self.variance_epsilon)


def make_noisy(model: nn.Module, structure: Structure) -> None:
    """Replace the norms that feed a block's projections by `NoisyRMSNorm`; their weights stay the same parameters."""
    for name, (layer, role) in structure.noisy_norms().items():
        norm = model.get_submodule(name)
        if not isinstance(norm, NoisyRMSNorm):
            weight, offset = norm.get_parameter("weight"), structure.offset or 0.0
            model.set_submodule(name, NoisyRMSNorm(weight, epsilon_of(norm), offset, layer, role))


def noisy_norms(model: nn.Module) -> dict[tuple[int, str], list[NoisyRMSNorm]]:
    """The noisy norms by layer and role, in order. With PEFT they are the original and its trained copy."""
    places: dict[tuple[int, str], list[NoisyRMSNorm]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, NoisyRMSNorm):
            places[module.layer, module.role].append(module)
    return dict(sorted(places.items()))


def noise_norm(model: nn.Module) -> float:
    """The norm of all present z of `model` concatenated; 0 without noise."""
    noises = (module.noise for module in model.modules() if isinstance(module, NoisyRMSNorm))
    return math.sqrt(sum(float(noise.double().square().sum()) for noise in noises))
