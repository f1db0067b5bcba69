"""RMSNorm in Triton; `qerl.kernels.reference` has the PyTorch version."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.launch import begin, dependent


@triton.jit
def _rms_norm(
    x, weight, noise, out, width, eps,
    NOISY: tl.constexpr, OFFSET: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    if NOISY:
        scale += tl.load(noise + column, mask, other=0.0)
    if OFFSET != 0:
        scale += OFFSET
    begin(PDL)
    wide = tl.load(x + row * width + column, mask, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)
    place, result = out + row * width + column, (scale * normed).to(out.dtype.element_ty)
    if ADDS:
        result = (result.to(tl.float32) + tl.load(place, mask, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(place, result, mask)


def rms_norm(
    x: Tensor, weight: Tensor, noise: Tensor | None, eps: float, offset: float = 0.0, to: Tensor | None = None
) -> Tensor:
    """See `reference.rms_norm`."""
    out = torch.empty_like(x) if to is None else to
    block = triton.next_power_of_2(x.shape[1])
    _rms_norm[(len(x),)](
        x,
        weight,
        weight if noise is None else noise,
        out,
        x.shape[1],
        eps,
        NOISY=noise is not None,
        OFFSET=offset,
        ADDS=to is not None,
        BLOCK=block,
        num_warps=8 if block > 1024 else 4,
        **dependent(x.device),
    )
    return out
