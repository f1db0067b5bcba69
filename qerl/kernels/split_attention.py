"""A decode step's attention with few sequences: a program attends to some pages of one row, which are a split.

A second launch combines the splits in order. Only qkv comes from the previous kernel. State, tables and older tokens
exist before the step, so a split loads its first page while qkv is computed. Rows of one sequence, which verify drafts,
attend to each other's tokens, which another launch appends before; then nothing is loaded before it has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.attention_parts import attend_to_page, first_seen, gate_of, seen
from qerl.kernels.cache_pages import append, load_page, load_scales
from qerl.kernels.launch import let_next_start, wait_for_earlier
from qerl.kernels.token_heads import angles, rotated, sink_weight


@triton.jit
def _split_tokens(position, PAGE: tl.constexpr):
    """Tokens of a split for a sequence whose last token is at `position`, as `geometry.pages_per_split`."""
    pages = position // PAGE + 1
    size = tl.where(pages <= 8, 1, tl.where(pages <= 32, 2, tl.where(pages <= 128, 4, tl.where(pages <= 512, 8, 16))))
    return size * PAGE


@triton.jit
def attend_split(
    qkv, cache, sequences, rope, norms, sums, scale, shape: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Attend to a split of a row; `qerl.kernels.attention.attend` has the arguments."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start(PDL)
    slot = tl.load(sequences.rows + row)
    position = tl.load(sequences.position + slot)
    low = first_seen(position, shape)
    base = low // shape.page * shape.page
    tokens = _split_tokens(position - base, shape.page)
    start = base + split * tokens
    end = tl.minimum(start + tokens, position)
    member, half = tl.arange(0, shape.members), tl.arange(0, shape.half_block)
    whole = tl.arange(0, shape.dim_block)
    query_head = row * shape.query + head * shape.group + member
    if start > position:
        wait_for_earlier(PDL)
        return
    pages = sequences.pages + slot * sequences.pages_stride
    if shape.early:
        k1, k2, v = load_page(cache, pages, head, start, end, shape)
        k_first, v_first = load_scales(cache, pages, head, start, end, shape)
    in_half = half < shape.dim // 2
    c, s = angles(rope.cos, rope.sin, position, half, shape.dim, shape.rotary)
    wait_for_earlier(PDL)

    token = qkv + row * shape.width
    query = token + (head * shape.group + member)[:, None] * shape.pitch + half[None, :]
    q_mask = (member < shape.group)[:, None] & in_half[None, :]
    dtype: tl.constexpr = qkv.dtype.element_ty
    q1, q2 = rotated(
        query, q_mask, half, c, s, norms.query, norms.eps,
        shape.dim, shape.rotary, shape.normed, shape.norm_offset, dtype,
    )  # fmt: skip
    highest = tl.full([shape.members], float("-inf"), tl.float32)
    total = tl.full([shape.members], 0.0, tl.float32)
    summed = tl.full([shape.members, shape.dim_block], 0.0, tl.float32)
    if start + tokens > position:
        n1, n2, value = append(token, cache, pages, head, position, c, s, norms, shape, shape.appends)
        products = q1.to(tl.float32) * n1.to(tl.float32) + q2.to(tl.float32) * n2.to(tl.float32)
        highest = tl.sum(products, axis=1) * scale
        total += 1.0
        summed += value.to(tl.float32)[None, :]

    token_in_page = tl.arange(0, shape.page)
    if shape.early:
        exists = seen(start + token_in_page, end, low, shape)[None, :]
        highest, total, summed = attend_to_page(
            q1, q2, k1, k2, v, k_first, v_first, exists, highest, total, summed, scale, shape
        )
        start += shape.page
    # Most splits have one page, so they skip the start of the copy pipeline.
    if start < end:
        for first in tl.range(start, end, shape.page, num_stages=shape.stages):
            k1, k2, v = load_page(cache, pages, head, first, end, shape)
            k_scale, v_scale = load_scales(cache, pages, head, first, end, shape)
            exists = seen(first + token_in_page, end, low, shape)[None, :]
            highest, total, summed = attend_to_page(
                q1, q2, k1, k2, v, k_scale, v_scale, exists, highest, total, summed, scale, shape
            )
    part = query_head * shape.splits + split
    in_group = member < shape.group
    inside = in_group[:, None] & (whole < shape.dim)[None, :]
    tl.store(sums.summed + part[:, None] * shape.dim + whole[None, :], summed, inside)
    tl.store(sums.highest + part, highest, in_group)
    tl.store(sums.total + part, total, in_group)


@triton.jit
def combine(qkv, rows, positions, sinks, sums, out, shape: tl.constexpr, PDL: tl.constexpr):
    """Combine the splits of a row's query head."""
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    position = tl.load(positions + tl.load(rows + row))
    wait_for_earlier(PDL)
    whole = tl.arange(0, shape.dim_block)
    inside = whole < shape.dim
    highest = -float("inf")
    total = 0.0
    summed = tl.full([shape.dim_block], 0.0, tl.float32)
    # Eight splits are read together; this alone decides the order of additions.
    member = tl.arange(0, 8)
    behind = position - first_seen(position, shape) // shape.page * shape.page
    used = tl.where(position < 0, 0, behind // _split_tokens(behind, shape.page) + 1)
    first = (row * shape.query + head) * shape.splits
    for start in range(0, used, 8):
        exists = start + member < used
        part = first + start + member
        peaks = tl.load(sums.highest + part, exists, other=-float("inf"))
        totals = tl.load(sums.total + part, exists, other=0.0)
        place = part[:, None] * shape.dim + whole[None, :]
        values = tl.load(sums.summed + place, exists[:, None] & inside[None, :], other=0.0)
        rising = tl.maximum(highest, tl.max(peaks, axis=0))
        fade, weight = tl.exp2(highest - rising), tl.exp2(peaks - rising)
        total = total * fade + tl.sum(totals * weight, axis=0)
        summed = summed * fade + tl.sum(values * weight[:, None], axis=0)
        highest = rising
    if shape.sinks:
        total += sink_weight(sinks, head, True, highest)
    result = tl.where(position < 0, 0.0, summed / total)
    if shape.pitch > shape.dim:
        result *= gate_of(qkv + row * shape.width + head * shape.pitch + whole, inside, shape)
    tl.store(out + (row * shape.query + head) * shape.dim + whole, result.to(out.dtype.element_ty), inside)
