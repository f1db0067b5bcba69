"""RMSNorm of each head of queries and keys, then rotary positions, in Triton: one pass over memory in each direction.

Both are computed in float32 and rounded once. The backward pass computes the norm again, from the saved input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.rope import halves, launch_of, rotated, store_halves, with_whole_rows


@triton.jit
def _turn(
    x, grad, weight, out, token, stride, grad_stride, half, in_half, c1, c2, s1, s2, eps,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, DIM: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Write one token's heads, normalised and rotated; with BACK the gradient of x, of that of the output."""
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    mask = (head < HEADS) & in_half
    place = head * DIM + half
    x1, x2 = halves(x + token * stride, place, mask, DIM)
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
    store_halves(y1, y2, out + token * (HEADS * DIM), place, mask, DIM)


@triton.jit
def _rotate_normed(
    query, key, of_query, of_key, query_weight, key_weight, cos, sin, query_out, key_out,
    query_stride, key_stride, of_query_stride, of_key_stride, eps,
    QUERY: tl.constexpr, QUERY_BLOCK: tl.constexpr, KV: tl.constexpr, KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = half < DIM // 2
    c1, c2 = halves(cos + token * DIM, half, in_half, DIM)
    s1, s2 = halves(sin + token * DIM, half, in_half, DIM)
    _turn(
        query, of_query, query_weight, query_out, token, query_stride, of_query_stride, half, in_half, c1, c2, s1, s2,
        eps, QUERY, QUERY_BLOCK, DIM, BACK,
    )  # fmt: skip
    _turn(
        key, of_key, key_weight, key_out, token, key_stride, of_key_stride, half, in_half, c1, c2, s1, s2,
        eps, KV, KV_BLOCK, DIM, BACK,
    )  # fmt: skip


def rotate_normed(
    query: Tensor,
    key: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    grads: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys [L, heads, D], each head normalised with the weights [D] of its kind, then rotated.

    cos and sin are [L, D]. With `grads`, gradients of these outputs, it returns the gradients of queries and keys
    instead. Outputs are contiguous and have the dtypes of the inputs.
    """
    assert key.shape[::2] == cos.shape == sin.shape == query.shape[::2]
    assert query.shape[2] % 2 == 0
    query, key = with_whole_rows(query), with_whole_rows(key)
    of_query, of_key = (query, key) if grads is None else map(with_whole_rows, grads)  # the former aren't read
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)]
    _rotate_normed[(len(query),)](
        query, key, of_query, of_key, *weights, cos.contiguous(), sin.contiguous(), *outs,
        query.stride(0), key.stride(0), of_query.stride(0), of_key.stride(0), eps,
        BACK=grads is not None, **launch_of(query, key),
    )  # fmt: skip
    return outs[0], outs[1]
