"""Adaptive Quantization Noise (paper section 3.3): noise on the RMSNorm weights of each block.

`w + z` in the input norm perturbs q, k and v with one z, in the post-attention norm gate and up with another
(Eq. 10 to 12); o, down and the final norm get none. The noise has a buffer of its own, so it never accumulates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.config import NoiseSettings

ROLES = ("input_layernorm", "post_attention_layernorm")


def _forward(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qerl.kernels.norm_training.forward`.

    Products of a 16-bit and a float32 tensor are taken in float32 and results rounded as they are written, which spares
    passes over memory that a cast would take.
    """
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
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
    """Forward and backward: Triton's on a GPU, PyTorch's elsewhere; and in float64, which PyTorch's refuses to lose."""
    if not hidden.is_cuda or hidden.dtype == torch.float64:
        return _forward, _backward
    from qerl.kernels.norm_training import backward, forward

    return forward, backward


class _ScaledNorm(torch.autograd.Function):
    """w x / rms(x) in float32, which keeps for the backward pass its input as it is, and no float32 copies of it."""

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
    """RMSNorm with weight `w + z`, computed in float32 whatever the dtype of the input."""

    noise: torch.Tensor

    def __init__(self, weight: nn.Parameter, variance_epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = variance_epsilon
        self.register_buffer("noise", torch.zeros_like(weight, dtype=torch.float32), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise `hidden` [..., features] over the last dimension; same dtype out."""
        return _ScaledNorm.apply(hidden, self.weight.float() + self.noise, self.variance_epsilon)


def make_noisy(model: nn.Module) -> None:
    """Replace the two norms of every block by `NoisyRMSNorm`; their weights stay the same parameters."""
    for module in list(model.modules()):
        for role in ROLES:
            norm = getattr(module, role, None)
            if norm is not None and not isinstance(norm, NoisyRMSNorm):
                setattr(module, role, NoisyRMSNorm(norm.weight, norm.variance_epsilon))


def sigma(settings: NoiseSettings, step: int, total_steps: int) -> float:
    """Standard deviation of the noise at `step` (1-based) of `total_steps`.

    The stage is k = floor((step - 1) / floor(M / K)), at most K - 1; stage 0 carries no noise (Eq. 8). Where there are
    fewer steps than stages (M < K), each step is a stage: k = step - 1, which ends before K - 1. `exponential`
    is Eq. 8 as printed, whose last stage stops short of sigma_end; `exponential-reaching` spreads the exponent so that
    stage K - 1 reaches it, as in the released code. The other decays, whose formulas the paper doesn't give, run from
    sigma_start in stage 1 to sigma_end in stage K - 1. `constant` is sigma_start in every stage, 0 included.
    """
    if settings.schedule == "off":
        return 0.0
    if settings.schedule == "constant":
        return settings.sigma_start
    stages = settings.stages
    stage = min((step - 1) // max(total_steps // stages, 1), stages - 1)
    if stage == 0:
        return 0.0
    start, end = settings.sigma_start, settings.sigma_end
    if settings.schedule == "exponential":
        return start * (end / start) ** ((stage - 1) / (stages - 1))
    progress = (stage - 1) / (stages - 2)
    remaining = {
        "exponential-reaching": lambda: (start * (end / start) ** progress - end) / (start - end or 1.0),
        "linear": lambda: 1 - progress,
        "cosine": lambda: (1 + math.cos(math.pi * progress)) / 2,
        "logarithmic": lambda: 1 - math.log(1 + stage - 1) / math.log(stages - 1),
    }[settings.schedule]()
    return end + (start - end) * remaining


def standard_normal(seed: int, step: int, layer: int, role: int, size: int) -> torch.Tensor:
    """`size` float32 draws from N(0, 1) that depend on the key alone: the same on every rank, sampler and restart."""
    counter = np.array([0, 0, layer, role], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64), counter=counter))
    return torch.from_numpy(generator.standard_normal(size, dtype=np.float32))


def noise_norm(model: nn.Module) -> float:
    """Norm of all z that `model` holds now; 0 without noise."""
    noises = (module.noise for module in model.modules() if isinstance(module, NoisyRMSNorm))
    return math.sqrt(sum(float(noise.double().square().sum()) for noise in noises))


@dataclass(frozen=True)
class NoiseReport:
    """What was added at a step: sigma, and the norm of all z together."""

    sigma: float
    norm: float


class Noise:
    """Draws z for all noisy norms of a model and takes it away again."""

    def __init__(self, model: nn.Module, settings: NoiseSettings, seed: int) -> None:
        self._model = model
        self.settings = settings
        self.seed = seed

    def _norms(self) -> Iterator[tuple[int, int, list[NoisyRMSNorm]]]:
        """Layer, role and the norms there (PEFT keeps the original beside the trained copy: both carry the same z)."""
        blocks = next(m for name, m in self._model.named_modules() if name.endswith("layers"))
        assert isinstance(blocks, nn.ModuleList)
        for index, layer in enumerate(blocks):
            for role, name in enumerate(ROLES):
                yield index, role, [m for m in getattr(layer, name).modules() if isinstance(m, NoisyRMSNorm)]

    def set(self, step: int, total_steps: int) -> NoiseReport:
        """Put the noise of `step` in place."""
        scale = sigma(self.settings, step, total_steps)
        squares = 0.0
        for layer, role, norms in self._norms():
            if not norms:
                raise RuntimeError(
                    f"{ROLES[role]} of layer {layer} is no NoisyRMSNorm: call make_noisy before training"
                )
            z = scale * standard_normal(self.seed, step, layer, role, norms[0].noise.numel())
            squares += float(z.double().square().sum())
            for norm in norms:
                norm.noise.copy_(z)
        return NoiseReport(scale, math.sqrt(squares))

    def clear(self) -> None:
        """Noise-free again, bit for bit."""
        for _, _, norms in self._norms():
            for norm in norms:
                norm.noise.zero_()

    @contextmanager
    def at(self, step: int, total_steps: int) -> Iterator[NoiseReport]:
        """The noise of `step` inside the block, none after it."""
        try:
            yield self.set(step, total_steps)
        finally:
            self.clear()
