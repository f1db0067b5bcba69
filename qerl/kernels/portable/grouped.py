"""Grouped products in Triton: each block of pairs is multiplied by the weights of its expert.

Weights of all experts are one tensor a layer: packed as `Words`, or dense. An expert's rows follow each other. A
program multiplies some rows of an expert by the pairs of a block; columns aren't divided, so that a pair's result
doesn't depend on others. Blocks without pairs end at once.

FORMAT is a compile-time parameter: GROUPS scales a block of 128 columns, of which MULTIPLIER and OFFSET decode a byte;
0 groups mean dense weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.launch import begin
from qerl.kernels.portable.decoding import weight_values

#: Columns of dense weights that a program reads at a time.
DENSE_COLUMNS = tl.constexpr(64)


@triton.jit
def _packed_product(
    codes, scales, x, n, m, rows_of_w, columns,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W x^T [N, M], without W's factors, of rows n [N] of packed W and rows m [M] of x."""
    column = tl.arange(0, 128)[:, None]
    codes += n[:, None] * 16 + tl.arange(0, 16)[None, :]
    scales += n[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    x += m.to(tl.int64)[None, :] * columns + column
    total = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    for first in tl.range(0, columns, 128, num_stages=STAGES):
        word = tl.load(codes).to(tl.uint32, bitcast=True)
        weight = weight_values(word, tl.load(scales), MULTIPLIER, OFFSET, x.dtype.element_ty)
        # The last block of W may have columns that x lacks.
        read = tl.load(x, column < columns - first, other=0.0) if TAIL else tl.load(x)
        total = tl.dot(weight, read, total, input_precision="ieee")
        codes += rows_of_w * 16
        scales += rows_of_w * GROUPS
        x += 128
    return total


@triton.jit
def _dense_product(weights, x, n, m, columns, STAGES: tl.constexpr):
    """W x^T [N, M] of rows n [N] of dense W and rows m [M] of x."""
    column = tl.arange(0, DENSE_COLUMNS)
    weights += n.to(tl.int64)[:, None] * columns + column[None, :]
    x += m.to(tl.int64)[None, :] * columns + column[:, None]
    total = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    for _ in tl.range(0, columns // DENSE_COLUMNS, num_stages=STAGES):
        total = tl.dot(tl.load(weights), tl.load(x), total, input_precision="ieee")
        weights += DENSE_COLUMNS
        x += DENSE_COLUMNS
    return total


@triton.jit(do_not_specialize=["pairs"])
def grouped_product(
    codes, scales, x, block_pairs, block_experts, factors, bias, out, pairs, fan, rows, all_rows, columns, width,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, TAIL: tl.constexpr, BIASED: tl.constexpr,
    SILU: tl.constexpr, N: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] of x [pairs / fan, columns]; with SILU, of gate and up, an expert's lower and upper rows."""
    block, tile = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        pair = tl.load(block_pairs + block * M + tl.arange(0, M))
        # Pairs that don't exist are read as the last one, and not written.
        m = tl.minimum(pair, pairs - 1) // fan
        r = tl.arange(0, N)
        if SILU:
            n = tl.minimum(tile * (N // 2) + r % (N // 2), width - 1) + r // (N // 2) * width
        else:
            n = tl.minimum(tile * N + r, width - 1)
        n += expert * rows
        if GROUPS:
            y = _packed_product(codes, scales, x, n, m, all_rows, columns, GROUPS, MULTIPLIER, OFFSET, TAIL, STAGES)
            y *= tl.load(factors + n)[:, None]
        else:
            y = _dense_product(codes, x, n, m, columns, STAGES)
        if BIASED:
            y += tl.load(bias + n)[:, None]
        if SILU:
            gate, up = tl.split(y.reshape(2, N // 2, M).permute(1, 2, 0))
            _store(gate * tl.sigmoid(gate) * up, out, tile * (N // 2) + tl.arange(0, N // 2), pair, pairs, width)
        else:
            _store(y, out, tile * N + r, pair, pairs, width)


@triton.jit
def _store(y, out, n, pair, pairs, width):
    """Write y [N, M] to out [pairs, width]."""
    place = out + pair.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(place, y.to(out.dtype.element_ty), (n < width)[:, None] & (pair < pairs)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def grouped_input_gradient(
    codes, scales, grad, block_pairs, block_experts, factors, out, pairs, fan, rows, all_rows, columns,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, columns] = W^T of the pair's expert times grad [pairs / fan, rows], N rows of W at a time.

    With packed weights COLUMNS is 128, a block of columns. A row's factor multiplies grad, as far as it differs from
    that of the expert's first row, so that it is exact for the layers that share a scale.
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
        _store(total * factor, out, column, pair, pairs, columns)
