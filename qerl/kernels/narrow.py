"""The product of a narrow dense layer with its adapter in Triton, out = W x + B (A x), as one launch for few rows of x.

A program multiplies some rows of W or A by the rows of x, over some of the columns. The last program of a block of
rows adds all sums in order, and then B (A x). The same product by cuBLAS takes five launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.launch import begin, dependent
from qerl.kernels.workspace import workspace

#: Rows of W or A of a program, columns that it reads at a time, and columns of a split.
_N, _K, _SPAN = 16, 128, 640


@triton.jit
def _narrow(
    x, weight, down, up, out, sums, counters, rows, columns, width,
    RANK: tl.constexpr, RANKS: tl.constexpr, WIDTHS: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles, of_weight = tl.num_programs(0), tl.cdiv(width, N)
    m, n, k = block * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    if tile < of_weight:
        matrix, row, count = weight, tile * N, width
    else:
        matrix, row, count = down, (tile - of_weight) * N, RANK
    begin(PDL)
    total = tl.zeros([M, N], tl.float32)
    for column in tl.range(split * SPAN, tl.minimum((split + 1) * SPAN, columns), K, num_stages=3):
        inside = column + k < columns
        a = tl.load(x + m[:, None] * columns + column + k[None, :], (m < rows)[:, None] & inside[None, :], other=0.0)
        place = matrix + (row + n)[None, :] * columns + column + k[:, None]
        b = tl.load(place, (row + n < count)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    # Sums are [blocks, SPLITS, tiles, M, N].
    sums += block * SPLITS * tiles * M * N
    tl.store(sums + (split * tiles + tile) * (M * N) + tl.arange(0, M)[:, None] * N + n[None, :], total)
    tl.debug_barrier()
    if tl.atomic_add(counters + block, 1, sem="acq_rel", scope="gpu") == SPLITS * tiles - 1:
        tl.atomic_xchg(counters + block, 0, sem="relaxed", scope="gpu")
        wide = tl.arange(0, WIDTHS)
        y = _summed(sums, wide, 0, tiles, width, SPLITS, M, N)
        if RANK:
            rank = tl.arange(0, RANKS)
            shrunk = _summed(sums, rank, of_weight, tiles, RANK, SPLITS, M, N).to(up.dtype.element_ty)
            mask = (rank < RANK)[:, None] & (wide < width)[None, :]
            b = tl.load(up + wide[None, :] * RANK + rank[:, None], mask, other=0.0)
            y = tl.dot(shrunk, b, y, input_precision="ieee")
        target = out + m[:, None] * width + wide[None, :]
        tl.store(target, y.to(out.dtype.element_ty), (m < rows)[:, None] & (wide < width)[None, :])


@triton.jit
def _summed(sums, number, first, tiles, count, SPLITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The sums [M, numbers] over all splits, in order, of the rows `number` of the matrix whose first tile is given."""
    place = sums + (first + number // N)[None, :] * (M * N) + tl.arange(0, M)[:, None] * N + (number % N)[None, :]
    total = tl.zeros([M, number.shape[0]], tl.float32)
    for split in tl.range(0, SPLITS):
        total += tl.load(place + split * tiles * (M * N), (number < count)[None, :], other=0.0)
    return total


def narrow_product(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, out: Tensor) -> None:
    """Write x W^T + (x A^T) B^T to out [m, N], with x [m, K], W [N, K], A [R, K] and B [N, R].

    All are contiguous and of one dtype. Sums are float32, and A x is rounded to the dtype.
    """
    (rows, columns), width, rank, space = x.shape, len(weight), len(down), workspace(x.device)
    size = min(max(16, triton.next_power_of_2(rows)), 64)
    tiles, splits, blocks = -(-width // _N) + -(-rank // _N), -(-columns // _SPAN), -(-rows // size)
    sums = torch.empty(blocks * splits * tiles * size * _N, dtype=torch.float32, device=x.device)
    _narrow[(tiles, splits, blocks)](
        x, weight, down, up, out, sums, space.get("narrow_arrivals", blocks), rows, columns, width,
        RANK=rank, RANKS=max(16, triton.next_power_of_2(rank)), WIDTHS=max(16, triton.next_power_of_2(width)),
        SPLITS=splits, SPAN=_SPAN, M=size, N=_N, K=_K, num_warps=4, **dependent(x.device),
    )  # fmt: skip
