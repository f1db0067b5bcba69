"""Launches of the portable products."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from qerl.formats.words import BLOCK_COLUMNS
from qerl.kernels.activations import Activation
from qerl.kernels.launch import dependent
from qerl.kernels.portable.products import SHRINK_ROWS, fused_product
from qerl.kernels.portable.variants import PortableOperands, Tile, tile_for
from qerl.kernels.workspace import workspace

#: The most ranks of an adapter that a program multiplies at a time.
_MOST_RANKS = 32


def multiply(
    operands: PortableOperands,
    x: Tensor,
    out: Tensor,
    residual: bool = False,
    activation: Activation | None = None,
    tile: Tile | None = None,
) -> None:
    """Write the product with x [m, columns] to out [m, width], both bfloat16 and contiguous; see `FusedLinear`.

    `tile` replaces that of `tile_for`.
    """
    tile = tile or tile_for(len(x))
    words, rank, rows, width = operands.words, operands.rank, *out.shape
    multiplier, offset = words.scale_decode
    blocks, pdl, space = words.columns // BLOCK_COLUMNS, dependent(x.device), workspace(x.device)
    span = -(-blocks // tile.splits(rows, words.rows, blocks, space.processors))
    splits, row_blocks = -(-blocks // span), triton.cdiv(rows, tile.m)
    tiles = triton.cdiv(width, tile.n // 2 if activation else tile.n)
    divided = splits if splits > 1 else 0
    sums = torch.empty(row_blocks * tiles * divided * tile.n * tile.m, dtype=torch.float32, device=x.device)
    shrunk = torch.empty(splits, rows, rank, dtype=torch.float32, device=x.device)
    senders = triton.cdiv(rank, SHRINK_ROWS.value)
    fused_product[((senders + tiles) * row_blocks * splits,)](
        words.codes, words.scales, operands.factors, _or(operands.bias, operands.factors), operands.down, operands.up,
        x, out, sums, shrunk, space.get("arrivals", row_blocks * (tiles + 1)), rows, words.rows, words.columns, blocks,
        tiles, span, row_blocks, width,
        GROUPS=BLOCK_COLUMNS // words.group, MULTIPLIER=multiplier, OFFSET=offset & 0xFFFF, RANK=rank,
        RANKS=_ranks(rank), SPLITS=splits, BIASED=operands.bias is not None, ACTIVATION=activation or "",
        RESIDUAL=residual, N=tile.n, M=tile.m, STAGES=tile.stages, num_warps=tile.warps, maxnreg=tile.registers, **pdl,
    )  # fmt: skip


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """A tensor, or one that isn't read in its place."""
    return placeholder if tensor is None else tensor


def _ranks(rank: int) -> int:
    return min(max(16, triton.next_power_of_2(rank)), _MOST_RANKS)
