"""Pages of the KV cache in Triton: loads of one, and the new token's key and value. `shape` is the kernel's."""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.token_heads import in_fp8, power_scale, rotated


@triton.jit
def load_page(cache, pages, head, first, end, shape: tl.constexpr):
    """Keys in two halves [D / 2, PAGE] and values [PAGE, D] of the tokens from `first` to `end`, at most one page."""
    half, whole, token = tl.arange(0, shape.half_block), tl.arange(0, shape.dim_block), tl.arange(0, shape.page)
    page = tl.load(pages + first // shape.page, first < end, other=0).to(tl.int64)
    place = cache.data + (page * 2 * shape.kv + head) * shape.page * shape.dim
    exists = first + token < end
    keys = place + token[None, :] * shape.dim + half[:, None]
    mask = (half < shape.dim // 2)[:, None] & exists[None, :]
    values = place + shape.kv * shape.page * shape.dim + token[:, None] * shape.dim + whole[None, :]
    k1 = tl.load(keys, mask, other=0.0)
    k2 = tl.load(keys + shape.dim // 2, mask, other=0.0)
    return k1, k2, tl.load(values, exists[:, None] & (whole < shape.dim)[None, :], other=0.0)


@triton.jit
def load_scales(cache, pages, head, first, end, shape: tl.constexpr):
    """The scales [PAGE] of the keys and of the values that `load_page` loads; 1 if they aren't in FP8."""
    if shape.rounded:
        token = tl.arange(0, shape.page)
        page = tl.load(pages + first // shape.page, first < end, other=0).to(tl.int64)
        place = cache.scales + (page * 2 * shape.kv + head) * shape.page + token
        exists = first + token < end
        return tl.load(place, exists, other=0.0), tl.load(place + shape.kv * shape.page, exists, other=0.0)
    else:  # Triton would also compile what follows the block
        return 1.0, 1.0


@triton.jit
def append(token, cache, pages, head, position, c, s, norms, shape: tl.constexpr, STORES: tl.constexpr):
    """Store the new token's key and value in the cache; returns the key in two halves [1, D / 2] and the value [D], as
    the cache has them.
    """
    half, whole = tl.arange(0, shape.half_block), tl.arange(0, shape.dim_block)
    in_half = (half < shape.dim // 2)[None, :]
    key = token + shape.keys + head * shape.dim + half[None, :]
    dtype: tl.constexpr = token.dtype.element_ty
    k1, k2 = rotated(
        key, in_half, half, c, s, norms.key, norms.eps,
        shape.dim, shape.rotary, shape.normed, shape.norm_offset, dtype,
    )  # fmt: skip
    value = tl.load(token + shape.keys + (shape.kv + head) * shape.dim + whole, whole < shape.dim, other=0.0)
    kept: tl.constexpr = cache.data.dtype.element_ty
    s1, s2, stored = k1, k2, value
    if shape.rounded:
        peak = tl.maximum(tl.max(tl.abs(k1.to(tl.float32)), axis=1), tl.max(tl.abs(k2.to(tl.float32)), axis=1))
        k_scale, k_inverse = power_scale(peak)
        v_scale, v_inverse = power_scale(tl.max(tl.abs(value.to(tl.float32)), axis=0))
        s1, k1 = in_fp8(k1, k_scale[:, None], k_inverse[:, None], kept)
        s2, k2 = in_fp8(k2, k_scale[:, None], k_inverse[:, None], kept)
        stored, value = in_fp8(value, v_scale, v_inverse, kept)
    if STORES:
        page = tl.load(pages + position // shape.page).to(tl.int64)
        number = (page * 2 * shape.kv + head) * shape.page + position % shape.page
        place = cache.data + number * shape.dim
        tl.store(place + half[None, :], s1, in_half)
        tl.store(place + shape.dim // 2 + half[None, :], s2, in_half)
        tl.store(place + shape.kv * shape.page * shape.dim + whole, stored, whole < shape.dim)
        if shape.rounded:
            tl.store(cache.scales + number + tl.arange(0, 1), k_scale)
            tl.store(cache.scales + number + shape.kv * shape.page, v_scale)
    return k1, k2, value
