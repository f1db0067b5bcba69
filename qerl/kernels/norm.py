"""RMSNorm in Triton; `qerl.kernels.reference` has the PyTorch version."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.geometry import Norm
from qerl.kernels.launch import begin, dependent


@triton.jit
def _scale(weight, noise, column, mask, NOISY: tl.constexpr, OFFSET: tl.constexpr):
    scale = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    if NOISY:
        scale += tl.load(noise + column, mask, other=0.0)
    if OFFSET != 0:
        scale += OFFSET
    return scale


@triton.jit
def _normed(x, scale, width, eps, dtype: tl.constexpr):
    wide = x.to(tl.float32)
    return (scale * (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps))).to(dtype)


@triton.jit
def _rms_norm(
    x, weight, noise, out, width, eps,
    NOISY: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    place, mask = tl.program_id(0) * width + column, column < width
    scale = _scale(weight, noise, column, mask, NOISY, OFFSET)
    begin(PDL)
    normed = _normed(tl.load(x + place, mask, other=0.0), scale, width, eps, out.dtype.element_ty)
    tl.store(out + place, normed, mask)


@triton.jit
def _add_normed(
    x, weight, noise, to, then_weight, then_noise, out, width, eps, then_eps,
    NOISY: tl.constexpr, OFFSET: tl.constexpr, THEN_NOISY: tl.constexpr, THEN_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    place, mask = tl.program_id(0) * width + column, column < width
    scale = _scale(weight, noise, column, mask, NOISY, OFFSET)
    then_scale = _scale(then_weight, then_noise, column, mask, THEN_NOISY, THEN_OFFSET)
    dtype: tl.constexpr = to.dtype.element_ty
    begin(PDL)
    wide, before = tl.load(x + place, mask, other=0.0), tl.load(to + place, mask, other=0.0)
    added = _normed(wide, scale, width, eps, dtype)
    total = (before.to(tl.float32) + added.to(tl.float32)).to(dtype)
    tl.store(to + place, total, mask)
    tl.store(out + place, _normed(total, then_scale, width, then_eps, dtype), mask)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """See `reference.rms_norm`."""
    out = torch.empty_like(x)
    _rms_norm[(len(x),)](
        x, *_tensors(norm), out, x.shape[1], norm.eps,
        NOISY=norm.noise is not None, OFFSET=norm.offset, **_block(x),
    )  # fmt: skip
    return out


def add_normed(to: Tensor, x: Tensor, norm: Norm, then: Norm) -> Tensor:
    """See `reference.add_normed`."""
    out = torch.empty_like(x)
    _add_normed[(len(x),)](
        x, *_tensors(norm), to, *_tensors(then), out, x.shape[1], norm.eps, then.eps,
        NOISY=norm.noise is not None, OFFSET=norm.offset,
        THEN_NOISY=then.noise is not None, THEN_OFFSET=then.offset, **_block(x),
    )  # fmt: skip
    return out


def _tensors(norm: Norm) -> tuple[Tensor, Tensor]:
    """The weight and the noise, or a tensor that isn't read in its place."""
    return norm.weight, norm.weight if norm.noise is None else norm.noise


def _block(x: Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(x.shape[1])
    return {"BLOCK": block, "num_warps": 8 if block > 1024 else 4, **dependent(x.device)}
