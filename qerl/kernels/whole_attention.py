"""A decode step's attention with enough sequences to keep the GPU busy: a program attends to all pages of its rows.

Rows of one program are neighbours. Completions of a prompt share its full pages. A program reads such a page once for
all its rows: a product has room for 16 query heads, and each row has fewer of them for a KV head. Pages that the rows
don't share follow, row after row, and don't count for the other rows. So each row adds up its pages in order, as if it
were alone, and to the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.attention_parts import attend_to_page, first_seen, gate_of, seen
from qerl.kernels.cache_pages import append, load_page, load_scales
from qerl.kernels.launch import let_next_start, wait_for_earlier
from qerl.kernels.token_heads import angles, rotated, sink_weight


@triton.jit
def _shared_pages(tables, slots, positions, shape: tl.constexpr, stride):
    """The number of full pages with which the tables of all rows begin."""
    ROWS: tl.constexpr = shape.rows
    entry = tl.arange(0, shape.table)
    first = tl.load(tables + slots[0] * stride + entry, entry < stride, other=0)
    shared = positions[0] // shape.page
    for row in tl.static_range(1, ROWS):
        other = tl.load(tables + slots[row] * stride + entry, entry < stride, other=-1)
        shared = tl.minimum(shared, tl.min(tl.where(first == other, shape.table, entry), axis=0))
        shared = tl.minimum(shared, positions[row] // shape.page)
    return shared


@triton.jit
def _new_tokens(
    qkv, cache, sequences, rope, norms, q1, q2, row_of, slots, positions, first_row, head, scale, shape: tl.constexpr
):  # fmt: skip
    """Append the rows' new tokens to the cache, and begin the sums of each query head with that of its row."""
    ROWS: tl.constexpr = shape.rows
    half = tl.arange(0, shape.half_block)
    highest = tl.full([shape.members], float("-inf"), tl.float32)
    total = tl.full([shape.members], 0.0, tl.float32)
    summed = tl.full([shape.members, shape.dim_block], 0.0, tl.float32)
    for row in tl.static_range(ROWS):
        position, table = positions[row], sequences.pages + slots[row] * sequences.pages_stride
        if position >= 0:
            token, of_it = qkv + (first_row + row) * shape.width, row_of == row
            c, s = angles(rope.cos, rope.sin, position, half, shape.dim, shape.rotary)
            n1, n2, value = append(token, cache, table, head, position, c, s, norms, shape, shape.appends)
            products = q1.to(tl.float32) * n1.to(tl.float32) + q2.to(tl.float32) * n2.to(tl.float32)
            highest = tl.where(of_it, tl.sum(products, axis=1) * scale, highest)
            total = tl.where(of_it, 1.0, total)
            summed = tl.where(of_it[:, None], value.to(tl.float32)[None, :], summed)
    return highest, total, summed


@triton.jit
def _page_at(number, starts, slots, positions, shared, base, shape: tl.constexpr):
    """The row that has a page, or -1 for all rows, its slot, its number there, and the end of its tokens."""
    ROWS: tl.constexpr = shape.rows
    owner, slot, page, end = -1, slots[0], number, shared * shape.page
    for row in tl.static_range(ROWS):
        its = number >= starts[row]
        owner, slot = tl.where(its, row, owner), tl.where(its, slots[row], slot)
        page = tl.where(its, number - starts[row] + shared + base, page)
        end = tl.where(its, positions[row], end)
    return owner, slot, page, end


@triton.jit
def attend_whole(
    qkv, cache, out, sequences, rope, norms, sinks, scale, shape: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Attend to the pages of `shape.rows` rows; `qerl.kernels.attention.attend` has the arguments."""
    ROWS: tl.constexpr = shape.rows
    first_row, head = tl.program_id(0) * ROWS, tl.program_id(1)
    let_next_start(PDL)
    slots, positions = (), ()
    for row in tl.static_range(ROWS):
        slot = tl.load(sequences.rows + first_row + row)
        slots, positions = slots + (slot,), positions + (tl.load(sequences.position + slot),)
    shared, base, low = 0, 0, 0
    if ROWS > 1:
        shared = _shared_pages(sequences.pages, slots, positions, shape, sequences.pages_stride)
    elif shape.window:
        low = first_seen(positions[0], shape)
        base = low // shape.page

    member, half = tl.arange(0, shape.members), tl.arange(0, shape.half_block)
    exists = member < ROWS * shape.group
    row_of = tl.where(exists, member // shape.group, 0)
    place = tl.load(sequences.position + tl.load(sequences.rows + first_row + row_of))
    in_half = exists[:, None] & (half < shape.dim // 2)[None, :]
    c, s = angles(rope.cos, rope.sin, tl.maximum(place, 0)[:, None], half, shape.dim, shape.rotary)
    wait_for_earlier(PDL)

    query_head = head * shape.group + member % shape.group
    heads = qkv + ((first_row + row_of) * shape.width + query_head * shape.pitch)[:, None]
    dtype: tl.constexpr = qkv.dtype.element_ty
    q1, q2 = rotated(
        heads + half[None, :], in_half, half, c, s, norms.query, norms.eps,
        shape.dim, shape.rotary, shape.normed, shape.norm_offset, dtype,
    )  # fmt: skip
    highest, total, summed = _new_tokens(
        qkv, cache, sequences, rope, norms, q1, q2, row_of, slots, positions, first_row, head, scale, shape
    )
    # `starts` has the number of pages before the first one of each row's own.
    starts, pages = (), shared
    for row in tl.static_range(ROWS):
        starts = starts + (pages,)
        pages += tl.cdiv(tl.maximum(positions[row], 0), shape.page) - base - shared

    token_in_page = tl.arange(0, shape.page)
    for number in tl.range(0, pages, num_stages=shape.stages):
        owner, slot, page, end = _page_at(number, starts, slots, positions, shared, base, shape)
        table, first = sequences.pages + slot * sequences.pages_stride, page * shape.page
        k1, k2, v = load_page(cache, table, head, first, end, shape)
        k_scale, v_scale = load_scales(cache, table, head, first, end, shape)
        visible = seen(first + token_in_page, end, low, shape)[None, :]
        if ROWS > 1:
            visible = visible & ((owner < 0) | (row_of == owner))[:, None]
        highest, total, summed = attend_to_page(
            q1, q2, k1, k2, v, k_scale, v_scale, visible, highest, total, summed, scale, shape
        )

    if shape.sinks:
        total += sink_weight(sinks, query_head, exists, highest)
    whole = tl.arange(0, shape.dim_block)
    inside = exists[:, None] & (whole < shape.dim)[None, :]
    result = tl.where((place < 0)[:, None], 0.0, summed / total[:, None])
    if shape.pitch > shape.dim:
        result *= gate_of(heads + whole[None, :], inside, shape)
    target = out + ((first_row + row_of) * shape.query + query_head)[:, None] * shape.dim + whole[None, :]
    tl.store(target, result.to(out.dtype.element_ty), inside)
