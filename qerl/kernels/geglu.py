"""GeGLU and the clamped GLU of gpt-oss in Triton; `qerl.kernels.reference` has the PyTorch versions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.launch import begin, dependent

_BLOCK = 1024
#: The constants of gelu's approximation x (1 + tanh(ROOT (x + CUBE x^3))) / 2, and (1 + tanh u) / 2 is sigmoid(2 u).
_ROOT = tl.constexpr(0.7978845608028654)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def _geglu(both, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    begin(PDL)
    gate = tl.load(both + row * 2 * width + column, mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask, other=0.0).to(tl.float32)
    # A constant on the right, since the interpreter of Triton 3.8 has no product with one on the left.
    gelu = gate * tl.sigmoid((gate + gate * _CUBE * gate * gate) * (2.0 * _ROOT))
    tl.store(out + row * width + column, (gelu * up).to(out.dtype.element_ty), mask)


def geglu(both: Tensor) -> Tensor:
    """See `reference.geglu`."""
    rows, width = len(both), both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    _geglu[(rows, triton.cdiv(width, _BLOCK))](both, out, width, BLOCK=_BLOCK, num_warps=4, **dependent(both.device))
    return out


@triton.jit
def _clamped_glu(both, out, width, alpha, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    begin(PDL)
    gate = tl.load(both + row * 2 * width + 2 * column, mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + 2 * column + 1, mask, other=0.0).to(tl.float32)
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    y = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask)


def clamped_glu(both: Tensor, alpha: float, limit: float) -> Tensor:
    """See `reference.clamped_glu`."""
    rows, width = len(both), both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    _clamped_glu[(rows, triton.cdiv(width, _BLOCK))](
        both, out, width, alpha, limit, BLOCK=_BLOCK, num_warps=4, **dependent(both.device)
    )
    return out
