"""The clamped GLU of gpt-oss in Triton; `qerl.kernels.reference` has the PyTorch version."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.launch import begin, dependent

_BLOCK = 1024


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
