"""The heads of a token in Triton, for kernels of decode steps and of prompts: norms, rotation, FP8, sinks."""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels import kv_cache

_EXPONENT, _SMALLEST = tl.constexpr(kv_cache.EXPONENT), tl.constexpr(kv_cache.SMALLEST)
_LARGEST = tl.constexpr(kv_cache.LARGEST)


@triton.jit
def in_halves(place, half, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """The places of both halves' elements in a head of which the first ROTARY rotate; `place` is that of `half`."""
    if ROTARY == DIM:
        return place, place + DIM // 2
    turns = half < ROTARY // 2
    return place + tl.where(turns, 0, ROTARY // 2), place + tl.where(turns, ROTARY // 2, DIM // 2)


@triton.jit
def _normed(
    first, second, weight, half, inside, eps,
    DIM: tl.constexpr, ROTARY: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """RMSNorm of heads in two halves [N, D / 2]. Without an offset it rounds before the weight is applied, as Qwen3."""
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(square / DIM + eps)[:, None]
    p1, p2 = in_halves(weight + half, half, DIM, ROTARY)
    w1 = tl.load(p1, inside, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(p2, inside, other=0.0).to(tl.float32)[None, :]
    if OFFSET != 0:
        first = (first * scale * (w1 + OFFSET)).to(dtype).to(tl.float32)
        second = (second * scale * (w2 + OFFSET)).to(dtype).to(tl.float32)
    else:
        first = ((first * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def rotated(
    place, mask, half, c, s, weight, eps,
    DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Heads at `place` [N, D / 2], which is `half` behind their first elements, normalised and rotated, in halves."""
    p1, p2 = in_halves(place, half[None, :], DIM, ROTARY)
    first = tl.load(p1, mask, other=0.0).to(tl.float32)
    second = tl.load(p2, mask, other=0.0).to(tl.float32)
    if NORM:
        first, second = _normed(first, second, weight, half, half < DIM // 2, eps, DIM, ROTARY, OFFSET, dtype)
    return (first * c - second * s).to(dtype), (second * c + first * s).to(dtype)


@triton.jit
def angles(cos, sin, position, half, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Cosines and sines of a position [1, D / 2], or of positions [N, 1]; 1 and 0 for elements that don't rotate."""
    turns = (half < ROTARY // 2)[None, :]
    still: tl.constexpr = 0.0 if ROTARY == DIM else 1.0
    angle = position * (ROTARY // 2) + half[None, :]
    c = tl.load(cos + angle, turns, other=still).to(tl.float32)
    return c, tl.load(sin + angle, turns, other=0.0).to(tl.float32)


@triton.jit
def power_scale(peak):
    """The scale, and its inverse, of elements of which the largest is `peak`, as `kv_cache.rounded`."""
    bits = tl.maximum(peak, _SMALLEST).to(tl.int32, bitcast=True) & _EXPONENT
    inverse = (2 * 127 << 23) - bits
    return bits.to(tl.float32, bitcast=True) / _LARGEST, inverse.to(tl.float32, bitcast=True) * _LARGEST


@triton.jit
def in_fp8(x, scale, inverse, kept: tl.constexpr):
    """x in the cache's dtype `kept`, and as it is read from there.

    The latter is rounded in float32: Triton 3.6 reads half of the elements wrongly if it converts from FP8 what it has
    just converted to it, four elements a thread.
    """
    wide = x.to(tl.float32) * inverse
    # Numbers of E4M3 are multiples of 1/8 of the power of two below them, and at least of 2^-9. Adding 1.5 * 2^23 times
    # that step rounds to a multiple of it, ties to even.
    power = (wide.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, 2.0**-6) * (1.5 * 2.0**20)
    rounded = (wide + magic) - magic
    return rounded.to(kept), (rounded * scale).to(x.dtype)


@triton.jit
def sink_weight(sinks, head, mask, highest):
    """The weight exp(sink) of heads beside others of their scores, of which `highest` has weight 1, in units of log2.

    It adds to the sum of weights alone. It may be infinite, which leaves nothing for the tokens.
    """
    return tl.exp2(tl.load(sinks + head, mask, other=0.0).to(tl.float32) * 1.4426950408889634 - highest)
