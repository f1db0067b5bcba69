"""RMSNorm in Triton, with A x of the product behind it; `qerl.kernels.reference` has it in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.geometry import Shrink
from qerl.kernels.launch import begin, dependent, let_next_start, wait_for_earlier


@triton.jit
def _scale(weight, noise, column, held, NOISY: tl.constexpr):
    scale = tl.load(weight + column, held, other=0.0).to(tl.float32)
    if NOISY:
        scale += tl.load(noise + column, held, other=0.0)
    return scale


@triton.jit
def _normed(wide, scale, width, eps):
    return scale * (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps))


@triton.jit
def _rms_norm(x, weight, noise, out, width, eps, NOISY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    held = column < width
    scale = _scale(weight, noise, column, held, NOISY)
    begin(PDL)
    wide = tl.load(x + row * width + column, held, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, _normed(wide, scale, width, eps).to(out.dtype.element_ty), held)


@triton.jit
def _rows_of_a(a, factors, first, column, held, width, COUNT: tl.constexpr):
    member = first + tl.arange(0, COUNT)
    rows = tl.load(a + member[:, None] * width + column[None, :], held[None, :], other=0.0)
    return rows, tl.load(factors + member)


@triton.jit
def _rms_norm_shrink(
    x, weight, noise, out, a, factors, shrunk, width, rank, eps,
    COUNT: tl.constexpr, STEPS: tl.constexpr, NOISY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies the norm of a row of x with STEPS times COUNT rows of A; the first are there before x is."""
    row, part = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    column = tl.arange(0, BLOCK)
    held = column < width
    first = part * (STEPS * COUNT)
    next_a, next_factors = _rows_of_a(a, factors, first, column, held, width, COUNT)
    scale = _scale(weight, noise, column, held, NOISY)
    wait_for_earlier(PDL)
    wide = tl.load(x + row * width + column, held, other=0.0).to(tl.float32)
    normed = _normed(wide, scale, width, eps).to(out.dtype.element_ty)
    if part == 0:
        tl.store(out + row * width + column, normed, held)
    for step in range(STEPS):
        of_a, of_factors = next_a, next_factors
        here = first + step * COUNT
        if step + 1 < STEPS:
            next_a, next_factors = _rows_of_a(a, factors, here + COUNT, column, held, width, COUNT)
        # Of the rounded values, which the product reads.
        sums = tl.sum(of_a.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1) * of_factors
        tl.store(shrunk + row * rank + here + tl.arange(0, COUNT), sums.to(shrunk.dtype.element_ty))


#: Rows of A that `Shrink` has a multiple of.
_RANK_UNIT = 16
#: More programs than multiprocessors would wait for each other, and the next kernel for all: each takes more of A then.
_PROGRAMS = 132
#: Warps, and registers of a thread, with which a program fits onto a multiprocessor beside a product's thread block.
_BESIDE = {"num_warps": 8, "maxnreg": 120}


def rms_norm(x: Tensor, weight: Tensor, noise: Tensor | None, eps: float, ahead: Shrink | None = None) -> Tensor:
    """See `reference.rms_norm`."""
    out = torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    tensors = x, weight, weight if noise is None else noise, out
    options = {"NOISY": noise is not None, "BLOCK": block, **dependent(x.device)}
    if ahead is None:
        _rms_norm[(rows,)](*tensors, width, eps, num_warps=8 if block > 1024 else 4, **options)
        return out
    rank, most = len(ahead.a), 4 if block <= 4096 else 2  # what the registers hold
    count = min(most, triton.next_power_of_2(triton.cdiv(rows * rank, _PROGRAMS)))
    steps = 1 if rows * rank <= _PROGRAMS * count else _RANK_UNIT // count
    _rms_norm_shrink[(rows, rank // (count * steps))](
        *tensors, ahead.a, ahead.factors, ahead.out, width, rank, eps, COUNT=count, STEPS=steps, **_BESIDE, **options
    )
    return out
