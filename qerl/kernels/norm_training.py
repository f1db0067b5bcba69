"""RMSNorm of updates in Triton, forward and backward; `qerl.layers.noisy_norm` has the PyTorch versions.

Each takes one pass over memory; PyTorch takes one per operation, some on float32 copies of the hidden state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The most programs of a backward pass, each of which sums the weight's gradient over its rows. It is a constant, so
#: that the order of sums is the same on every GPU. With H = 3584 an H100 or H200 runs three per multiprocessor.
_PROGRAMS = 396


@triton.jit
def _forward(x, weight, out, inverses, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row.to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask, other=0.0)
    wide = tl.load(x + at + column, mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(inverses + row, inverse)
    tl.store(out + at + column, (scale * (wide * inverse)).to(out.dtype.element_ty), mask)


@triton.jit
def _backward(
    grad, x, weight, inverses, grad_x, grad_weights, rows, width, OF_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    at = program.to(tl.int64) * width
    for row in range(program, rows, programs):
        inverse = tl.load(inverses + row)
        normed = tl.load(x + at + column, mask, other=0.0).to(tl.float32) * inverse
        wide = tl.load(grad + at + column, mask, other=0.0).to(tl.float32)
        if OF_WEIGHT:
            total += wide * normed
        scaled = wide * scale
        along = tl.sum(scaled * normed) / width
        tl.store(grad_x + at + column, ((scaled - normed * along) * inverse).to(grad_x.dtype.element_ty), mask)
        at += programs.to(tl.int64) * width
    if OF_WEIGHT:
        tl.store(grad_weights + program.to(tl.int64) * width + column, total, mask)


def _launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": 4 if block <= 1024 else 8 if block <= 4096 else 16}


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [..., H] with a float32 weight [H], in the dtype of x, and the inverse rms [rows] in float32."""
    x, width = x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    out, inverses = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    _forward[(rows,)](x, weight, out, inverses, width, eps, **_launch(width))
    return out, inverses


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverses: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x, in its dtype, and with `of_weight` of the weight in float32; deterministic."""
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows = len(inverses)
    programs = min(_PROGRAMS, rows)
    grad_x = torch.empty_like(x)
    parts = torch.empty(programs if of_weight else 0, width, dtype=torch.float32, device=x.device)
    _backward[(programs,)](grad, x, weight, inverses, grad_x, parts, rows, width, OF_WEIGHT=of_weight, **_launch(width))
    return grad_x, parts.sum(0) if of_weight else None
