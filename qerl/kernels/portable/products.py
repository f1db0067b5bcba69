"""Products of few or many rows with packed weights in Triton: out = W x + b + B (A x).

A program multiplies some rows of W by some rows of x. It decodes codes and scales in registers, in the layout that the
tensor cores read, and sums in float32. The result's first dimension is that of W's rows, so that 8 rows of x are
enough for an instruction.

With few rows of x, programs divide W's columns too. They write their sums, and `combine` adds them in order. Programs
of the same launch compute A x. With many rows, a program finishes its outputs itself, and A x exists before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.launch import begin, let_next_start, wait_for_earlier
from qerl.kernels.portable.decoding import weight_values

#: Rows of A of a program, the fewest that fill an instruction.
SHRINK_ROWS = tl.constexpr(16)
#: Blocks of columns whose codes come into L2 while the previous kernel ends.
EARLY_BLOCKS = tl.constexpr(4)


@triton.jit
def _product(
    codes, scales, x, n, m, rows_of_w, columns, first, last,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W x^T [N, M], without W's factor, of W's rows n [N] and x's rows m [M] over blocks of columns."""
    codes += (first * rows_of_w + n)[:, None] * 16 + tl.arange(0, 16)[None, :]
    scales += (first * rows_of_w + n)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    x += m.to(tl.int64)[None, :] * columns + first * 128 + tl.arange(0, 128)[:, None]
    total = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    for _ in tl.range(first, last, num_stages=STAGES):
        word = tl.load(codes).to(tl.uint32, bitcast=True)
        weight = weight_values(word, tl.load(scales), MULTIPLIER, OFFSET, x.dtype.element_ty)
        total = tl.dot(weight, tl.load(x), total, input_precision="ieee")
        codes += rows_of_w * 16
        scales += rows_of_w * GROUPS
        x += 128
    return total


@triton.jit
def _prefetch(codes, tile, rows_of_w, first, last, N: tl.constexpr):
    """Bring the codes of a tile's first blocks of columns into L2, 128 bytes a time."""
    lines: tl.constexpr = N // 2  # of a block; a row has 64 bytes
    line = tl.arange(0, EARLY_BLOCKS * lines)
    block = tl.minimum(first + line // lines, last - 1)
    row = tl.minimum(tile * N + line % lines * 2, rows_of_w - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(codes + (block * rows_of_w + row) * 16).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _shrink(down, x, r, m, columns, first, last, STAGES: tl.constexpr):
    """A x^T [R, M] of A's rows r [R] and x's rows m [M] over blocks of columns."""
    column = tl.arange(0, 128)
    down += r[:, None] * columns + first * 128 + column[None, :]
    x += m.to(tl.int64)[None, :] * columns + first * 128 + column[:, None]
    total = tl.zeros([r.shape[0], m.shape[0]], tl.float32)
    for _ in tl.range(first, last, num_stages=STAGES):
        total = tl.dot(tl.load(down), tl.load(x), total, input_precision="ieee")
        down += 128
        x += 128
    return total


@triton.jit
def _plus_adapter(y, up, shrunk, n, m, RANK: tl.constexpr, RANKS: tl.constexpr):
    """y [N, M] plus B (A x), with A x [rows, RANK] in the dtype of x."""
    rank = tl.arange(0, RANKS)
    for first in range(0, RANK, RANKS):
        r = first + rank
        b = tl.load(up + n[:, None] * RANK + r[None, :], (r < RANK)[None, :], other=0.0)
        s = tl.load(shrunk + m.to(tl.int64)[None, :] * RANK + r[:, None], (r < RANK)[:, None], other=0.0)
        y = tl.dot(b, s, y, input_precision="ieee")
    return y


@triton.jit
def _plus_split_adapter(y, up, sums, n, m, rows, RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr):
    """The same with A x as float32 sums [SPLITS, rows, RANK], which are added in order and rounded."""
    rank = tl.arange(0, RANKS)
    for first in range(0, RANK, RANKS):
        r = first + rank
        place = sums + m[None, :] * RANK + r[:, None]
        s = tl.zeros([RANKS, m.shape[0]], tl.float32)
        for _ in range(SPLITS):
            s += tl.load(place, (r < RANK)[:, None], other=0.0)
            place += rows * RANK
        b = tl.load(up + n[:, None] * RANK + r[None, :], (r < RANK)[None, :], other=0.0)
        y = tl.dot(b, s.to(up.dtype.element_ty), y, input_precision="ieee")
    return y


@triton.jit
def _scaled(total, factors, bias, n, BIASED: tl.constexpr):
    """Sums [N, M] times the factors of W's rows, plus the bias."""
    y = total * tl.load(factors + n)[:, None]
    if BIASED:
        y += tl.load(bias + n)[:, None]
    return y


@triton.jit
def _store(y, out, n, m, rows, width, RESIDUAL: tl.constexpr):
    """Write y [N, M] to out [rows, width], or add it."""
    place = out + m.to(tl.int64)[None, :] * width + n[:, None]
    inside = (n < width)[:, None] & (m < rows)[None, :]
    if RESIDUAL:
        y += tl.load(place, inside, other=0.0).to(tl.float32)
    tl.store(place, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "blocks", "tiles", "span"])
def split_product(
    codes, scales, down, x, sums, shrink_sums, rows, rows_of_w, columns, blocks, tiles, span,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, RANK: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums [splits, rows, rows of W] of W x and [splits, rows, RANK] of A x; a split has `span` blocks of columns."""
    tile, split = tl.program_id(0), tl.program_id(2)
    first = split * span
    last = tl.minimum(first + span, blocks)
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tile * N + tl.arange(0, N)
    # Rows that don't exist are read as the last one, and not written.
    m_read = tl.minimum(m, rows - 1)
    let_next_start(PDL)
    if PDL:  # earlier kernels don't write weights
        _prefetch(codes, tl.minimum(tile, tiles - 1), rows_of_w, first, last, N)
    wait_for_earlier(PDL)
    if tile < tiles:
        total = _product(
            codes, scales, x, tl.minimum(n, rows_of_w - 1), m_read, rows_of_w, columns, first, last,
            GROUPS, MULTIPLIER, OFFSET, STAGES,
        )  # fmt: skip
        inside = (n < rows_of_w)[:, None] & (m < rows)[None, :]
        tl.store(sums + (split * rows + m).to(tl.int64)[None, :] * rows_of_w + n[:, None], total, inside)
    else:
        # Few rows of A at a time: their tile is in shared memory.
        r = (tile - tiles) * SHRINK_ROWS + tl.arange(0, SHRINK_ROWS)
        shrunk = _shrink(down, x, tl.minimum(r, RANK - 1), m_read, columns, first, last, STAGES)
        exists = (r < RANK)[:, None] & (m < rows)[None, :]
        tl.store(shrink_sums + (split * rows + m)[None, :] * RANK + r[:, None], shrunk, exists)


@triton.jit
def _summed(sums, n, m, rows, rows_of_w, SPLITS: tl.constexpr):
    """The sums [N, M] of all splits, in order."""
    place = sums + m.to(tl.int64)[None, :] * rows_of_w + n[:, None]
    total = tl.load(place)
    for _ in range(1, SPLITS):
        place += rows.to(tl.int64) * rows_of_w
        total += tl.load(place)
    return total


@triton.jit(do_not_specialize=["rows"])
def combine(
    sums, shrink_sums, factors, bias, up, out, rows, rows_of_w, width,
    RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
    RESIDUAL: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The outputs [rows, width] of the sums of `split_product`."""
    n, m = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1) * M + tl.arange(0, M)
    n_read, m_read = tl.minimum(n, width - 1), tl.minimum(m, rows - 1)
    begin(PDL)
    y = _scaled(_summed(sums, n_read, m_read, rows, rows_of_w, SPLITS), factors, bias, n_read, BIASED)
    if RANK:
        y = _plus_split_adapter(y, up, shrink_sums, n_read, m_read, rows, RANK, RANKS, SPLITS)
    if SILU:
        above = n_read + width
        z = _scaled(_summed(sums, above, m_read, rows, rows_of_w, SPLITS), factors, bias, above, BIASED)
        if RANK:
            z = _plus_split_adapter(z, up, shrink_sums, above, m_read, rows, RANK, RANKS, SPLITS)
        y = y * tl.sigmoid(y) * z
    _store(y, out, n, m, rows, width, RESIDUAL)


@triton.jit(do_not_specialize=["rows", "blocks"])
def whole_product(
    codes, scales, x, shrunk, factors, bias, up, out, rows, rows_of_w, columns, blocks, width,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The outputs [rows, width], each by one program, with A x [rows, RANK] in the dtype of x."""
    # Programs that run together share W's rows, which are decoded anew for each block of x's rows.
    m, n = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    n_read, m_read = tl.minimum(n, width - 1), tl.minimum(m, rows - 1)
    begin(PDL)
    total = _product(
        codes, scales, x, n_read, m_read, rows_of_w, columns, 0, blocks, GROUPS, MULTIPLIER, OFFSET, STAGES
    )
    y = _scaled(total, factors, bias, n_read, BIASED)
    if RANK:
        y = _plus_adapter(y, up, shrunk, n_read, m_read, RANK, RANKS)
    if SILU:
        above = n_read + width
        total = _product(
            codes, scales, x, above, m_read, rows_of_w, columns, 0, blocks, GROUPS, MULTIPLIER, OFFSET, STAGES
        )
        z = _scaled(total, factors, bias, above, BIASED)
        if RANK:
            z = _plus_adapter(z, up, shrunk, above, m_read, RANK, RANKS)
        y = y * tl.sigmoid(y) * z
    _store(y, out, n, m, rows, width, RESIDUAL)
