"""A decode step's attention in Triton; `qerl.kernels.reference` has the PyTorch version."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels import state
from qerl.kernels.state import PAGE, DecodeState, Heads, KVCache, Rope, splits_of
from qerl.kernels.triton.launch import dependent, kernel, let_next_start, wait_for_earlier

# The heads of a token in Triton, for kernels of decode steps and of prompts: norms, rotation, FP8, sinks.

_EXPONENT, _SMALLEST = tl.constexpr(state.EXPONENT), tl.constexpr(state.SMALLEST)
_LARGEST = tl.constexpr(state.LARGEST)


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
    """The scale, and its inverse, of elements of which the largest is `peak`, as `state.rounded`."""
    bits = tl.maximum(peak, _SMALLEST).to(tl.int32, bitcast=True) & _EXPONENT
    inverse = (2 * 127 << 23) - bits
    return bits.to(tl.float32, bitcast=True) / _LARGEST, inverse.to(tl.float32, bitcast=True) * _LARGEST


@triton.jit
def in_fp8(x, scale, inverse, cache_dtype: tl.constexpr):
    """x in the cache's dtype `cache_dtype`, and as it is read from there.

    The latter is rounded in float32: Triton 3.6 reads half of the elements wrongly if it converts from FP8 what it has
    just converted to it, four elements a thread.
    """
    wide = x.to(tl.float32) * inverse
    # Numbers of E4M3 are multiples of 1/8 of the power of two below them, and at least of 2^-9. Adding 1.5 * 2^23 times
    # that step rounds to a multiple of it, ties to even.
    power = (wide.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, 2.0**-6) * (1.5 * 2.0**20)
    rounded = (wide + magic) - magic
    return rounded.to(cache_dtype), (rounded * scale).to(x.dtype)


@triton.jit
def sink_weight(sinks, head, mask, highest):
    """The weight exp(sink) of heads beside others of their scores, of which `highest` has weight 1, in units of log2.

    It adds to the sum of weights alone. It may be infinite, which leaves nothing for the tokens.
    """
    return tl.exp2(tl.load(sinks + head, mask, other=0.0).to(tl.float32) * 1.4426950408889634 - highest)


# Pages of the KV cache in Triton: loads of one, and the new token's key and value. `shape` is the kernel's.


@triton.jit
def load_page(cache, pages, head, first, end, shape: tl.constexpr):
    """Keys in two halves [D / 2, PAGE] and values [PAGE, D] of the tokens from `first` to `end`, at most one page."""
    half, column, token = tl.arange(0, shape.half_block), tl.arange(0, shape.dim_block), tl.arange(0, shape.page)
    page = tl.load(pages + first // shape.page, first < end, other=0).to(tl.int64)
    place = cache.data + (page * 2 * shape.kv + head) * shape.page * shape.dim
    exists = first + token < end
    keys = place + token[None, :] * shape.dim + half[:, None]
    mask = (half < shape.dim // 2)[:, None] & exists[None, :]
    values = place + shape.kv * shape.page * shape.dim + token[:, None] * shape.dim + column[None, :]
    k1 = tl.load(keys, mask, other=0.0)
    k2 = tl.load(keys + shape.dim // 2, mask, other=0.0)
    return k1, k2, tl.load(values, exists[:, None] & (column < shape.dim)[None, :], other=0.0)


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
def append(token, cache, pages, head, position, c, s, norms, shape: tl.constexpr):
    """Store the new token's key and value in the cache; returns the key in two halves [1, D / 2] and the value [D], as
    the cache has them.
    """
    half, column = tl.arange(0, shape.half_block), tl.arange(0, shape.dim_block)
    in_half = (half < shape.dim // 2)[None, :]
    key = token + shape.keys + head * shape.dim + half[None, :]
    dtype: tl.constexpr = token.dtype.element_ty
    k1, k2 = rotated(
        key, in_half, half, c, s, norms.key, norms.eps,
        shape.dim, shape.rotary, shape.normed, shape.norm_offset, dtype,
    )  # fmt: skip
    value = tl.load(token + shape.keys + (shape.kv + head) * shape.dim + column, column < shape.dim, other=0.0)
    cache_dtype: tl.constexpr = cache.data.dtype.element_ty
    s1, s2, stored = k1, k2, value
    if shape.rounded:
        peak = tl.maximum(tl.max(tl.abs(k1.to(tl.float32)), axis=1), tl.max(tl.abs(k2.to(tl.float32)), axis=1))
        k_scale, k_inverse = power_scale(peak)
        v_scale, v_inverse = power_scale(tl.max(tl.abs(value.to(tl.float32)), axis=0))
        s1, k1 = in_fp8(k1, k_scale[:, None], k_inverse[:, None], cache_dtype)
        s2, k2 = in_fp8(k2, k_scale[:, None], k_inverse[:, None], cache_dtype)
        stored, value = in_fp8(value, v_scale, v_inverse, cache_dtype)
    page = tl.load(pages + position // shape.page).to(tl.int64)
    number = (page * 2 * shape.kv + head) * shape.page + position % shape.page
    place = cache.data + number * shape.dim
    tl.store(place + half[None, :], s1, in_half)
    tl.store(place + shape.dim // 2 + half[None, :], s2, in_half)
    tl.store(place + shape.kv * shape.page * shape.dim + column, stored, column < shape.dim)
    if shape.rounded:
        tl.store(cache.scales + number + tl.arange(0, 1), k_scale)
        tl.store(cache.scales + number + shape.kv * shape.page, v_scale)
    return k1, k2, value


# What the kernels of a decode step's attention share: their arguments, sizes, and a page's part of the sum.


class Cache(NamedTuple):
    """The tensors of a `KVCache`; `scales` aren't read without FP8."""

    data: Tensor
    scales: Tensor


class Sequences(NamedTuple):
    """The slot of each row, and the position of the last token and the pages of each slot."""

    rows: Tensor
    position: Tensor
    pages: Tensor
    pages_stride: int


class Angles(NamedTuple):
    """The tensors of a `Rope`."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """Weights [D] of the norms of queries and keys; not read if the model has none."""

    query: Tensor
    key: Tensor
    eps: float


class SplitSums(NamedTuple):
    """The results of splits, which are then combined: unnormalised output, largest score and sum of weights."""

    summed: Tensor
    highest: Tensor
    total: Tensor


# Other families differ by such constants of the compilation, so that the kernels of Qwen2, Qwen3 and Llama have the
# instructions that they had. Pages before a sliding window are kept, because all layers of a sequence have the same
# pages.
@dataclass(frozen=True)
class Shape:
    """Sizes known at compilation. Each must be a field, because Triton's cache compares only fields."""

    query: int  # heads
    kv: int  # heads
    group: int  # query heads of a KV head
    rows: int  # rows to which one program attends
    members: int  # query heads of a KV head in all these rows, padded to the least size of a matrix product
    dim: int
    pitch: int  # features of qkv from one query head to the next; behind each its gate, if it is more than `dim`
    keys: int  # features of qkv before the keys
    width: int  # of qkv
    dim_block: int  # padded
    half_block: int  # half of the dimension, padded
    page: int
    table: int  # pages of a slot, padded; 0 for one row, since each number is another kernel
    splits: int
    stages: int
    normed: bool
    norm_offset: float
    sinks: bool
    rotary: int  # elements of a head that rotate
    window: int  # tokens that a token sees, or 0 for all so far
    rounded: bool  # keys and values are in FP8


@triton.jit
def first_seen(position, shape: tl.constexpr):
    """The first token that a token at `position` sees."""
    if shape.window:
        return tl.maximum(position - (shape.window - 1), 0)
    return 0


@triton.jit
def seen(token, end, low, shape: tl.constexpr):
    """Which tokens are before `end`, and in the window that begins at `low`."""
    if shape.window:
        return (token < end) & (token >= low)
    return token < end


@triton.jit
def attend_to_page(
    q1, q2, k1, k2, v, k_scale, v_scale, exists, highest, total, summed, scale, shape: tl.constexpr
):  # fmt: skip
    """Continue softmax(q k) v over the tokens of a page that exist for each query; scores are in units of log2."""
    if shape.rounded:
        k1, k2, v = k1.to(q1.dtype), k2.to(q1.dtype), v.to(q1.dtype)
    scores = tl.dot(q1, k1, input_precision="ieee") + tl.dot(q2, k2, input_precision="ieee")
    if shape.rounded:
        scores *= k_scale[None, :]
    scores = tl.where(exists, scores * scale, float("-inf"))
    rising = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - rising[:, None])
    fade = tl.exp2(highest - rising)
    total = total * fade + tl.sum(weights, axis=1)
    if shape.rounded:
        weights *= v_scale[None, :]
    summed = summed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return rising, total, summed


@triton.jit
def gate_of(query, inside, shape: tl.constexpr):
    """The factors of a head's results, of the places of its query: the sigmoid of the gate behind it."""
    return tl.sigmoid(tl.load(query + shape.dim, inside, other=0.0).to(tl.float32))


# A decode step's attention with few sequences: a program attends to some pages of one row, which are a split.
#
# A second launch combines the splits in order. Only qkv comes from the previous kernel. State, tables and older tokens
# exist before the step, so a split loads its first page while qkv is computed.


@triton.jit
def _split_tokens(position, PAGE: tl.constexpr):
    """Tokens of a split for a sequence whose last token is at `position`, as `state.pages_per_split`."""
    pages = position // PAGE + 1
    size = tl.where(pages <= 8, 1, tl.where(pages <= 32, 2, tl.where(pages <= 128, 4, tl.where(pages <= 512, 8, 16))))
    return size * PAGE


@kernel
def attend_split(
    qkv, cache, sequences, rope, norms, sums, scale, shape: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Attend to a split of a row; `attend` has the arguments."""
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
    column = tl.arange(0, shape.dim_block)
    query_head = row * shape.query + head * shape.group + member
    if start > position:
        wait_for_earlier(PDL)
        return
    pages = sequences.pages + slot * sequences.pages_stride
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
        n1, n2, value = append(token, cache, pages, head, position, c, s, norms, shape)
        products = q1.to(tl.float32) * n1.to(tl.float32) + q2.to(tl.float32) * n2.to(tl.float32)
        highest = tl.sum(products, axis=1) * scale
        total += 1.0
        summed += value.to(tl.float32)[None, :]

    token_in_page = tl.arange(0, shape.page)
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
    inside = in_group[:, None] & (column < shape.dim)[None, :]
    tl.store(sums.summed + part[:, None] * shape.dim + column[None, :], summed, inside)
    tl.store(sums.highest + part, highest, in_group)
    tl.store(sums.total + part, total, in_group)


@kernel
def combine(qkv, rows, positions, sinks, sums, out, shape: tl.constexpr, PDL: tl.constexpr):
    """Combine the splits of a row's query head."""
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    position = tl.load(positions + tl.load(rows + row))
    wait_for_earlier(PDL)
    column = tl.arange(0, shape.dim_block)
    inside = column < shape.dim
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
        place = part[:, None] * shape.dim + column[None, :]
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
        result *= gate_of(qkv + row * shape.width + head * shape.pitch + column, inside, shape)
    tl.store(out + (row * shape.query + head) * shape.dim + column, result.to(out.dtype.element_ty), inside)


# A decode step's attention with enough sequences to keep the GPU busy: a program attends to all pages of its rows.
#
# Rows of one program are neighbours. Completions of a prompt share its full pages. A program reads such a page once for
# all its rows: a product has room for 16 query heads, and each row has fewer of them for a KV head. Pages that the rows
# don't share follow, row after row, and don't count for the other rows. So each row adds up its pages in order, as if
# it were alone, and to the same bits.


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
            token, mine = qkv + (first_row + row) * shape.width, row_of == row
            c, s = angles(rope.cos, rope.sin, position, half, shape.dim, shape.rotary)
            n1, n2, value = append(token, cache, table, head, position, c, s, norms, shape)
            products = q1.to(tl.float32) * n1.to(tl.float32) + q2.to(tl.float32) * n2.to(tl.float32)
            highest = tl.where(mine, tl.sum(products, axis=1) * scale, highest)
            total = tl.where(mine, 1.0, total)
            summed = tl.where(mine[:, None], value.to(tl.float32)[None, :], summed)
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


@kernel
def attend_whole(
    qkv, cache, out, sequences, rope, norms, sinks, scale, shape: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Attend to the pages of `shape.rows` rows; `attend` has the arguments."""
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
    column = tl.arange(0, shape.dim_block)
    inside = exists[:, None] & (column < shape.dim)[None, :]
    result = tl.where((place < 0)[:, None], 0.0, summed / total[:, None])
    if shape.pitch > shape.dim:
        result *= gate_of(heads + column[None, :], inside, shape)
    target = out + ((first_row + row_of) * shape.query + query_head)[:, None] * shape.dim + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), inside)


# Launches of a decode step's attention.
#
# A head is read in two halves whose elements rotate in pairs. Where only some elements rotate, the others make up the
# rest of both halves, and the cache has keys in this order.
#
# A program computes the query heads of one KV head, over one or two whole sequences (`whole_attention`), or over some
# pages of one where there are few (`split_attention`). A head's sink is added to the sum of its weights in the end, and
# its results are multiplied by the sigmoid of its gate, if it has one. The program with the new token rotates its key
# and appends it to the cache. A sequence's result depends on that sequence and on the batch size, not on other
# sequences, unless these have infinite or undefined values in the cache.

#: Programs per multiprocessor at which each attends to a whole sequence; half of the multiprocessors may then be idle.
_LEAST_PROGRAMS = 0.5
#: Programs per multiprocessor that must be left where each attends to two sequences.
_LEAST_SHARED_PROGRAMS = 6.5
#: Query heads of a KV head to which a program attends: the least size of a matrix product.
_MEMBERS = 16
#: Numbers of pages in shared memory: one being attended to, others being copied.
_PAGES = (4, 3, 2)
#: The gain in speed where one more program runs on a multiprocessor at once.
_WORTH_OF_A_PROGRAM = 0.25
#: Bytes of shared memory for all else; GPUs such as the RTX 4090 have 99 KiB in all.
_OTHER_BYTES = 8 * 1024
#: A split has one page in shared memory: most splits have one page, and the next product needs the rest of the memory
#: for the weights that it copies.
_SPLIT_PAGES = 1


def _rows_together(heads: Heads, batch: int, multiprocessors: int) -> int:
    """The rows to which one program attends, when it attends to whole sequences: one or two."""
    fits = 2 * heads.query <= _MEMBERS * heads.kv and batch % 2 == 0 and heads.window is None
    return 2 if fits and batch * heads.kv >= 2 * _LEAST_SHARED_PROGRAMS * multiprocessors else 1


def _pages_ahead(programs: float, page: int, other: int, shared: int) -> int:
    """Pages in shared memory of each of so many `programs` per multiprocessor.

    A page, what else a program has there, and the `shared` memory of a multiprocessor are in bytes. Fewer pages leave
    room for more programs, but the multiprocessors should also be full in the last turn.
    """

    def worth(pages: int) -> float:
        at_once = max(1, shared // (pages * page + other))
        turns = programs / at_once
        return turns / ceil(turns) * (1 + _WORTH_OF_A_PROGRAM * at_once)

    return max(_PAGES, key=worth)


def _shape(heads: Heads, cache: KVCache, rope: Rope, batch: int, table: int, splits: int) -> Shape:
    """The kernel's sizes. `splits` becomes 1 if there are enough sequences, and slots have `table` pages."""
    if heads.window is not None:
        splits = min(splits, splits_of((heads.window - 2) // PAGE + 2))  # of the most pages in which a window lies
    gpu: Any = torch.cuda.get_device_properties(cache.data.device)
    if batch * heads.kv >= _LEAST_PROGRAMS * gpu.multi_processor_count:
        splits = 1
    dim_block, group = triton.next_power_of_2(heads.dim), heads.query // heads.kv
    rows = _rows_together(heads, batch, gpu.multi_processor_count) if splits == 1 else 1
    page, other = 2 * PAGE * dim_block * cache.data.element_size(), _OTHER_BYTES
    if cache.scales is not None:  # a page from FP8 is there in the dtype of queries, too
        other += page * rope[0].element_size()
    pages = _SPLIT_PAGES
    if splits == 1:
        programs = batch * heads.kv / rows / gpu.multi_processor_count
        pages = _pages_ahead(programs, page, other, gpu.shared_memory_per_multiprocessor)
    fitting = max(0, gpu.shared_memory_per_block_optin - other) // page
    # Triton's pipeline has two stages for a page: its number and the page itself.
    stages = 2 * min(fitting, pages) + 1
    return Shape(
        query=heads.query,
        kv=heads.kv,
        group=group,
        rows=rows,
        members=max(_MEMBERS, triton.next_power_of_2(rows * group)),
        dim=heads.dim,
        pitch=heads.pitch,
        keys=heads.query * heads.pitch,
        width=heads.width,
        dim_block=max(16, dim_block),
        half_block=max(16, dim_block // 2),
        page=PAGE,
        table=triton.next_power_of_2(table) if rows > 1 else 0,
        splits=splits,
        stages=stages,
        normed=heads.q_norm is not None,
        norm_offset=heads.norm_offset,
        sinks=heads.sinks is not None,
        rotary=2 * rope[0].shape[1],
        window=heads.window or 0,
        rounded=cache.scales is not None,
    )


def attend(
    qkv: Tensor, cache: KVCache, state: DecodeState, rows: Tensor, rope: Rope, heads: Heads, splits: int
) -> Tensor:
    """See `reference.attend`; `splits` is `state.splits_of` the most pages of a sequence."""
    batch, device = len(rows), qkv.device
    shape = _shape(heads, cache, rope, batch, state.pages.shape[1], splits)
    out = qkv.new_empty(batch, heads.query * heads.dim)
    sequences = Sequences(rows, state.position, state.pages, state.pages.stride(0))
    # Placeholders, which aren't read without norms and sinks.
    q_norm, k_norm, sinks = (qkv if one is None else one for one in (heads.q_norm, heads.k_norm, heads.sinks))
    scale = heads.scale * 1.4426950408889634  # scores are in units of log2
    parts = Cache(cache.data, cache.data if cache.scales is None else cache.scales)
    tables, norms, pdl = Angles(*rope), HeadNorms(q_norm, k_norm, heads.eps), dependent(device)
    if shape.splits == 1:
        attend_whole[(batch // shape.rows, heads.kv)](
            qkv, parts, out, sequences, tables, norms, sinks, scale, shape=shape, num_warps=4, **pdl
        )
        return out
    summed = torch.empty(batch, heads.query, shape.splits, heads.dim, dtype=torch.float32, device=device)
    sums = SplitSums(summed, *torch.empty(2, batch, heads.query, shape.splits, dtype=torch.float32, device=device))
    attend_split[(batch, heads.kv, shape.splits)](
        qkv, parts, sequences, tables, norms, sums, scale, shape=shape, num_warps=4, **pdl
    )
    combine[(batch, heads.query)](qkv, rows, state.position, sinks, sums, out, shape=shape, num_warps=1, **pdl)
    return out
