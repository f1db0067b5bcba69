"""Grouped products in Triton: each block of pairs is multiplied by the weights of its expert.

Weights of all experts are one tensor a layer: packed as `Words`, or dense. An expert's rows follow each other. A
program multiplies some rows of an expert by the pairs of a block; columns aren't divided, so that a pair's result
doesn't depend on others. Blocks without pairs end at once.

A block of up to 64 pairs is multiplied in strips of eight. A program decodes its weights once for all strips, and
leaves out strips without pairs. Blocks of 128 have one strip.

FORMAT is a compile-time parameter: GROUPS scales a block of 128 columns, of which MULTIPLIER and OFFSET decode a byte;
0 groups mean dense weights.

LoRA of experts has dense products of its own. A x exists before the product that adds B (A x). The gradients of A and B
are sums over the blocks of an expert, which follow each other.
"""

# mypy takes a tuple that grows in a loop for one of fixed length.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.launch import begin
from qerl.kernels.portable.decoding import wait_for_products, weight_values

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
    if SILU:
        n = tl.minimum(tile * (N // 2) + r % (N // 2), width - 1) + r // (N // 2) * width
    else:
        n = tl.minimum(tile * N + r, width - 1)
    n += expert * rows
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
            _store(gated, out, tile * (N // 2) + tl.arange(0, N // 2), pair, pairs, width, False)
        else:
            _store(y, out, tile * N + r, pair, pairs, width, False)


@triton.jit(do_not_specialize=["pairs"])
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


@triton.jit
def _store(y, out, n, pair, pairs, width, ADD: tl.constexpr):
    """Write y [N, M] to out [pairs, width], or add it."""
    place = out + pair.to(tl.int64)[None, :] * width + n[:, None]
    inside = (n < width)[:, None] & (pair < pairs)[None, :]
    if ADD:
        y += tl.load(place, inside, other=0.0).to(tl.float32)
    tl.store(place, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["pairs"])
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
        _store(total * factor, out, column, pair, pairs, columns, ADD)


@triton.jit(do_not_specialize=["pairs"])
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
