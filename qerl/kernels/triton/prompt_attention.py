"""Attention of prompts in Triton; `qerl.kernels.reference` has the PyTorch version.

The first launch normalises and rotates queries and keys in place, and copies keys and values into their pages. Where
these are in FP8, it rounds keys and values in place, too, so that attention reads what decode steps read. The second
computes attention: a program has some queries of one head of one prompt, and iterates over the keys up to them. With a
window it begins at the first key that one of them sees.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.packed_sequences import attend_packed
from qerl.kernels.reference import gated
from qerl.kernels.state import PAGE, QUERY_BLOCK, Heads, KVCache, PromptRow, Rope
from qerl.kernels.triton.attention import angles, in_fp8, in_halves, power_scale, rotated, sink_weight
from qerl.kernels.triton.launch import begin, dependent, kernel

#: Keys that a program reads at a time, and stages of its pipeline; the first pair that fits shared memory is used.
_READS = ((128, 3), (64, 3), (64, 2), (32, 2), (32, 1))
#: The score of keys outside of a window. Unlike -inf it may be a query's highest for a while: the first score of a key
#: in the window then makes all sums so far zero.
_OUTSIDE = tl.constexpr(-1e30)


@triton.jit
def _store_rounded(first, second, p1, p2, page, scales, mask, exists, DIM: tl.constexpr):
    """Store keys or values [N, D / 2] in two halves in FP8, and what is read from there in their own places."""
    peak = tl.maximum(tl.max(tl.abs(first.to(tl.float32)), axis=1), tl.max(tl.abs(second.to(tl.float32)), axis=1))
    scale, inverse = power_scale(peak)
    for_page, first = in_fp8(first, scale[:, None], inverse[:, None], page.dtype.element_ty)
    tl.store(page, for_page, mask)
    tl.store(p1, first, mask)
    for_page, second = in_fp8(second, scale[:, None], inverse[:, None], page.dtype.element_ty)
    tl.store(page + DIM // 2, for_page, mask)
    tl.store(p2, second, mask)
    tl.store(scales, scale, exists)


@kernel
def _rotate_and_store(
    qkv, cache, scales, positions, places, cos, sin, q_norm, k_norm, eps,
    QUERY: tl.constexpr, QUERY_BLOCK: tl.constexpr, KV: tl.constexpr, KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr, PITCH: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_BLOCK)
    in_half = half < DIM // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    begin(PDL)
    c, s = angles(cos, sin, tl.load(positions + token).to(tl.int64), half, DIM, ROTARY)
    place = tl.load(places + token).to(tl.int64)
    queries = qkv + token * (QUERY * PITCH + 2 * KV * DIM)
    keys = queries + QUERY * PITCH

    head = tl.arange(0, QUERY_BLOCK)
    mask = (head < QUERY)[:, None] & in_half[None, :]
    target = queries + head[:, None] * PITCH + half[None, :]
    first, second = rotated(target, mask, half, c, s, q_norm, eps, DIM, ROTARY, NORM, OFFSET, dtype)
    # A thread writes only elements that it has read.
    p1, p2 = in_halves(target, half[None, :], DIM, ROTARY)
    tl.store(p1, first, mask)
    tl.store(p2, second, mask)

    head = tl.arange(0, KV_BLOCK)
    mask = (head < KV)[:, None] & in_half[None, :]
    target = keys + head[:, None] * DIM + half[None, :]
    first, second = rotated(target, mask, half, c, s, k_norm, eps, DIM, ROTARY, NORM, OFFSET, dtype)
    p1, p2 = in_halves(target, half[None, :], DIM, ROTARY)
    number = (place // PAGE * 2 * KV + head) * PAGE + place % PAGE
    page = cache + number[:, None] * DIM + half[None, :]
    if ROUNDED:
        _store_rounded(first, second, p1, p2, page, scales + number, mask, head < KV, DIM)
    else:
        tl.store(p1, first, mask)
        tl.store(p2, second, mask)
        tl.store(page, first, mask)
        tl.store(page + DIM // 2, second, mask)
    target += KV * DIM
    page += KV * PAGE * DIM
    first, second = tl.load(target, mask, other=0.0), tl.load(target + DIM // 2, mask, other=0.0)
    if ROUNDED:
        behind = scales + number + KV * PAGE
        _store_rounded(first, second, target, target + DIM // 2, page, behind, mask, head < KV, DIM)
    else:
        tl.store(page, first, mask)
        tl.store(page + DIM // 2, second, mask)


@triton.jit
def _load(place, column, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """Keys or values [N, D] at places [N, 1], without a mask if no column is padding."""
    if DIM == DIM_BLOCK:
        return tl.load(place + column[None, :])
    return tl.load(place + column[None, :], (column < DIM)[None, :], other=0.0)


@triton.jit
def _attend_keys(q, keys, column, seen, highest, total, summed, scale, KV: tl.constexpr, DIM: tl.constexpr,
           DIM_BLOCK: tl.constexpr, MASKED: tl.constexpr, HIDDEN: tl.constexpr):  # fmt: skip
    """Continue softmax(q k) v over the keys at `keys` [N, 1]; values follow their keys. Scores are in units of log2."""
    scores = tl.dot(q, tl.trans(_load(keys, column, DIM, DIM_BLOCK))) * scale
    if MASKED:
        scores = tl.where(seen, scores, HIDDEN)
    rising = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - rising[:, None])
    fade = tl.exp2(highest - rising)
    total = total * fade + tl.sum(weights, axis=1)
    v = _load(keys + KV * DIM, column, DIM, DIM_BLOCK)
    return rising, total, tl.dot(weights.to(v.dtype), v, summed * fade[:, None])


@kernel
def _attend(
    qkv, out, blocks, sinks, scale,
    QUERY: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PITCH: tl.constexpr, DIM_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    block = blocks + 3 * tl.program_id(1)
    begin(PDL)
    start, first, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if start >= end:
        return
    WIDTH: tl.constexpr = QUERY * PITCH + 2 * KV * DIM
    # Positions are relative to the prompt's first token.
    qkv += first.to(tl.int64) * WIDTH
    out += first.to(tl.int64) * (QUERY * DIM)
    start, end = start - first, end - first
    column = tl.arange(0, DIM_BLOCK)
    query = start + tl.arange(0, QUERIES)
    mask = (query < end)[:, None] & (column < DIM)[None, :]
    queries = qkv + query[:, None] * WIDTH + head * PITCH + column[None, :]
    q = tl.load(queries, mask, other=0.0)
    key = tl.arange(0, KEYS)
    keys = qkv + QUERY * PITCH + head // (QUERY // KV) * DIM
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
    HIDDEN: tl.constexpr = _OUTSIDE if WINDOW else float("-inf")
    low = tl.maximum(start + 1 - WINDOW, 0) // KEYS * KEYS if WINDOW else 0
    for place in tl.range(low, start, KEYS, num_stages=STAGES):
        read = keys + (place + key)[:, None] * WIDTH
        seen = mask
        if WINDOW:
            seen = (place + key)[None, :] > query[:, None] - WINDOW
        highest, total, summed = _attend_keys(
            q, read, column, seen, highest, total, summed, scale, KV, DIM, DIM_BLOCK, WINDOW > 0, HIDDEN
        )
    for place in tl.range(start, tl.minimum(start + QUERIES, end), KEYS, num_stages=1):
        # Keys after the prompt's last one are masked; the last one is read instead.
        read = keys + tl.minimum(place + key, end - 1)[:, None] * WIDTH
        seen = (place + key)[None, :] <= query[:, None]
        if WINDOW:
            seen &= (place + key)[None, :] > query[:, None] - WINDOW
        highest, total, summed = _attend_keys(
            q, read, column, seen, highest, total, summed, scale, KV, DIM, DIM_BLOCK, True, HIDDEN
        )
    if SINKS:
        total += sink_weight(sinks, head, True, highest)
    target = out + query[:, None] * (QUERY * DIM) + head * DIM + column[None, :]
    result = summed / total[:, None]
    if PITCH > DIM:  # the gate behind the query
        result *= tl.sigmoid(tl.load(queries + DIM, mask, other=0.0).to(tl.float32))
    tl.store(target, result.to(out.dtype.element_ty), mask)


@cache
def _reads(dim_block: int, device: torch.device) -> tuple[int, int]:
    properties: Any = torch.cuda.get_device_properties(device)
    room = properties.shared_memory_per_block_optin // (2 * dim_block) - QUERY_BLOCK
    return next(((keys, stages) for keys, stages in _READS if 2 * keys * stages <= room), _READS[-1])


def _attend_to_prompts(qkv: Tensor, blocks: Tensor, heads: Heads) -> Tensor:
    """Attention [n, Hq * D] of rotated q and k, and v, all of 16 bits. Raises `ValueError` where `_attend`'s offsets in
    a prompt would pass 32 bits.
    """
    if len(qkv) > (most := (2**31 - 1) // heads.width):
        raise ValueError(
            f"a prompt has {len(qkv):,} tokens, with what was drawn after it, and a GPU's attention takes {most:,} of "
            f"this model; lower `max_prompt_tokens` or `max_tokens`"
        )
    out = qkv.new_empty(len(qkv), heads.query * heads.dim)
    dim_block = max(16, triton.next_power_of_2(heads.dim))
    keys, stages = _reads(dim_block, qkv.device)
    _attend[(heads.query, len(blocks))](
        qkv, out, blocks, qkv if heads.sinks is None else heads.sinks, heads.scale * 1.4426950408889634,
        QUERY=heads.query, KV=heads.kv, DIM=heads.dim, PITCH=heads.pitch, DIM_BLOCK=dim_block,
        WINDOW=heads.window or 0, SINKS=heads.sinks is not None, QUERIES=QUERY_BLOCK, KEYS=keys, STAGES=stages,
        num_warps=8, **dependent(qkv.device),
    )  # fmt: skip
    return out


def attend_prompts(qkv: Tensor, cache: KVCache, row: PromptRow, rope: Rope, heads: Heads) -> Tensor:
    """See `reference.attend_prompts`."""
    blocks = [triton.next_power_of_2(size) for size in (heads.query, heads.kv, heads.dim // 2)]
    _rotate_and_store[(len(qkv),)](
        # Placeholders, which aren't read without scales and norms.
        qkv, cache.data, cache.data if cache.scales is None else cache.scales, row.positions, row.places, *rope,
        qkv if heads.q_norm is None else heads.q_norm, qkv if heads.k_norm is None else heads.k_norm, heads.eps,
        QUERY=heads.query, QUERY_BLOCK=blocks[0], KV=heads.kv, KV_BLOCK=blocks[1], DIM=heads.dim,
        PITCH=heads.pitch, HALF_BLOCK=blocks[2], PAGE=PAGE,
        ROTARY=2 * rope[0].shape[1], NORM=heads.q_norm is not None, OFFSET=heads.norm_offset,
        ROUNDED=cache.scales is not None, num_warps=4, **dependent(qkv.device),
    )  # fmt: skip
    if qkv.element_size() == 2:
        return _attend_to_prompts(qkv, row.blocks, heads)
    query, key, value, gates = heads.parts(qkv)
    assert row.packing is not None
    out = attend_packed(query, key, value, row.packing, heads.scale, heads.window, heads.sinks).flatten(1)
    return gated(out, gates)
