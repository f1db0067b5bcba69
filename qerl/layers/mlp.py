"""The MLP of a block. Where the device has a kernel, its activation takes one pass over memory each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation

from qerl.layers.lora import products

#: Classes of transformers that compute down(silu(gate(x)) * up(x)) and nothing else.
_PLAIN = ("Qwen2MLP", "Qwen3MLP", "LlamaMLP", "MistralMLP")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up by Triton, which keeps gate and up for the backward pass; PyTorch keeps silu(gate) too."""

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
    """silu(gate) * up: Triton's on a GPU, PyTorch's elsewhere and in float64."""
    if gate.is_cuda and gate.dtype == up.dtype != torch.float64:
        return _SwiGLU.apply(gate, up)
    return nn.functional.silu(gate) * up


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with the projections of `mlp`, under their names."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj: nn.Module = mlp.get_submodule("gate_proj")
        self.up_proj: nn.Module = mlp.get_submodule("up_proj")
        self.down_proj: nn.Module = mlp.get_submodule("down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.down_proj(swiglu(*products(x, (self.gate_proj, self.up_proj))))


def _fusible(mlp: nn.Module) -> bool:
    return type(mlp).__name__ in _PLAIN and isinstance(getattr(mlp, "act_fn", None), (nn.SiLU, SiLUActivation))


def fuse_mlps(model: nn.Module) -> None:
    """Replace every MLP with SiLU that is known to be plain by `GatedMLP`; projections and their names stay."""
    for name, module in list(model.named_modules()):
        if _fusible(module):
            model.set_submodule(name, GatedMLP(module))
