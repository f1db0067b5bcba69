"""silu(gate) * up in Triton, forward and backward, computed in float32; `qerl.layers.mlp` has the PyTorch version."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _forward(gate, up, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    wide = tl.load(gate + place, mask, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask, other=0.0).to(tl.float32)
    tl.store(out + place, (wide * tl.sigmoid(wide) * factor).to(out.dtype.element_ty), mask)


@triton.jit
def _backward(grad, gate, up, grad_gate, grad_up, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    above = tl.load(grad + place, mask, other=0.0).to(tl.float32)
    wide = tl.load(gate + place, mask, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(wide)
    silu = wide * share
    slope = share + silu * (1.0 - share)
    tl.store(grad_gate + place, (above * factor * slope).to(grad_gate.dtype.element_ty), mask)
    tl.store(grad_up + place, (above * silu).to(grad_up.dtype.element_ty), mask)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for two tensors of the same shape and dtype."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _forward[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), BLOCK=_BLOCK)
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and of up, in their dtype."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), _BLOCK),)
    _backward[grid](grad, gate, up, grad_gate, grad_up, gate.numel(), BLOCK=_BLOCK)
    return grad_gate, grad_up
