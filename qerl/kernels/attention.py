"""A decode step's attention in Triton; `qerl.kernels.reference` has the PyTorch version.

A head is read in two halves whose elements rotate in pairs. Where only some elements rotate, the others make up the
rest of both halves, and the cache has keys in this order.

A program computes the query heads of one KV head over some pages of one sequence, which are a split. A second launch
combines the splits in order. With enough sequences to keep the GPU busy, a program attends to a whole sequence, and
nothing is combined. A head's sink is added to the sum of its weights in the end. The program with the new token rotates
its key and appends it to the cache. A sequence's result depends on that sequence and on the batch size, not on other
sequences.

Only qkv comes from the previous kernel. State, tables and older tokens exist before the step, so a split loads its
first page while qkv is computed. Rows of one sequence, which verify drafts, attend to each other's tokens: a launch
before appends all of them, and nothing is loaded before it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.cache_pages import append, load_page, load_scales
from qerl.kernels.decode_state import DecodeState
from qerl.kernels.geometry import PAGE, Heads, splits_of
from qerl.kernels.kv_cache import KVCache
from qerl.kernels.launch import dependent, let_next_start, wait_for_earlier
from qerl.kernels.token_heads import angles, rotated, sink_weight

#: Programs per multiprocessor at which each attends to a whole sequence; half of the multiprocessors may then be idle.
_LEAST_PROGRAMS = 0.5
#: Bytes of shared memory for pages, and the most pages in it: one being attended to, two being copied.
_PAGES_BYTES, _MOST_PAGES = 200_000, 3
#: Bytes of shared memory for all else; GPUs such as the RTX 4090 have 99 KiB in all.
_OTHER_BYTES = 12 * 1024
#: A split has one page in shared memory: most splits have one page, and the next product needs the rest of the memory
#: for the weights that it copies.
_SPLIT_PAGES = 1


class _Cache(NamedTuple):
    """The tensors of a `KVCache`; `scales` aren't read without FP8."""

    data: Tensor
    scales: Tensor


class _Sequences(NamedTuple):
    """The slot of each row, and the position of the last token and the pages of each slot."""

    rows: Tensor
    position: Tensor
    pages: Tensor
    pages_stride: int


class _Rope(NamedTuple):
    """Cosines and sines [positions, R / 2] of the R elements of a head that rotate."""

    cos: Tensor
    sin: Tensor


class _HeadNorms(NamedTuple):
    """Weights [D] of the norms of queries and keys; not read if the model has none."""

    query: Tensor
    key: Tensor
    eps: float


class _SplitSums(NamedTuple):
    """The results of splits for `_combine`: unnormalised output, largest score and sum of weights."""

    summed: Tensor
    highest: Tensor
    total: Tensor


@dataclass(frozen=True)
class _Shape:
    """Sizes known at compilation. Each must be a field, because Triton's cache compares only fields."""

    query: int  # heads
    kv: int  # heads
    group: int  # query heads of a KV head
    group_block: int  # padded to the least size of a matrix product
    dim: int
    dim_block: int  # padded
    half_block: int  # half of the dimension, padded
    page: int
    splits: int
    stages: int
    normed: bool
    norm_offset: float
    sinks: bool
    rotary: int  # elements of a head that rotate
    window: int  # tokens that a token sees, or 0 for all so far
    rounded: bool  # keys and values are in FP8
    appends: bool  # each program its own new token, while others attend
    early: bool  # a split loads its first page while qkv is computed


@triton.jit
def _split_tokens(position, PAGE: tl.constexpr):
    """Tokens of a split for a sequence whose last token is at `position`, as `geometry.pages_per_split`."""
    pages = position // PAGE + 1
    size = tl.where(pages <= 8, 1, tl.where(pages <= 32, 2, tl.where(pages <= 128, 4, tl.where(pages <= 512, 8, 16))))
    return size * PAGE


@triton.jit
def _first_seen(position, shape: tl.constexpr):
    """The first token that a token at `position` sees."""
    if shape.window:
        return tl.maximum(position - (shape.window - 1), 0)
    return 0


@triton.jit
def _seen(token, end, low, shape: tl.constexpr):
    """Which tokens are before `end`, and in the window that begins at `low`."""
    if shape.window:
        return (token < end) & (token >= low)
    return token < end


@triton.jit
def _attend_to_page(
    q1, q2, k1, k2, v, k_scale, v_scale, exists, highest, total, summed, scale, shape: tl.constexpr
):  # fmt: skip
    """Continue softmax(q k) v over the existing tokens of a page; scores are in units of log2."""
    if shape.rounded:
        k1, k2, v = k1.to(q1.dtype), k2.to(q1.dtype), v.to(q1.dtype)
    scores = tl.dot(q1, k1, input_precision="ieee") + tl.dot(q2, k2, input_precision="ieee")
    if shape.rounded:
        scores *= k_scale[None, :]
    scores = tl.where(exists[None, :], scores * scale, float("-inf"))
    rising = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - rising[:, None])
    fade = tl.exp2(highest - rising)
    total = total * fade + tl.sum(weights, axis=1)
    if shape.rounded:
        weights *= v_scale[None, :]
    summed = summed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return rising, total, summed


@triton.jit
def _append_all(qkv, cache, sequences, rope, norms, shape: tl.constexpr, PDL: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    slot = tl.load(sequences.rows + row)
    position = tl.load(sequences.position + slot)
    wait_for_earlier(PDL)
    if position >= 0:
        c, s = angles(rope.cos, rope.sin, position, tl.arange(0, shape.half_block), shape.dim, shape.rotary)
        token = qkv + row * (shape.query + 2 * shape.kv) * shape.dim
        pages = sequences.pages + slot * sequences.pages_stride
        append(token, cache, pages, head, position, c, s, norms, shape, True)


@triton.jit
def _attend(
    qkv, cache, out, sequences, rope, norms, sinks, sums, scale, shape: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start(PDL)
    slot = tl.load(sequences.rows + row)
    position = tl.load(sequences.position + slot)
    low = _first_seen(position, shape)
    base = low // shape.page * shape.page
    tokens = position + 1 - base if shape.splits == 1 else _split_tokens(position - base, shape.page)
    start = base + split * tokens
    end = tl.minimum(start + tokens, position)
    member, half = tl.arange(0, shape.group_block), tl.arange(0, shape.half_block)
    whole = tl.arange(0, shape.dim_block)
    query_head = row * shape.query + head * shape.group + member
    in_group = (member < shape.group)[:, None] & (whole < shape.dim)[None, :]
    if start > position:
        wait_for_earlier(PDL)
        if shape.splits == 1:
            nothing = tl.full([shape.group_block, shape.dim_block], 0.0, out.dtype.element_ty)
            tl.store(out + query_head[:, None] * shape.dim + whole[None, :], nothing, in_group)
        return
    pages = sequences.pages + slot * sequences.pages_stride
    if shape.early:
        k1, k2, v = load_page(cache, pages, head, start, end, shape)
        k_first, v_first = load_scales(cache, pages, head, start, end, shape)
    in_half = half < shape.dim // 2
    c, s = angles(rope.cos, rope.sin, position, half, shape.dim, shape.rotary)
    wait_for_earlier(PDL)

    token = qkv + row * (shape.query + 2 * shape.kv) * shape.dim
    query = token + (head * shape.group + member)[:, None] * shape.dim + half[None, :]
    q_mask = (member < shape.group)[:, None] & in_half[None, :]
    dtype: tl.constexpr = qkv.dtype.element_ty
    q1, q2 = rotated(
        query, q_mask, half, c, s, norms.query, norms.eps,
        shape.dim, shape.rotary, shape.normed, shape.norm_offset, dtype,
    )  # fmt: skip
    highest = tl.full([shape.group_block], float("-inf"), tl.float32)
    total = tl.full([shape.group_block], 0.0, tl.float32)
    summed = tl.full([shape.group_block, shape.dim_block], 0.0, tl.float32)
    if start + tokens > position:
        n1, n2, value = append(token, cache, pages, head, position, c, s, norms, shape, shape.appends)
        products = q1.to(tl.float32) * n1.to(tl.float32) + q2.to(tl.float32) * n2.to(tl.float32)
        highest = tl.sum(products, axis=1) * scale
        total += 1.0
        summed += value.to(tl.float32)[None, :]

    token_in_page = tl.arange(0, shape.page)
    if shape.early:
        exists = _seen(start + token_in_page, end, low, shape)
        highest, total, summed = _attend_to_page(
            q1, q2, k1, k2, v, k_first, v_first, exists, highest, total, summed, scale, shape
        )
        start += shape.page
    # Most splits have one page, so they skip the start of the copy pipeline.
    if start < end:
        for first in tl.range(start, end, shape.page, num_stages=shape.stages):
            k1, k2, v = load_page(cache, pages, head, first, end, shape)
            k_scale, v_scale = load_scales(cache, pages, head, first, end, shape)
            exists = _seen(first + token_in_page, end, low, shape)
            highest, total, summed = _attend_to_page(
                q1, q2, k1, k2, v, k_scale, v_scale, exists, highest, total, summed, scale, shape
            )

    if shape.splits == 1:
        if shape.sinks:
            total += sink_weight(sinks, head * shape.group + member, member < shape.group, highest)
        result = (summed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + query_head[:, None] * shape.dim + whole[None, :], result, in_group)
    else:
        part = query_head * shape.splits + split
        tl.store(sums.summed + part[:, None] * shape.dim + whole[None, :], summed, in_group)
        tl.store(sums.highest + part, highest, member < shape.group)
        tl.store(sums.total + part, total, member < shape.group)


@triton.jit
def _combine(rows, positions, sinks, sums, out, shape: tl.constexpr, PDL: tl.constexpr):
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
    behind = position - _first_seen(position, shape) // shape.page * shape.page
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
    tl.store(out + (row * shape.query + head) * shape.dim + whole, result.to(out.dtype.element_ty), inside)


def _shape(heads: Heads, cache: KVCache, rope: tuple[Tensor, Tensor], batch: int, splits: int, drafted: bool) -> _Shape:
    """The kernel's sizes; `splits` becomes 1 if there are enough sequences."""
    if heads.window is not None:
        splits = min(splits, splits_of((heads.window - 2) // PAGE + 2))  # of the most pages in which a window lies
    gpu: Any = torch.cuda.get_device_properties(cache.data.device)
    if batch * heads.kv >= _LEAST_PROGRAMS * gpu.multi_processor_count:
        splits = 1
    dim_block, group = triton.next_power_of_2(heads.dim), heads.query // heads.kv
    room, page = min(_PAGES_BYTES, gpu.shared_memory_per_block_optin - _OTHER_BYTES), 2 * PAGE * dim_block
    if cache.scales is not None:  # a page from FP8 is there in the dtype of queries, too
        room -= page * rope[0].element_size()
    fitting = max(0, room) // (page * cache.data.element_size())
    # Triton's pipeline has two stages for a page: its number and the page itself.
    stages = 2 * min(fitting, _MOST_PAGES if splits == 1 else _SPLIT_PAGES) + 1
    return _Shape(
        query=heads.query,
        kv=heads.kv,
        group=group,
        group_block=max(16, triton.next_power_of_2(group)),
        dim=heads.dim,
        dim_block=max(16, dim_block),
        half_block=max(16, dim_block // 2),
        page=PAGE,
        splits=splits,
        stages=stages,
        normed=heads.q_norm is not None,
        norm_offset=heads.norm_offset,
        sinks=heads.sinks is not None,
        rotary=2 * rope[0].shape[1],
        window=heads.window or 0,
        rounded=cache.scales is not None,
        appends=not drafted,
        early=splits > 1 and not drafted,
    )


def attend(
    qkv: Tensor,
    cache: KVCache,
    state: DecodeState,
    rows: Tensor,
    rope: tuple[Tensor, Tensor],
    heads: Heads,
    splits: int,
    drafted: bool = False,
) -> Tensor:
    """See `reference.attend`; `splits` is `geometry.splits_of` the most pages of a sequence."""
    batch, device = len(rows), qkv.device
    shape = _shape(heads, cache, rope, batch, splits, drafted)
    out = qkv.new_empty(batch, heads.query * heads.dim)
    summed = torch.empty(batch, heads.query, shape.splits, heads.dim, dtype=torch.float32, device=device)
    sums = _SplitSums(summed, *torch.empty(2, batch, heads.query, shape.splits, dtype=torch.float32, device=device))
    sequences = _Sequences(rows, state.position, state.pages, state.pages.stride(0))
    # Placeholders, which aren't read without norms and sinks.
    q_norm, k_norm, sinks = (qkv if one is None else one for one in (heads.q_norm, heads.k_norm, heads.sinks))
    scale = heads.scale * 1.4426950408889634  # scores are in units of log2
    parts = _Cache(cache.data, cache.data if cache.scales is None else cache.scales)
    tables, norms, pdl = _Rope(*rope), _HeadNorms(q_norm, k_norm, heads.eps), dependent(device)
    if drafted:
        _append_all[(batch, heads.kv)](qkv, parts, sequences, tables, norms, shape=shape, num_warps=4, **pdl)
    _attend[(batch, heads.kv, shape.splits)](
        qkv, parts, out, sequences, tables, norms, sinks, sums, scale, shape=shape, num_warps=4, **pdl,
    )  # fmt: skip
    if shape.splits > 1:
        _combine[(batch, heads.query)](rows, state.position, sinks, sums, out, shape=shape, num_warps=1, **pdl)
    return out
