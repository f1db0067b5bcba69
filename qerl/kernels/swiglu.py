"""silu(gate) * up in Triton, forward and backward, computed in float32; `qerl.layers.mlp` has the PyTorch version."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _forward(gate, up, out, size, width, stride, BLOCK: tl.constexpr):
    """Rows of gate and up are `stride` numbers apart, those of the output follow each other."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    read = place // width * stride + place % width
    wide = tl.load(gate + read, mask, other=0.0).to(tl.float32)
    factor = tl.load(up + read, mask, other=0.0).to(tl.float32)
    tl.store(out + place, (wide * tl.sigmoid(wide) * factor).to(out.dtype.element_ty), mask)


@triton.jit
def _backward(grad, gate, up, grad_gate, grad_up, size, width, stride, BLOCK: tl.constexpr):
    """Gradients of gate and up have the rows of gate and up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    read = place // width * stride + place % width
    above = tl.load(grad + place, mask, other=0.0).to(tl.float32)
    wide = tl.load(gate + read, mask, other=0.0).to(tl.float32)
    factor = tl.load(up + read, mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(wide)
    silu = wide * share
    slope = share + silu * (1.0 - share)
    tl.store(grad_gate + read, (above * factor * slope).to(grad_gate.dtype.element_ty), mask)
    tl.store(grad_up + read, (above * silu).to(grad_up.dtype.element_ty), mask)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for two tensors of the same shape and dtype."""
    gate, up = gate.contiguous(), up.contiguous()
    out, size = torch.empty_like(gate), gate.numel()
    _forward[(triton.cdiv(size, _BLOCK),)](gate, up, out, size, size, size, BLOCK=_BLOCK)
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and of up, in their dtype."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    grid = (triton.cdiv(size, _BLOCK),)
    _backward[grid](grad, gate, up, grad_gate, grad_up, size, size, size, BLOCK=_BLOCK)
    return grad_gate, grad_up


def forward_of_halves(both: Tensor) -> Tensor:
    """silu(gate) * up [M, I] of gate and up side by side in `both` [M, 2 I], which is contiguous."""
    rows, width = len(both), both.shape[1] // 2
    out = both.new_empty(rows, width)
    gate, up = both.chunk(2, 1)
    _forward[(triton.cdiv(out.numel(), _BLOCK),)](gate, up, out, out.numel(), width, 2 * width, BLOCK=_BLOCK)
    return out


def backward_of_halves(grad: Tensor, both: Tensor) -> Tensor:
    """The gradient of `both`, in its dtype."""
    grad, out, width = grad.contiguous(), torch.empty_like(both), both.shape[1] // 2
    parts, size = (*both.chunk(2, 1), *out.chunk(2, 1)), grad.numel()
    _backward[(triton.cdiv(size, _BLOCK),)](grad, *parts, size, width, 2 * width, BLOCK=_BLOCK)
    return out
