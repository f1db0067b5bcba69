"""Products with packed weights in Triton: out = W x + b + B (A x).

A program multiplies some rows of W by some rows of x. It decodes codes and scales in registers, in the layout that the
tensor cores read, and sums in float32. The result's first dimension is that of W's rows, so that 8 rows of x are
enough for an instruction.

Where tiles are fewer than a GPU has room for, programs divide W's columns too. They write their sums, and the last one
of a tile adds them in order. The first programs of the launch compute A x, for which those that finish a tile wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.activations import COEFFICIENTS
from qerl.kernels.launch import let_next_start, wait_for_earlier
from qerl.kernels.portable.decoding import wait_for_products, weight_values

#: Rows of A of a program, the fewest that fill an instruction.
SHRINK_ROWS = tl.constexpr(16)
#: What a program that finishes a tile adds to the count of those that computed A x.
_FINISHED = tl.constexpr(1 << 16)
#: Blocks of columns whose codes come into L2 while the previous kernel ends.
EARLY_BLOCKS = tl.constexpr(4)
_GELU_A, _GELU_B = map(tl.constexpr, COEFFICIENTS["gelu_pytorch_tanh"])


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
        wait_for_products()
    return total


@triton.jit
def _row(tile, r, width, N: tl.constexpr, GATED: tl.constexpr):
    """The rows of W that are rows r of a tile; with GATED, half of them are gate's and half are up's.

    Rows that don't exist are read as the last one, and not written.
    """
    if GATED:
        row = tl.minimum(tile * (N // 2) + r % (N // 2), width - 1) + r // (N // 2) * width
    else:
        row = tl.minimum(tile * N + r, width - 1)
    return row


@triton.jit
def _prefetch(codes, tile, rows_of_w, first, last, width, N: tl.constexpr, GATED: tl.constexpr):
    """Bring the codes of a tile's first blocks of columns into L2, 128 bytes a time."""
    lines: tl.constexpr = N // 2  # of a block; a row has 64 bytes
    line = tl.arange(0, EARLY_BLOCKS * lines)
    block = tl.minimum(first + line // lines, last - 1)
    row = _row(tile, line % lines * 2, width, N, GATED)
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
def _plus_adapter(y, up, sums, n, m, rows, RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr):
    """y [N, M] plus B (A x), with A x as float32 sums [SPLITS, rows, RANK], which are added in order and rounded."""
    rank = tl.arange(0, RANKS)
    for first in range(0, RANK, RANKS):
        r = first + rank
        place = sums + m[None, :] * RANK + r[:, None]
        s = tl.zeros([RANKS, m.shape[0]], tl.float32)
        for _ in tl.range(0, SPLITS):
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


@triton.jit
def _arrive(counter):
    """Count this program after what it stored, and return how many were counted before."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _send_shrunk(
    down, x, shrink_sums, number, m, m_read, rows, columns, first, last, split,
    RANK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write A x of a split's columns, for a few rows of A: their tile is in shared memory."""
    rank = number * SHRINK_ROWS + tl.arange(0, SHRINK_ROWS)
    shrunk = _shrink(down, x, tl.minimum(rank, RANK - 1), m_read, columns, first, last, STAGES)
    exists = (rank < RANK)[:, None] & (m < rows)[None, :]
    tl.store(shrink_sums + (split * rows + m)[None, :] * RANK + rank[:, None], shrunk, exists)


@triton.jit
def _wait_for_shrunk(counter, senders, tiles):
    """Wait for the `senders` programs that compute A x. The last one of `tiles` sets the counter to 0 again."""
    seen = tl.atomic_add(counter, _FINISHED, sem="acq_rel", scope="gpu") + _FINISHED
    last = seen // _FINISHED == tiles
    while (seen >= _FINISHED) & (seen % _FINISHED < senders):  # a counter of 0 has been complete
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    if last:
        tl.atomic_xchg(counter, 0, sem="release", scope="gpu")


@triton.jit
def _summed(place, SPLITS: tl.constexpr):
    """The sums [N, M] of all splits of a tile, in order, of the first split's `place`."""
    total = tl.load(place)
    for split in tl.range(1, SPLITS):
        total += tl.load(place + split * (place.shape[0] * place.shape[1]))
    return total


@triton.jit
def _finish(
    y, factors, bias, up, shrink_sums, shrunk_counter, out, tile, n, m, rows, tiles, width,
    RANK: tl.constexpr, RANKS: tl.constexpr, SENDERS: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile, of its sums y [N, M] of all columns."""
    N: tl.constexpr = y.shape[0]
    if RANK:
        _wait_for_shrunk(shrunk_counter, SENDERS, tiles)
    y = _scaled(y, factors, bias, n, BIASED)
    if RANK:
        y = _plus_adapter(y, up, shrink_sums, n, tl.minimum(m, rows - 1), rows, RANK, RANKS, SPLITS)
    if ACTIVATION != "":
        gate, above = tl.split(y.reshape(2, N // 2, y.shape[1]).permute(1, 2, 0))
        inner = gate
        if ACTIVATION == "gelu_pytorch_tanh":
            inner = gate * (gate * gate * _GELU_B + _GELU_A)
        _store(gate * tl.sigmoid(inner) * above, out, tile * (N // 2) + tl.arange(0, N // 2), m, rows, width, RESIDUAL)
    else:
        _store(y, out, tile * N + tl.arange(0, N), m, rows, width, RESIDUAL)


@triton.jit(do_not_specialize=["rows", "blocks", "tiles", "span", "row_blocks"])
def fused_product(
    codes, scales, factors, bias, down, up, x, out, sums, shrink_sums, counters,
    rows, rows_of_w, columns, blocks, tiles, span, row_blocks, width,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The outputs [rows, width]. A split has `span` blocks of columns.

    `sums` [row blocks, tiles, SPLITS, N, M] and `shrink_sums` [SPLITS, rows, RANK] are float32. `counters`, of each
    tile and then of each row block, are 0 before and after the launch.
    """
    SHRINKS: tl.constexpr = (RANK + SHRINK_ROWS - 1) // SHRINK_ROWS
    senders = SHRINKS * SPLITS * row_blocks
    program = tl.program_id(0)
    # Programs start in order, so that those which are waited for run first.
    part = tl.where(program < senders, program, program - senders)
    parts = tl.where(program < senders, SHRINKS, tiles)
    tile, row_block, split = part % parts, part // parts % row_blocks, part // parts // row_blocks
    first = split * span
    last = tl.minimum(first + span, blocks)
    m = row_block * M + tl.arange(0, M)
    m_read = tl.minimum(m, rows - 1)
    shrunk_counter = counters + row_blocks * tiles + row_block
    let_next_start(PDL)
    if program < senders:
        wait_for_earlier(PDL)
        _send_shrunk(down, x, shrink_sums, tile, m, m_read, rows, columns, first, last, split, RANK, STAGES)
        _arrive(shrunk_counter)
    else:
        if PDL:  # earlier kernels don't write weights
            _prefetch(codes, tile, rows_of_w, first, last, width, N, ACTIVATION != "")
        wait_for_earlier(PDL)
        r = tl.arange(0, N)
        n = _row(tile, r, width, N, ACTIVATION != "")
        total = _product(
            codes, scales, x, n, m_read, rows_of_w, columns, first, last, GROUPS, MULTIPLIER, OFFSET, STAGES
        )
        number = row_block * tiles + tile
        place = sums + number.to(tl.int64) * (SPLITS * N * M) + r[:, None] * M + tl.arange(0, M)[None, :]
        finishes = True
        if SPLITS > 1:
            tl.store(place + split * (N * M), total)
            finishes = _arrive(counters + number) == SPLITS - 1
        if finishes:
            if SPLITS > 1:
                tl.atomic_xchg(counters + number, 0, sem="relaxed", scope="gpu")
                total = _summed(place, SPLITS)
            _finish(
                total, factors, bias, up, shrink_sums, shrunk_counter, out, tile, n, m, rows, tiles, width,
                RANK, RANKS, SHRINKS * SPLITS, SPLITS, BIASED, ACTIVATION, RESIDUAL,
            )  # fmt: skip
