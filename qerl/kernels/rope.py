"""Rotary embeddings of queries and keys in Triton, forward and backward, computed in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    x, out, token, stride, half, in_half, c1, c2, s1, s2,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, DIM: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Write one token's heads, rotated."""
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    mask = (head < HEADS) & in_half
    place = head * DIM + half
    x1, x2 = halves(x + token * stride, place, mask, DIM)
    y1, y2 = rotated(x1, x2, c1, c2, s1, s2, BACK)
    store_halves(y1, y2, out + token * (HEADS * DIM), place, mask, DIM)


@triton.jit
def _rotate(
    query, key, cos, sin, query_out, key_out, query_stride, key_stride,
    QUERY: tl.constexpr, QUERY_BLOCK: tl.constexpr, KV: tl.constexpr, KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = half < DIM // 2
    c1, c2 = halves(cos + token * DIM, half, in_half, DIM)
    s1, s2 = halves(sin + token * DIM, half, in_half, DIM)
    _turn(query, query_out, token, query_stride, half, in_half, c1, c2, s1, s2, QUERY, QUERY_BLOCK, DIM, BACK)
    _turn(key, key_out, token, key_stride, half, in_half, c1, c2, s1, s2, KV, KV_BLOCK, DIM, BACK)


def with_whole_rows(x: Tensor) -> Tensor:
    """x [L, heads, D] with the heads of a token contiguous; tokens may have a larger stride."""
    return x if x[0].is_contiguous() else x.contiguous()


def launch_of(query: Tensor, key: Tensor) -> dict[str, int]:
    """Sizes of a launch with a program for each token of queries and keys [L, heads, D]."""
    (_, heads, dim), kv = query.shape, key.shape[1]
    blocks = [triton.next_power_of_2(size) for size in (heads, kv, dim // 2)]
    sizes = {"QUERY": heads, "QUERY_BLOCK": blocks[0], "KV": kv, "KV_BLOCK": blocks[1], "DIM": dim}
    return sizes | {"HALF_BLOCK": blocks[2], "num_warps": min(max(blocks[0] * blocks[2] // 512, 1), 16)}


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """x cos + rotate_half(x) sin for queries and keys [L, heads, D], with cos and sin [L, D]; contiguous, same dtypes.

    With `back` it maps gradients of the outputs to gradients of the inputs, by the transposed matrix.
    """
    tokens, _, dim = query.shape
    assert key.shape[::2] == cos.shape == sin.shape == (tokens, dim)
    assert dim % 2 == 0
    query, key = with_whole_rows(query), with_whole_rows(key)
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)]
    _rotate[(tokens,)](
        query, key, cos.contiguous(), sin.contiguous(), *outs, query.stride(0), key.stride(0),
        BACK=back, **launch_of(query, key),
    )  # fmt: skip
    return outs[0], outs[1]
