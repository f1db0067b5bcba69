"""The MLP of a block. With a kernel for the device, its activation takes one pass over memory in each direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation

from qerl.kernels import reference
from qerl.kernels.operations import operations
from qerl.layers.lora import products

#: transformers' classes that compute only down(silu(gate(x)) * up(x)).
_PLAIN = ("Qwen2MLP", "Qwen3MLP", "LlamaMLP", "MistralMLP", "Qwen3_5MLP", "Qwen3_5MoeMLP")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up by Triton, which saves only gate and up for the backward pass; PyTorch saves silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from qerl.kernels import swiglu

        ctx.save_for_backward(gate, up)
        return swiglu.forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from qerl.kernels import swiglu

        return swiglu.backward(grad, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, by Triton on a GPU, and by PyTorch elsewhere and in float64."""
    if gate.is_cuda and gate.dtype == up.dtype != torch.float64:
        return _SwiGLU.apply(gate, up)
    return nn.functional.silu(gate) * up


class _SwiGLUOfHalves(torch.autograd.Function):
    """silu(gate) * up of one tensor with both, by Triton, without copies of the halves."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        from qerl.kernels import swiglu

        ctx.save_for_backward(both)
        return swiglu.forward_of_halves(both)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        from qerl.kernels import swiglu

        return swiglu.backward_of_halves(grad, *ctx.saved_tensors)


def swiglu_of_halves(both: Tensor) -> Tensor:
    """silu(gate) * up [M, I] of contiguous gate and up [M, 2 I] side by side, as `swiglu` computes it."""
    if both.is_cuda and both.dtype != torch.float64:
        return _SwiGLUOfHalves.apply(both)
    return swiglu(*both.chunk(2, -1))


class _ClampedGLU(torch.autograd.Function):
    """The gate of gpt-oss's experts, which saves only gate and up; PyTorch saves five tensors more."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(both)
        ctx.numbers = alpha, limit
        kernels = reference if both.dtype == torch.float64 else operations(both.device)
        return kernels.clamped_glu(both, alpha, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        [both] = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = reference.clamped_glu(both, *ctx.numbers)
        return torch.autograd.grad(out, both, grad)[0], None, None


def clamped_glu(both: Tensor, alpha: float, limit: float) -> Tensor:
    """See `qerl.kernels.reference.clamped_glu`; on a GPU by Triton forward."""
    return _ClampedGLU.apply(both.contiguous(), alpha, limit)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with the projections of `mlp`, under the same names."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj: nn.Module = mlp.get_submodule("gate_proj")
        self.up_proj: nn.Module = mlp.get_submodule("up_proj")
        self.down_proj: nn.Module = mlp.get_submodule("down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to the same shape."""
        return self.down_proj(swiglu(*products(x, (self.gate_proj, self.up_proj))))


def _fusible(mlp: nn.Module) -> bool:
    return type(mlp).__name__ in _PLAIN and isinstance(getattr(mlp, "act_fn", None), (nn.SiLU, SiLUActivation))


def fuse_mlps(model: nn.Module) -> None:
    """Replace every MLP of a known plain class with SiLU by `GatedMLP`; projections and their names stay."""
    for name, module in list(model.named_modules()):
        if _fusible(module):
            model.set_submodule(name, GatedMLP(module))
