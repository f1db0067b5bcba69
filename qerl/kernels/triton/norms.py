"""Norms, rotary positions and gates of MLPs in Triton, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.state import Norm
from qerl.kernels.triton.launch import begin, dependent, kernel

# RMSNorm in Triton; `qerl.kernels.reference` has the PyTorch version.


@triton.jit
def _scale(weight, noise, runs, column, width, mask, NOISY: tl.constexpr, OFFSET: tl.constexpr, RUNS: tl.constexpr):
    if RUNS:  # a row of weights and noise for each run
        first = tl.load(runs + tl.program_id(0)) * width
        weight, noise = weight + first, noise + first
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


@kernel
def _rms_norm(
    x, weight, noise, runs, out, width, eps,
    NOISY: tl.constexpr, OFFSET: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    place, mask = tl.program_id(0) * width + column, column < width
    scale = _scale(weight, noise, runs, column, width, mask, NOISY, OFFSET, RUNS)
    begin(PDL)
    normed = _normed(tl.load(x + place, mask, other=0.0), scale, width, eps, out.dtype.element_ty)
    tl.store(out + place, normed, mask)


@kernel
def _add_normed(
    x, weight, noise, runs, to, then_weight, then_noise, then_runs, out, width, eps, then_eps,
    NOISY: tl.constexpr, OFFSET: tl.constexpr, RUNS: tl.constexpr,
    THEN_NOISY: tl.constexpr, THEN_OFFSET: tl.constexpr, THEN_RUNS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    place, mask = tl.program_id(0) * width + column, column < width
    scale = _scale(weight, noise, runs, column, width, mask, NOISY, OFFSET, RUNS)
    then_scale = _scale(then_weight, then_noise, then_runs, column, width, mask, THEN_NOISY, THEN_OFFSET, THEN_RUNS)
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
        NOISY=norm.noise is not None, OFFSET=norm.offset, RUNS=norm.runs is not None, **_block(x),
    )  # fmt: skip
    return out


def add_normed(to: Tensor, x: Tensor, norm: Norm, next_norm: Norm) -> Tensor:
    """See `reference.add_normed`."""
    out = torch.empty_like(x)
    _add_normed[(len(x),)](
        x, *_tensors(norm), to, *_tensors(next_norm), out, x.shape[1], norm.eps, next_norm.eps,
        NOISY=norm.noise is not None, OFFSET=norm.offset, RUNS=norm.runs is not None,
        THEN_NOISY=next_norm.noise is not None, THEN_OFFSET=next_norm.offset, THEN_RUNS=next_norm.runs is not None,
        **_block(x),
    )  # fmt: skip
    return out


def _tensors(norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """The weight, the noise and the rows' runs; tensors that aren't read in place of the latter two."""
    noise, runs = norm.noise, norm.runs
    return norm.weight, norm.weight if noise is None else noise, norm.weight if runs is None else runs.rows


def _block(x: Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(x.shape[1])
    return {"BLOCK": block, "num_warps": 8 if block > 1024 else 4, **dependent(x.device)}


# RMSNorm of updates in Triton, forward and backward; `qerl.models.blocks` has the PyTorch versions.
#
# Each takes one pass over memory; PyTorch takes one per operation, some on float32 copies of the hidden state.

#: The most programs of a backward pass, each of which sums the weight's gradient over its rows. It is a constant, so
#: that the order of sums is the same on every GPU. With H = 3584 an H100 or H200 runs three per multiprocessor.
_PROGRAMS = 396


@kernel
def _norm_forward(x, weight, out, inverses, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row.to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask, other=0.0)
    wide = tl.load(x + at + column, mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(inverses + row, inverse)
    tl.store(out + at + column, (scale * (wide * inverse)).to(out.dtype.element_ty), mask)


@kernel
def _norm_backward(
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


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [..., H] with a float32 weight [H], in the dtype of x, and the inverse rms [rows] in float32."""
    x, width = x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    out, inverses = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    _norm_forward[(rows,)](x, weight, out, inverses, width, eps, **_launch(width))
    return out, inverses


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverses: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x, in its dtype, and with `needs_weight` of the weight in float32; deterministic."""
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows = len(inverses)
    programs = min(_PROGRAMS, rows)
    grad_x = torch.empty_like(x)
    parts = torch.empty(programs if needs_weight else 0, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        grad, x, weight, inverses, grad_x, parts, rows, width, OF_WEIGHT=needs_weight, **_launch(width)
    )
    return grad_x, parts.sum(0) if needs_weight else None


# Rotary embeddings of queries and keys in Triton, after an RMSNorm of each head where a model has one.
#
# Both are computed in float32 and rounded once, in one pass over memory in each direction. The backward pass computes
# the norm again, from the saved input.


@triton.jit
def halves(x, place, mask, DIM: tl.constexpr):
    """The elements of x at `place` and those half a head of DIM further, in float32."""
    first = tl.load(x + place, mask, other=0.0).to(tl.float32)
    return first, tl.load(x + place + DIM // 2, mask, other=0.0).to(tl.float32)


@triton.jit
def rotated(x1, x2, c1, c2, s1, s2, BACK: tl.constexpr):
    """The halves of heads multiplied by [[c1, -s1], [s2, c2]], or with BACK by its transpose."""
    if BACK:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    return y1, y2


@triton.jit
def store_halves(y1, y2, out, place, mask, DIM: tl.constexpr):
    """Write halves in float32 to where `halves` would read them."""
    tl.store(out + place, y1.to(out.dtype.element_ty), mask)
    tl.store(out + place + DIM // 2, y2.to(out.dtype.element_ty), mask)


@triton.jit
def _turn(
    x, grad, weight, out, token, stride, grad_stride, half, in_half, c1, c2, s1, s2, eps,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Write one token's heads, with NORMED normalised, and rotated; with BACK the gradient of x, of that of the output.

    Without NORMED the gradient is read from x.
    """
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    mask = (head < HEADS) & in_half
    place = head * DIM + half
    x1, x2 = halves(x + token * stride, place, mask, DIM)
    if NORMED:
        w1 = tl.load(weight + half, in_half, other=0.0).to(tl.float32)
        w2 = tl.load(weight + DIM // 2 + half, in_half, other=0.0).to(tl.float32)
        inverse = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DIM + eps)[:, None]
        x1, x2 = x1 * inverse, x2 * inverse
        if BACK:
            g1, g2 = halves(grad + token * grad_stride, place, mask, DIM)
            y1, y2 = rotated(g1, g2, c1, c2, s1, s2, BACK)
            y1, y2 = y1 * w1, y2 * w2
            along = ((tl.sum(y1 * x1, 1) + tl.sum(y2 * x2, 1)) / DIM)[:, None]
            y1, y2 = (y1 - x1 * along) * inverse, (y2 - x2 * along) * inverse
        else:
            y1, y2 = rotated(x1 * w1, x2 * w2, c1, c2, s1, s2, BACK)
    else:
        y1, y2 = rotated(x1, x2, c1, c2, s1, s2, BACK)
    store_halves(y1, y2, out + token * (HEADS * DIM), place, mask, DIM)


@kernel
def _rotate(
    query, key, grad_query, grad_key, query_weight, key_weight, cos, sin, query_out, key_out,
    query_stride, key_stride, grad_query_stride, grad_key_stride, eps,
    QUERY: tl.constexpr, QUERY_BLOCK: tl.constexpr, KV: tl.constexpr, KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, NORMED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = half < DIM // 2
    c1, c2 = halves(cos + token * DIM, half, in_half, DIM)
    s1, s2 = halves(sin + token * DIM, half, in_half, DIM)
    _turn(
        query, grad_query, query_weight, query_out, token, query_stride, grad_query_stride,
        half, in_half, c1, c2, s1, s2, eps, QUERY, QUERY_BLOCK, DIM, NORMED, BACK,
    )  # fmt: skip
    _turn(
        key, grad_key, key_weight, key_out, token, key_stride, grad_key_stride,
        half, in_half, c1, c2, s1, s2, eps, KV, KV_BLOCK, DIM, NORMED, BACK,
    )  # fmt: skip


def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: Sequence[Tensor] = (),
    eps: float = 0.0,
    grads: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """x cos + rotate_half(x) sin for queries and keys [L, heads, D], with cos and sin [L, D]; contiguous, same dtypes.

    With `weights`, two of [D], each head of queries and of keys is normalised before. With `grads`, gradients of these
    outputs, it returns the gradients of queries and keys instead; these count only with `weights`.
    """
    tokens, heads, dim = query.shape
    kv = key.shape[1]
    assert key.shape[::2] == cos.shape == sin.shape == (tokens, dim)
    assert dim % 2 == 0
    if grads and not weights:
        query, key = grads
    query, key, grad_query, grad_key = map(_with_contiguous_heads, (query, key, *(grads or (query, key))))
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)]
    blocks = [triton.next_power_of_2(size) for size in (heads, kv, dim // 2)]
    _rotate[(tokens,)](
        # Placeholders, which aren't read without gradients and norms.
        query, key, grad_query, grad_key, *(weights or (query, key)), cos.contiguous(), sin.contiguous(), *outs,
        query.stride(0), key.stride(0), grad_query.stride(0), grad_key.stride(0), eps,
        QUERY=heads, QUERY_BLOCK=blocks[0], KV=kv, KV_BLOCK=blocks[1], DIM=dim, HALF_BLOCK=blocks[2],
        NORMED=len(weights) > 0, BACK=len(grads) > 0, num_warps=min(max(blocks[0] * blocks[2] // 512, 1), 16),
    )  # fmt: skip
    return outs[0], outs[1]


def _with_contiguous_heads(x: Tensor) -> Tensor:
    """x [L, heads, D] with the heads of a token contiguous; tokens may have a larger stride."""
    return x if x[0].is_contiguous() else x.contiguous()


# silu(gate) * up in Triton, forward and backward, computed in float32; `qerl.models.experts` has the PyTorch version.

_SWIGLU_BLOCK = 2048


@kernel
def _swiglu_forward(gate, up, out, size, width, stride, BLOCK: tl.constexpr):
    """Rows of gate and up are `stride` numbers apart, those of the output follow each other."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    read = place // width * stride + place % width
    wide = tl.load(gate + read, mask, other=0.0).to(tl.float32)
    factor = tl.load(up + read, mask, other=0.0).to(tl.float32)
    tl.store(out + place, (wide * tl.sigmoid(wide) * factor).to(out.dtype.element_ty), mask)


@kernel
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, size, width, stride, BLOCK: tl.constexpr):
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


def swiglu_forward(*tensors: Tensor) -> Tensor:
    """silu(gate) * up of two tensors of one shape and dtype, or [M, I] of one [M, 2 I] with both side by side."""
    gate, up, width, stride = _gate_and_up([tensor.contiguous() for tensor in tensors])
    out, size = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), gate.numel()
    _swiglu_forward[(triton.cdiv(size, _SWIGLU_BLOCK),)](gate, up, out, size, width, stride, BLOCK=_SWIGLU_BLOCK)
    return out


def swiglu_backward(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The gradient of each of the tensors of `swiglu_forward`, in its dtype."""
    grad, tensors = grad.contiguous(), tuple(tensor.contiguous() for tensor in tensors)
    grads, size = [torch.empty_like(tensor) for tensor in tensors], grad.numel()
    gate, up, width, stride = _gate_and_up(tensors)
    _swiglu_backward[(triton.cdiv(size, _SWIGLU_BLOCK),)](
        grad, gate, up, *_gate_and_up(grads)[:2], size, width, stride, BLOCK=_SWIGLU_BLOCK
    )
    return tuple(grads)


def _gate_and_up(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, int, int]:
    """Gate and up, the numbers of a row of either, and those from one row to the next; two tensors count as one row."""
    if len(tensors) == 1:
        gate, up = tensors[0].chunk(2, 1)
        return gate, up, gate.shape[1], 2 * gate.shape[1]
    gate, up = tensors
    return gate, up, gate.numel(), gate.numel()


# The clamped GLU of gpt-oss in Triton; `qerl.kernels.reference` has the PyTorch version.

_CLAMPED_GLU_BLOCK = 1024


@kernel
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
    _clamped_glu[(rows, triton.cdiv(width, _CLAMPED_GLU_BLOCK))](
        both, out, width, alpha, limit, BLOCK=_CLAMPED_GLU_BLOCK, num_warps=4, **dependent(both.device)
    )
    return out
