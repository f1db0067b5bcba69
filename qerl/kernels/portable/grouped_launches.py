"""Launches of grouped products, for the weights of all experts of a mixture in one tensor a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from qerl.formats.words import BLOCK_COLUMNS, Words
from qerl.kernels.groups import Groups
from qerl.kernels.launch import dependent
from qerl.kernels.portable.grouped import DENSE_COLUMNS, grouped_input_gradient, grouped_product
from qerl.kernels.portable.variants import GradientTile, Tile, gradient_tile_for, grouped_tile_for


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
    operands: GroupedOperands, x: Tensor, groups: Groups, out: Tensor, silu: bool = False, tile: Tile | None = None
) -> None:
    """Write the products of all pairs to out [pairs, rows], or with `silu` silu(gate) * up to [pairs, rows / 2].

    x [T, columns] has a row a token, or [pairs, columns] a row a pair. x and out are contiguous, of one dtype, bfloat16
    or float32, which is that of dense weights. `tile` replaces that of `grouped_tile_for`.
    """
    tile = tile or grouped_tile_for(groups.size, isinstance(operands.weights, Words), x.element_size())
    (codes, scales, factors), all_rows, decode = operands.arguments()
    width = operands.rows // 2 if silu else operands.rows
    tiles = triton.cdiv(width, tile.n // 2 if silu else tile.n)
    bias = factors if operands.bias is None else operands.bias  # the former isn't read
    grouped_product[(len(groups.experts), tiles)](
        codes, scales, x, groups.pairs, groups.experts, factors, bias, out, groups.count, _pairs_a_row(x, groups),
        operands.rows, all_rows, operands.columns, width, **decode, TAIL=operands.columns % BLOCK_COLUMNS != 0,
        BIASED=operands.bias is not None, SILU=silu, N=tile.n, M=groups.size, STAGES=tile.stages,
        num_warps=tile.warps, **dependent(x.device),
    )  # fmt: skip


def input_gradient(
    operands: GroupedOperands, grad: Tensor, groups: Groups, out: Tensor, tile: GradientTile | None = None
) -> None:
    """Write the gradient of each pair's input to out [pairs, columns].

    `grad` is that of its output, [T, rows] or [pairs, rows]. Dtypes are as in `multiply`.
    """
    packed = isinstance(operands.weights, Words)
    tile = tile or gradient_tile_for(groups.size, grad.element_size())
    (codes, scales, factors), all_rows, decode = operands.arguments()
    columns = BLOCK_COLUMNS if packed else DENSE_COLUMNS.value
    grouped_input_gradient[(len(groups.experts), triton.cdiv(operands.columns, columns))](
        codes, scales, grad, groups.pairs, groups.experts, factors, out, groups.count, _pairs_a_row(grad, groups),
        operands.rows, all_rows, operands.columns, **decode, N=tile.n, M=groups.size, COLUMNS=columns,
        STAGES=tile.stages, num_warps=tile.warps, **dependent(grad.device),
    )  # fmt: skip


def _pairs_a_row(x: Tensor, groups: Groups) -> int:
    return 1 if len(x) == groups.count else groups.chosen
