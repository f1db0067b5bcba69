"""Mixtures of experts in Triton: routing, groups of pairs, and grouped products with packed weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats.layouts import BLOCK_COLUMNS, Words
from qerl.kernels import reference
from qerl.kernels.state import GroupedLora, Groups
from qerl.kernels.triton.launch import begin, dependent, kernel
from qerl.kernels.triton.linear import Tile, ranks_at_once, rows_of_tile, store_tile, wait_for_products, weight_values

# Groups of more pairs than one launch can hold, in Triton: their number for each expert, then their places.
#
# A sort takes some thirty launches of PyTorch, whose overhead is longer than a block's attention.

#: Pairs that a program reads at a time.
_PAIRS = 2048
#: Numbers of blocks that a program writes at a time.
_OWNERS = 128


@kernel(do_not_specialize=["count"])
def _count(numbers, counts, count, experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Add the pairs of each expert among some pairs to counts [experts]."""
    pair, e = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    # Pairs that don't exist count for an expert that doesn't exist.
    number = tl.load(numbers + pair, pair < count, other=experts)
    tl.atomic_add(counts + e, tl.histogram(number, EXPERTS), e < experts)


@triton.jit
def close_blocks(pairs, first, filled, end, count, expert, experts, blocks, SIZE: tl.constexpr):
    """Fill the places left in an expert's last block; return the end of its blocks and the owner that they get.

    The expert has `filled` pairs in the blocks from `first` to `end`. After the last expert come blocks without pairs,
    up to `blocks`, whose owner is -1.
    """
    place = filled + tl.arange(0, SIZE)  # none after whole blocks
    tl.store(pairs + first * SIZE + place, place * 0 + count, place < (end - first) * SIZE)
    return tl.where(expert < experts, end, blocks), tl.where(expert < experts, expert, -1)


@kernel(do_not_specialize=["count", "blocks"])
def _place(
    numbers, counts, pairs, owners, count, experts, blocks,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, SIZE: tl.constexpr, OWNERS: tl.constexpr,
):  # fmt: skip
    """A program writes the blocks of its expert; the one after the last expert's writes blocks without pairs."""
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    have = tl.load(counts + e, e < experts, other=0)
    filled = (have + SIZE - 1) // SIZE
    first = tl.sum(tl.where(e < expert, filled, 0), 0)
    end = tl.sum(tl.where(e <= expert, filled, 0), 0)
    done = 0
    for start in range(0, count, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        number = tl.load(numbers + pair, pair < count, other=experts)
        mine = (number == expert) & (pair < count)
        place = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs + first * SIZE + place, pair, mine)
        done += tl.sum(mine.to(tl.int32), 0)
    end, owner = close_blocks(pairs, first, done, end, count, expert, experts, blocks, SIZE)
    for start in range(first, end, OWNERS):
        block = start + tl.arange(0, OWNERS)
        tl.store(owners + block, block * 0 + owner, block < end)


def group_many(numbers: Tensor, experts: int) -> Groups:
    """See `reference.group`. Doesn't wait for the device, and always gives the same groups."""
    (tokens, chosen), device = numbers.shape, numbers.device
    groups, numbers = Groups.empty(tokens, chosen, experts, device), numbers.contiguous()
    (blocks, size), bins = groups.pairs.shape, triton.next_power_of_2(experts + 1)
    count, counts = groups.count, torch.zeros(experts, dtype=torch.int32, device=device)
    _count[(triton.cdiv(count, _PAIRS),)](numbers, counts, count, experts, PAIRS=_PAIRS, EXPERTS=bins, num_warps=4)
    _place[(experts + 1,)](
        numbers, counts, groups.pairs, groups.experts, count, experts, blocks,
        PAIRS=_PAIRS, EXPERTS=bins, SIZE=size, OWNERS=_OWNERS, num_warps=4,
    )  # fmt: skip
    return groups


# Operations of a mixture of experts in Triton; `qerl.kernels.reference` has the PyTorch versions.

#: Pairs up to which one launch groups them: each of its programs holds all.
MOST_PAIRS = 2048
#: The fewest places for pairs in that launch: one for each of its threads, so that none counts a pair twice.
_LEAST_PAIRS = 128
#: Below any score as an integer.
_LOWEST = tl.constexpr(-(2**31))
_BLOCK = 1024
#: Tokens up to which one launch computes a router's scores, and the numbers of them that a program has in registers.
MOST_SCORED = 128
_SCORED_NUMBERS = 8 * 2048


@kernel(do_not_specialize=["tokens"])
def _scores(
    x, weight, bias, out, tokens, experts, width,
    BIASED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of one expert for some tokens."""
    expert = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + expert * width + column, column < width, other=0.0)
    begin(PDL)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    read = tl.load(x + token[:, None] * width + column[None, :], inside, other=0.0)
    total = tl.sum(read.to(tl.float32) * w[None, :], 1)
    if BIASED:
        total += tl.load(bias + expert)
    tl.store(out + token * experts + expert, total, token < tokens)


def scores(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.scores`. Products of more tokens than `MOST_SCORED` are cuBLAS's."""
    (tokens, width), experts = x.shape, len(weight)
    if tokens > MOST_SCORED:
        return reference.scores(x, weight, bias)
    out = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    size = min(triton.next_power_of_2(tokens), max(_SCORED_NUMBERS // block, 1))
    _scores[(experts, triton.cdiv(tokens, size))](
        x, weight, weight if bias is None else bias, out, tokens, experts, width,
        BIASED=bias is not None, TOKENS=size, BLOCK=block, num_warps=4, **dependent(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _places(scores, e, CHOSEN: tl.constexpr):
    """The place [T, E] of each expert e [1, E] in the order of a token's CHOSEN highest scores; CHOSEN of the others.

    Scores are compared as integers of the same order: GPUs have an instruction for the largest integer of a warp.
    A chosen expert's integer becomes its place above the lowest one, which is below that of any score.
    """
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 equals 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    for place in tl.static_range(CHOSEN):
        best = tl.max(order, 1)[:, None]
        best_expert = tl.min(tl.where(order == best, e, scores.shape[1]), 1)[:, None]
        order = tl.where(e == best_expert, _LOWEST + place, order)
    return tl.where(order < _LOWEST + CHOSEN, order ^ _LOWEST, CHOSEN)


@triton.jit
def _probabilities(scores, place, CHOSEN: tl.constexpr, NORMALISED: tl.constexpr):
    """Those [T, E] of a softmax over all experts, or over the chosen ones."""
    power = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(tl.where(place < CHOSEN, power, 0.0) if NORMALISED else power, 1)
    return power / total[:, None]


@kernel
def _route(
    scores, numbers, weights, experts,
    CHOSEN: tl.constexpr, NORMALISED: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)[None, :]
    begin(PDL)
    read = tl.load(scores + row * experts + e, e < experts, other=-float("inf"))
    place = _places(read, e, CHOSEN)
    tl.store(numbers + row * CHOSEN + place, e, place < CHOSEN)
    tl.store(weights + row * CHOSEN + place, _probabilities(read, place, CHOSEN, NORMALISED), place < CHOSEN)


# Routes and groups stay two launches: one launch was slower for 128 experts, and saved 0.02 ms of a step for 32
# (docs/lab/mixtures.md).
def route(scores: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """See `reference.route`. Of equal scores the first wins."""
    (rows, experts), device = scores.shape, scores.device
    numbers = torch.empty(rows, chosen, dtype=torch.int32, device=device)
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=device)
    _route[(rows,)](
        scores, numbers, weights, experts,
        CHOSEN=chosen, NORMALISED=normalised, EXPERTS=triton.next_power_of_2(experts), num_warps=1,
        **dependent(device),
    )  # fmt: skip
    return numbers, weights


@kernel(do_not_specialize=["count", "blocks"])
def _group(
    numbers, pairs, owners, count, experts, blocks,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program writes the blocks of its expert; the one after the last expert's writes blocks without pairs."""
    expert, e = tl.program_id(0), tl.arange(0, EXPERTS)
    pair, block = tl.arange(0, PAIRS), tl.arange(0, BLOCKS)
    begin(PDL)
    # Pairs that don't exist count for an expert that doesn't exist.
    number = tl.load(numbers + pair, pair < count, other=experts)
    filled = (tl.histogram(number, EXPERTS) + SIZE - 1) // SIZE
    mine = (number == expert) & (pair < count)
    first, have = tl.sum(tl.where(e < expert, filled, 0), 0), tl.sum(mine.to(tl.int32), 0)
    end = first + (have + SIZE - 1) // SIZE
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(pairs + first * SIZE + place, pair, mine)
    end, owner = close_blocks(pairs, first, have, end, count, expert, experts, blocks, SIZE)
    tl.store(owners + block, block * 0 + owner, (block >= first) & (block < end))


def group(numbers: Tensor, experts: int) -> Groups:
    """See `reference.group`."""
    (tokens, chosen), device = numbers.shape, numbers.device
    if tokens * chosen > MOST_PAIRS:
        return group_many(numbers, experts)
    groups = Groups.empty(tokens, chosen, experts, device)
    blocks, size = groups.pairs.shape
    _group[(experts + 1,)](
        numbers, groups.pairs, groups.experts, groups.count, experts, blocks,
        PAIRS=max(triton.next_power_of_2(groups.count), _LEAST_PAIRS), EXPERTS=triton.next_power_of_2(experts + 1),
        BLOCKS=triton.next_power_of_2(blocks), SIZE=size, num_warps=4, **dependent(device),
    )  # fmt: skip
    return groups


@kernel
def _combine(
    y, weights, out, width, CHOSEN: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    begin(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        part = tl.load(y + pair * width + column, inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * part
    place_out = out + row * width + column
    if RESIDUAL:
        total += tl.load(place_out, inside, other=0.0).to(tl.float32)
    tl.store(place_out, total.to(out.dtype.element_ty), inside)


def combine(y: Tensor, weights: Tensor, out: Tensor, residual: bool) -> None:
    """See `reference.combine`."""
    rows, width = out.shape
    _combine[(rows, triton.cdiv(width, _BLOCK))](
        y, weights, out, width,
        CHOSEN=weights.shape[1], RESIDUAL=residual, BLOCK=_BLOCK, num_warps=4, **dependent(out.device),
    )  # fmt: skip


@kernel
def _combine_gradients(grad, y, weights, grad_y, grad_weights, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of a token's outputs of experts and of their weights."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    above = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        part = tl.load(y + pair * width + column, inside, other=0.0).to(tl.float32)
        tl.store(grad_weights + pair, tl.sum(part * above, 0))
        tl.store(grad_y + pair * width + column, (above * tl.load(weights + pair)).to(grad_y.dtype.element_ty), inside)


def combine_gradients(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.combine_gradients`; y and weights are read once."""
    if y.dtype == torch.float64:
        return reference.combine_gradients(grad, y, weights)
    (rows, width), grad_y, grad_weights = grad.shape, torch.empty_like(y), torch.empty_like(weights)
    block = triton.next_power_of_2(width)
    _combine_gradients[(rows,)](
        grad, y, weights, grad_y, grad_weights, width,
        CHOSEN=weights.shape[1], BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return grad_y, grad_weights


# Grouped products in Triton: each block of pairs is multiplied by the weights of its expert.
#
# Weights of all experts are one tensor a layer: packed as `Words`, or dense. An expert's rows follow each other. A
# program multiplies some rows of an expert by the pairs of a block; columns aren't divided, so that a pair's result
# doesn't depend on others. Blocks without pairs end at once.
#
# A block of up to 64 pairs is multiplied in strips of eight. A program decodes its weights once for all strips, and
# leaves out strips without pairs. Blocks of 128 have one strip.
#
# FORMAT is a compile-time parameter: GROUPS scales a block of 128 columns, of which MULTIPLIER and OFFSET decode a
# byte; 0 groups mean dense weights.
#
# LoRA of experts has dense products of its own. A x exists before the product that adds B (A x). The gradients of A and
# B are sums over the blocks of an expert, which follow each other.

# mypy takes a tuple that grows in a loop for one of fixed length.
# mypy: disable-error-code="assignment"


#: The most ranks of an adapter that a program multiplies at a time.
_MOST_RANKS = 64
#: Columns of dense weights that a program reads at a time.
DENSE_COLUMNS = tl.constexpr(64)


@triton.jit
def _packed_product(
    codes, scales, x, n, rows_of_x, rows_of_w, columns,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W x^T [N, M] of each strip, without W's factors: rows n [N] of packed W, a tuple of the strips' rows of x [M]."""
    column = tl.arange(0, 128)[:, None]
    codes += n[:, None] * 16 + tl.arange(0, 16)[None, :]
    scales += n[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    places, totals = (), ()
    for strip in tl.static_range(len(rows_of_x)):
        places += (x + rows_of_x[strip].to(tl.int64)[None, :] * columns + column,)
        totals += (tl.zeros([n.shape[0], rows_of_x[strip].shape[0]], tl.float32),)
    for first in tl.range(0, columns, 128, num_stages=STAGES):
        word = tl.load(codes).to(tl.uint32, bitcast=True)
        weight = weight_values(word, tl.load(scales), MULTIPLIER, OFFSET, x.dtype.element_ty)
        sums = ()
        for strip in tl.static_range(len(rows_of_x)):
            place = places[strip] + first
            # The last block of W may have columns that x lacks.
            read = tl.load(place, column < columns - first, other=0.0) if TAIL else tl.load(place)
            sums += (tl.dot(weight, read, totals[strip], input_precision="ieee"),)
        totals = sums
        codes += rows_of_w * 16
        scales += rows_of_w * GROUPS
        wait_for_products()
    return totals


@triton.jit
def _dense_product(weights, x, n, rows_of_x, columns, TAIL: tl.constexpr, STAGES: tl.constexpr):
    """W x^T [N, M] of each strip: rows n [N] of dense W, a tuple of the strips' rows of x [M]."""
    column = tl.arange(0, DENSE_COLUMNS)
    weights += n.to(tl.int64)[:, None] * columns + column[None, :]
    places, totals = (), ()
    for strip in tl.static_range(len(rows_of_x)):
        places += (x + rows_of_x[strip].to(tl.int64)[None, :] * columns + column[:, None],)
        totals += (tl.zeros([n.shape[0], rows_of_x[strip].shape[0]], tl.float32),)
    for first in tl.range(0, columns, DENSE_COLUMNS, num_stages=STAGES):
        inside = column < columns - first
        weight = tl.load(weights, inside[None, :], other=0.0) if TAIL else tl.load(weights)
        sums = ()
        for strip in tl.static_range(len(rows_of_x)):
            place = places[strip] + first
            read = tl.load(place, inside[:, None], other=0.0) if TAIL else tl.load(place)
            sums += (tl.dot(weight, read, totals[strip], input_precision="ieee"),)
        totals = sums
        weights += DENSE_COLUMNS
    return totals


@triton.jit
def _plus_adapter(y, up, shrunk, n, p, RANK: tl.constexpr, RANKS: tl.constexpr):
    """y [N, M] plus B (A x), of rows n [N] of all experts' B and the pairs p [M]."""
    rank = tl.arange(0, RANKS)
    for first in range(0, RANK, RANKS):
        r = first + rank
        b = tl.load(up + n.to(tl.int64)[:, None] * RANK + r[None, :], (r < RANK)[None, :], other=0.0)
        s = tl.load(shrunk + p.to(tl.int64)[None, :] * RANK + r[:, None], (r < RANK)[:, None], other=0.0)
        y = tl.dot(b, s, y, input_precision="ieee")
    return y


@triton.jit
def _strips_product(
    codes, scales, x, pairs_of_block, expert, tile, factors, bias, up, shrunk, out,
    pairs, fan, rows, all_rows, columns, width,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, TAIL: tl.constexpr, BIASED: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, SILU: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, COUNT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program's part of `grouped_product`, of the first COUNT strips of a block."""
    slot, r = tl.arange(0, M), tl.arange(0, N)
    n = expert * rows + rows_of_tile(tile, r, width, N, SILU)
    # Pairs that don't exist are read as the last one, and not written.
    rows_of_x = ()
    for strip in tl.static_range(COUNT):
        rows_of_x += (tl.minimum(tl.load(pairs_of_block + strip * M + slot), pairs - 1) // fan,)
    if GROUPS:
        y_of_strips = _packed_product(
            codes, scales, x, n, rows_of_x, all_rows, columns, GROUPS, MULTIPLIER, OFFSET, TAIL, STAGES
        )
    else:
        y_of_strips = _dense_product(codes, x, n, rows_of_x, columns, TAIL, STAGES)
    for strip in tl.static_range(COUNT):
        y, pair = y_of_strips[strip], tl.load(pairs_of_block + strip * M + slot)
        if GROUPS:
            y *= tl.load(factors + n)[:, None]
        if BIASED:
            y += tl.load(bias + n)[:, None]
        if RANK:
            y = _plus_adapter(y, up, shrunk, n, tl.minimum(pair, pairs - 1), RANK, RANKS)
        if SILU:
            gate, above = tl.split(y.reshape(2, N // 2, M).permute(1, 2, 0))
            gated = gate * tl.sigmoid(gate) * above
            store_tile(gated, out, tile * (N // 2) + tl.arange(0, N // 2), pair, pairs, width, False)
        else:
            store_tile(y, out, tile * N + r, pair, pairs, width, False)


@kernel(do_not_specialize=["pairs"])
def grouped_product(
    codes, scales, x, block_pairs, block_experts, factors, bias, up, shrunk, out,
    pairs, fan, rows, all_rows, columns, width,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, TAIL: tl.constexpr, BIASED: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, SILU: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] of x [pairs / fan, columns]; with SILU, of gate and up, an expert's lower and upper rows.

    A block has STRIPS strips of M pairs. Loops exist for each quarter of them, and a program takes the shortest one
    that has all of its pairs.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    expert, pairs_of_block = tl.load(block_experts + block), block_pairs + block * (STRIPS * M)
    used = 0
    for strip in tl.static_range(STRIPS):
        used += (tl.load(pairs_of_block + strip * M) < pairs).to(tl.int32)
    QUARTER: tl.constexpr = (STRIPS + 3) // 4
    if expert >= 0:
        for count in tl.static_range(QUARTER, STRIPS + 1, QUARTER):
            if (used > count - QUARTER) & (used <= count):
                _strips_product(
                    codes, scales, x, pairs_of_block, expert, tile, factors, bias, up, shrunk, out,
                    pairs, fan, rows, all_rows, columns, width,
                    GROUPS, MULTIPLIER, OFFSET, TAIL, BIASED, RANK, RANKS, SILU, N, M, count, STAGES,
                )  # fmt: skip


@kernel(do_not_specialize=["pairs"])
def grouped_input_gradient(
    codes, scales, grad, block_pairs, block_experts, factors, out, pairs, fan, rows, all_rows, columns,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, ADD: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, columns] = W^T of the pair's expert times grad [pairs / fan, rows], N rows of W at a time.

    With ADD the products are added to out. With packed weights COLUMNS is 128, a block of columns. A row's factor
    multiplies grad, as far as it differs from that of the expert's first row, so that it is exact for the layers that
    share a scale.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        pair = tl.load(block_pairs + block * M + tl.arange(0, M))
        m = tl.minimum(pair, pairs - 1) // fan
        factor = 1.0
        if GROUPS:
            factor = tl.load(factors + expert * rows)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS, M], tl.float32)
        for first in tl.range(0, rows, N, num_stages=STAGES):
            r = first + tl.arange(0, N)
            n = expert * rows + tl.minimum(r, rows - 1)
            d = tl.load(grad + m.to(tl.int64)[None, :] * rows + r[:, None], (r < rows)[:, None], other=0.0)
            if GROUPS:
                place = (tile * all_rows + n)[:, None]
                word = tl.load(codes + place * 16 + tl.arange(0, 16)[None, :]).to(tl.uint32, bitcast=True)
                byte = tl.load(scales + place * GROUPS + tl.arange(0, GROUPS)[None, :])
                weight = weight_values(word, byte, MULTIPLIER, OFFSET, grad.dtype.element_ty)
                share = tl.load(factors + n) / factor
                d = (d.to(tl.float32) * share[:, None]).to(grad.dtype.element_ty)
            else:
                inside = (column < columns)[None, :]
                weight = tl.load(codes + n.to(tl.int64)[:, None] * columns + column[None, :], inside, other=0.0)
            total = tl.dot(tl.trans(weight), d, total, input_precision="ieee")
        store_tile(total * factor, out, column, pair, pairs, columns, ADD)


@kernel(do_not_specialize=["pairs"])
def grouped_weight_gradient(
    grad, x, block_pairs, starts, out, pairs, fan, rows, columns,
    SIZE: tl.constexpr, N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [experts, rows, columns] = sums of grad [pairs, rows] times x [pairs / fan, columns] over an expert's pairs.

    `starts` [experts + 1] are the first blocks of each expert. A block has SIZE pairs, of which M are read: no fewer
    than the 16 that an instruction multiplies.
    """
    expert, slot = tl.program_id(0), tl.arange(0, M)
    r = tl.program_id(1) * N + tl.arange(0, N)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    begin(PDL)
    total = tl.zeros([N, COLUMNS], tl.float32)
    for block in tl.range(tl.load(starts + expert), tl.load(starts + expert + 1), num_stages=STAGES):
        pair = tl.load(block_pairs + block * SIZE + slot, slot < SIZE, other=pairs)
        p = tl.minimum(pair, pairs - 1).to(tl.int64)
        d = tl.load(grad + p[None, :] * rows + r[:, None], (r < rows)[:, None] & (pair < pairs)[None, :], other=0.0)
        read = tl.load(x + (p // fan)[:, None] * columns + column[None, :], (column < columns)[None, :], other=0.0)
        total = tl.dot(d, read, total, input_precision="ieee")
    place = out + (expert.to(tl.int64) * rows + r)[:, None] * columns + column[None, :]
    tl.store(place, total, (r < rows)[:, None] & (column < columns)[None, :])


# Launches of grouped products, for the weights of all experts of a mixture in one tensor a layer.


#: Of grouped products, by the pairs of a block; `m` are those of a strip. They are the fastest, or nearly so, of those
#: timed with the shapes of Qwen3-30B-A3B and gpt-oss-20b on an H200 (docs/lab/mixtures.md). For strips of 8 pairs the
#: compiler takes mma.sync on Hopper, too. There is no product for Hopper alone: one was built and was slower, and this
#: one takes at most 1.12 times as long as a copy of the experts' weights at 8 and 32 tokens.
_GROUPED = {
    8: Tile(128, 8, 4, 4),
    16: Tile(128, 8, 4, 4),
    32: Tile(128, 8, 4, 3),
    64: Tile(128, 8, 4, 3),
    128: Tile(128, 128, 8, 3),
}
#: Rows of W that a program of an input gradient reads at a time.
_GRADIENT_ROWS = 64


def grouped_tile_for(pairs: int, itemsize: int = 2) -> Tile:
    """The tile of a grouped product whose blocks have this many pairs.

    `itemsize` is that of x: float32 takes twice the shared memory, so that it has small tiles and no pipeline.
    """
    tile = _GROUPED[pairs]
    return tile if itemsize == 2 else replace(tile, n=min(tile.n, 64), stages=1)


@dataclass(frozen=True)
class GroupedOperands:
    """Weights of the experts' layers that read the same input; an expert's rows follow each other."""

    weights: Words | Tensor  # NVFP4 or MXFP4; or dense [experts * rows, columns]
    rows: int  # of an expert
    factors: Tensor | None  # [experts * rows] float32, of packed rows
    bias: Tensor | None  # [experts * rows] float32

    @property
    def columns(self) -> int:
        """Columns of the weights."""
        return self.weights.columns if isinstance(self.weights, Words) else self.weights.shape[1]

    def arguments(self) -> tuple[tuple[Tensor, Tensor, Tensor], int, dict[str, Any]]:
        """Codes, scales and factors for a launch, the rows of all experts, and the format's compile-time parameters."""
        if isinstance(self.weights, Words):
            multiplier, offset = self.weights.scale_decode
            groups = BLOCK_COLUMNS // self.weights.group
            assert self.factors is not None
            decode = {"GROUPS": groups, "MULTIPLIER": multiplier, "OFFSET": offset & 0xFFFF}
            return (self.weights.codes, self.weights.scales, self.factors), self.weights.rows, decode
        weights = self.weights  # which stands where a dense format reads nothing, too
        return (weights, weights, weights), len(weights), {"GROUPS": 0, "MULTIPLIER": 0, "OFFSET": 0}


def multiply(
    operands: GroupedOperands,
    x: Tensor,
    groups: Groups,
    out: Tensor,
    silu: bool = False,
    lora: GroupedLora | None = None,
    tile: Tile | None = None,
) -> None:
    """Write the products of all pairs to out [pairs, rows], or with `silu` silu(gate) * up to [pairs, rows / 2].

    x [T, columns] has a row a token, or [pairs, columns] a row a pair. x and out are contiguous, of one dtype, bfloat16
    or float32, which is that of dense weights and of `lora`. `tile` replaces that of `grouped_tile_for`.
    """
    tile = tile or grouped_tile_for(groups.size, x.element_size())
    (codes, scales, factors), all_rows, decode = operands.arguments()
    width = operands.rows // 2 if silu else operands.rows
    tiles = triton.cdiv(width, tile.n // 2 if silu else tile.n)
    bias = factors if operands.bias is None else operands.bias  # the former isn't read
    shrunk, up = (x, x) if lora is None else (lora.shrunk, lora.up)  # nor x as an adapter
    rank = 0 if lora is None else lora.up.shape[-1]
    block = BLOCK_COLUMNS if isinstance(operands.weights, Words) else DENSE_COLUMNS.value
    grouped_product[(len(groups.experts), tiles)](
        codes, scales, x, groups.pairs, groups.experts, factors, bias, up, shrunk, out, groups.count,
        _pairs_a_row(x, groups), operands.rows, all_rows, operands.columns, width, **decode,
        TAIL=operands.columns % block != 0, BIASED=operands.bias is not None, RANK=rank,
        RANKS=ranks_at_once(rank, _MOST_RANKS), SILU=silu, N=tile.n, M=tile.m, STRIPS=groups.size // tile.m,
        STAGES=tile.stages, num_warps=tile.warps, **dependent(x.device),
    )  # fmt: skip


def input_gradient(operands: GroupedOperands, grad: Tensor, groups: Groups, out: Tensor, add: bool = False) -> None:
    """Write the gradient of each pair's input to out [pairs, columns], or with `add` add it.

    `grad` is that of its output, [T, rows] or [pairs, rows]. Dtypes are as in `multiply`.
    """
    (codes, scales, factors), all_rows, decode = operands.arguments()
    columns = BLOCK_COLUMNS if isinstance(operands.weights, Words) else DENSE_COLUMNS.value
    # Sums and operands in float32 of 128 pairs take more registers than four warps have.
    warps, stages = (4, 3) if grad.element_size() == 2 else (max(4, groups.size // 16), 1)
    grouped_input_gradient[(len(groups.experts), triton.cdiv(operands.columns, columns))](
        codes, scales, grad, groups.pairs, groups.experts, factors, out, groups.count, _pairs_a_row(grad, groups),
        operands.rows, all_rows, operands.columns, **decode, ADD=add, N=_GRADIENT_ROWS, M=groups.size, COLUMNS=columns,
        STAGES=stages, num_warps=warps, **dependent(grad.device),
    )  # fmt: skip


def dense_product(weights: Tensor, x: Tensor, groups: Groups, out: Tensor) -> None:
    """See `reference.dense_product`."""
    rows = weights.shape[1]
    tile = grouped_tile_for(groups.size, x.element_size())
    narrow = replace(tile, n=min(tile.n, max(triton.next_power_of_2(rows), 32)))  # for rows that are ranks
    multiply(GroupedOperands(weights.flatten(0, 1), rows, None, None), x, groups, out, tile=narrow)


def dense_input_gradient(weights: Tensor, grad: Tensor, groups: Groups, out: Tensor, add: bool = False) -> None:
    """See `reference.dense_input_gradient`."""
    input_gradient(GroupedOperands(weights.flatten(0, 1), weights.shape[1], None, None), grad, groups, out, add)


def dense_weight_gradient(grad: Tensor, x: Tensor, groups: Groups, experts: int) -> Tensor:
    """See `reference.dense_weight_gradient`."""
    (_, rows), (_, columns) = grad.shape, x.shape
    out = torch.empty(experts, rows, columns, dtype=torch.float32, device=x.device)
    # Blocks without pairs come last.
    owners = groups.experts.where(groups.experts >= 0, experts)
    starts = torch.searchsorted(owners, torch.arange(experts + 1, dtype=torch.int32, device=x.device)).int()
    # The part of a gradient that a program sums; one of both sizes is a rank. Not timed on a GPU yet.
    n, wide = (min(max(triton.next_power_of_2(size), 16), 64) for size in (rows, columns))
    grouped_weight_gradient[(experts, triton.cdiv(rows, n), triton.cdiv(columns, wide))](
        grad, x, groups.pairs, starts, out, groups.count, _pairs_a_row(x, groups), rows, columns, SIZE=groups.size,
        N=n, M=max(groups.size, 16), COLUMNS=wide, STAGES=2 if x.element_size() == 2 and groups.size < 128 else 1,
        num_warps=4, **dependent(x.device),
    )  # fmt: skip
    return out


def _pairs_a_row(x: Tensor, groups: Groups) -> int:
    return 1 if len(x) == groups.count else groups.chosen
