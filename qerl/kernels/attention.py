"""A decode step's attention in Triton; `qerl.kernels.reference` has it in PyTorch.

A program attends for the query heads of one KV head to some pages of one sequence; a second launch combines these
splits in their order. With enough sequences to keep the GPU busy a program attends to a whole one, and there is nothing
to combine. The program that holds the new token rotates its key and appends it to the cache. What it computes depends
on its sequence and on the size of the batch, not on the other sequences.

Only qkv comes from the kernel before: slots, tables and older tokens are there since the step began, with kernels that
nothing overtakes. So a split, of few pages, has the first on its way while qkv is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.geometry import Heads
from qerl.kernels.launch import dependent, let_next_start, wait_for_earlier
from qerl.kernels.slots import DecodeState

#: Programs that a multiprocessor has at least, where each attends to a whole sequence: half of them may have none.
_LEAST_PROGRAMS = 0.5
#: Shared memory for pages, in bytes, and how many it holds at most: one that is attended to, two on their way. A split
#: has one: most are of one page, and what they don't take is the next product's, whose weights are on their way.
_PAGES_BYTES, _MOST_PAGES, _SPLIT_PAGES = 200_000, 3, 1


@triton.jit
def _split_tokens(position, PAGE: tl.constexpr):
    """Tokens of a split of a sequence whose last token is at `position`: `geometry.pages_per_split`."""
    pages = position // PAGE + 1
    size = tl.where(pages <= 8, 1, tl.where(pages <= 32, 2, tl.where(pages <= 128, 4, tl.where(pages <= 512, 8, 16))))
    return size * PAGE


@triton.jit
def _normed(first, second, weight, half, inside, eps, DIM: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of heads in two halves [N, D / 2]; rounded before and after the weight, as Qwen3 does."""
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(square / DIM + eps)[:, None]
    w1 = tl.load(weight + half, inside, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + DIM // 2 + half, inside, other=0.0).to(tl.float32)[None, :]
    first = ((first * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _load_page(
    cache, pages, head, first, end, half, whole,
    KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Keys in two halves [D / 2, PAGE] and values [PAGE, D] of the tokens from `first` on, as far as there are any."""
    page = tl.load(pages + first // PAGE, first < end, other=0).to(tl.int64)
    place = cache + (page * 2 * KV + head) * PAGE * DIM
    token = tl.arange(0, PAGE)
    there = first + token < end
    keys = place + token[None, :] * DIM + half[:, None]
    mask = (half < DIM // 2)[:, None] & there[None, :]
    values = place + KV * PAGE * DIM + token[:, None] * DIM + whole[None, :]
    k1 = tl.load(keys, mask, other=0.0)
    k2 = tl.load(keys + DIM // 2, mask, other=0.0)
    return k1, k2, tl.load(values, there[:, None] & (whole < DIM)[None, :], other=0.0)


@triton.jit
def _attend_to_page(q1, q2, k1, k2, v, there, highest, total, summed, scale):
    """Go on with softmax(q k) v, in units of log2, over the tokens of a page that are `there`."""
    scores = tl.dot(q1, k1, input_precision="ieee") + tl.dot(q2, k2, input_precision="ieee")
    scores = tl.where(there[None, :], scores * scale, float("-inf"))
    rising = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - rising[:, None])
    fade = tl.exp2(highest - rising)
    total = total * fade + tl.sum(weights, axis=1)
    summed = summed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return rising, total, summed


@triton.jit
def _attend(
    qkv, cache, rows, positions, pages, cos, sin, q_norm, k_norm, out, partial, top, mass, pages_stride, scale, eps,
    QUERY: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start(PDL)
    slot = tl.load(rows + row)
    position = tl.load(positions + slot)
    tokens = position + 1 if SPLITS == 1 else _split_tokens(position, PAGE)
    start = split * tokens
    end = tl.minimum(start + tokens, position)
    dtype: tl.constexpr = cache.dtype.element_ty
    member = tl.arange(0, GROUP_BLOCK)
    half = tl.arange(0, HALF_BLOCK)
    whole = tl.arange(0, DIM_BLOCK)
    in_half, in_whole = half < DIM // 2, whole < DIM
    query_head = row * QUERY + head * GROUP + member
    in_group = (member < GROUP)[:, None] & in_whole[None, :]
    if start > position:
        wait_for_earlier(PDL)
        if SPLITS == 1:
            nothing = tl.zeros([GROUP_BLOCK, DIM_BLOCK], out.dtype.element_ty)
            tl.store(out + query_head[:, None] * DIM + whole[None, :], nothing, in_group)
        return
    pages += slot * pages_stride
    if SPLITS > 1:
        k1, k2, v = _load_page(cache, pages, head, start, end, half, whole, KV, DIM, PAGE)
    angle = position * (DIM // 2) + half
    c = tl.load(cos + angle, in_half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, in_half, other=0.0).to(tl.float32)[None, :]
    wait_for_earlier(PDL)

    token = qkv + row * (QUERY + 2 * KV) * DIM
    query = token + (head * GROUP + member)[:, None] * DIM + half[None, :]
    q_mask = (member < GROUP)[:, None] & in_half[None, :]
    q1 = tl.load(query, q_mask, other=0.0).to(tl.float32)
    q2 = tl.load(query + DIM // 2, q_mask, other=0.0).to(tl.float32)
    if NORM:
        q1, q2 = _normed(q1, q2, q_norm, half, in_half, eps, DIM, dtype)
    r1 = (q1 * c - q2 * s).to(dtype)
    r2 = (q2 * c + q1 * s).to(dtype)

    highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    summed = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    if start + tokens > position:
        key = token + (QUERY + head) * DIM + half[None, :]
        n1 = tl.load(key, in_half[None, :], other=0.0).to(tl.float32)
        n2 = tl.load(key + DIM // 2, in_half[None, :], other=0.0).to(tl.float32)
        if NORM:
            n1, n2 = _normed(n1, n2, k_norm, half, in_half, eps, DIM, dtype)
        m1 = (n1 * c - n2 * s).to(dtype)
        m2 = (n2 * c + n1 * s).to(dtype)
        value = tl.load(token + (QUERY + KV + head) * DIM + whole, in_whole, other=0.0)
        page = tl.load(pages + position // PAGE).to(tl.int64)
        place = cache + ((page * 2 * KV + head) * PAGE + position % PAGE) * DIM
        tl.store(place + half[None, :], m1, in_half[None, :])
        tl.store(place + DIM // 2 + half[None, :], m2, in_half[None, :])
        tl.store(place + KV * PAGE * DIM + whole, value, in_whole)
        products = r1.to(tl.float32) * m1.to(tl.float32) + r2.to(tl.float32) * m2.to(tl.float32)
        highest = tl.sum(products, axis=1) * scale
        total += 1.0
        summed += value.to(tl.float32)[None, :]

    token_in_page = tl.arange(0, PAGE)
    if SPLITS > 1:
        there = start + token_in_page < end
        highest, total, summed = _attend_to_page(r1, r2, k1, k2, v, there, highest, total, summed, scale)
        start += PAGE
    # Most splits are of one page: they needn't begin to copy others.
    if start < end:
        for first in tl.range(start, end, PAGE, num_stages=STAGES):
            k1, k2, v = _load_page(cache, pages, head, first, end, half, whole, KV, DIM, PAGE)
            there = first + token_in_page < end
            highest, total, summed = _attend_to_page(r1, r2, k1, k2, v, there, highest, total, summed, scale)

    if SPLITS == 1:
        result = (summed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + query_head[:, None] * DIM + whole[None, :], result, in_group)
    else:
        part = query_head * SPLITS + split
        tl.store(partial + part[:, None] * DIM + whole[None, :], summed, in_group)
        tl.store(top + part, highest, member < GROUP)
        tl.store(mass + part, total, member < GROUP)


@triton.jit
def _combine(
    rows, positions, partial, top, mass, out,
    QUERY: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    position = tl.load(positions + tl.load(rows + row))
    wait_for_earlier(PDL)
    whole = tl.arange(0, DIM_BLOCK)
    inside = whole < DIM
    highest = -float("inf")
    total = 0.0
    summed = tl.zeros([DIM_BLOCK], tl.float32)
    # Eight splits are read together; the order of additions depends on nothing else.
    member = tl.arange(0, 8)
    used = tl.where(position < 0, 0, position // _split_tokens(position, PAGE) + 1)
    first = (row * QUERY + head) * SPLITS
    for start in range(0, used, 8):
        there = start + member < used
        part = first + start + member
        here = tl.load(top + part, there, other=-float("inf"))
        masses = tl.load(mass + part, there, other=0.0)
        values = tl.load(partial + part[:, None] * DIM + whole[None, :], there[:, None] & inside[None, :], other=0.0)
        rising = tl.maximum(highest, tl.max(here, axis=0))
        fade, weight = tl.exp2(highest - rising), tl.exp2(here - rising)
        total = total * fade + tl.sum(masses * weight, axis=0)
        summed = summed * fade + tl.sum(values * weight[:, None], axis=0)
        highest = rising
    result = tl.where(position < 0, 0.0, summed / total)
    tl.store(out + (row * QUERY + head) * DIM + whole, result.to(out.dtype.element_ty), inside)


def attend(
    qkv: Tensor, cache: Tensor, state: DecodeState, rows: Tensor, rope: tuple[Tensor, Tensor], heads: Heads, splits: int
) -> Tensor:
    """See `reference.attend`; `splits` is `geometry.splits_of` the pages that a sequence may have."""
    batch, device = len(rows), qkv.device
    if batch * heads.kv >= _LEAST_PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count:
        splits = 1
    out = qkv.new_empty(batch, heads.query * heads.dim)
    group = heads.query // heads.kv
    partial = torch.empty(batch, heads.query, splits, heads.dim, dtype=torch.float32, device=device)
    top, mass = torch.empty(2, batch, heads.query, splits, dtype=torch.float32, device=device)
    dim_block = triton.next_power_of_2(heads.dim)
    fitting = _PAGES_BYTES // (2 * cache.shape[-2] * dim_block * cache.element_size())
    common = {"QUERY": heads.query, "DIM": heads.dim, "PAGE": cache.shape[-2], "SPLITS": splits, **dependent(device)}
    _attend[(batch, heads.kv, splits)](
        qkv,
        cache,
        rows,
        state.position,
        state.pages,
        *rope,
        # Not read where there are none.
        qkv if heads.q_norm is None else heads.q_norm,
        qkv if heads.k_norm is None else heads.k_norm,
        out,
        partial,
        top,
        mass,
        state.pages.stride(0),
        # Scores are in units of log2.
        heads.scale * 1.4426950408889634,
        heads.eps,
        KV=heads.kv,
        GROUP=group,
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        HALF_BLOCK=max(16, dim_block // 2),
        DIM_BLOCK=max(16, dim_block),
        # Triton's pipeline has two for the number of a page and the page itself.
        STAGES=2 * min(fitting, _MOST_PAGES if splits == 1 else _SPLIT_PAGES) + 1,
        NORM=heads.q_norm is not None,
        num_warps=4,
        **common,
    )
    if splits > 1:
        _combine[(batch, heads.query)](
            rows, state.position, partial, top, mass, out, DIM_BLOCK=max(16, dim_block), num_warps=1, **common
        )
    return out
