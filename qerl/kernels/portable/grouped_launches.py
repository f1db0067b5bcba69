"""Launches of grouped products, for the weights of all experts of a mixture in one tensor a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from qerl.formats.words import BLOCK_COLUMNS, Words
from qerl.kernels.groups import GroupedLora, Groups
from qerl.kernels.launch import dependent
from qerl.kernels.portable.grouped import (
    DENSE_COLUMNS,
    grouped_input_gradient,
    grouped_product,
    grouped_weight_gradient,
)
from qerl.kernels.portable.variants import (
    GradientTile,
    Tile,
    gradient_tile_for,
    grouped_tile_for,
    weight_gradient_tile_for,
)


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
        TAIL=operands.columns % block != 0, BIASED=operands.bias is not None, RANK=rank, RANKS=_ranks(rank),
        SILU=silu, N=tile.n, M=tile.m, STRIPS=groups.size // tile.m, STAGES=tile.stages, num_warps=tile.warps,
        **dependent(x.device),
    )  # fmt: skip


def input_gradient(
    operands: GroupedOperands,
    grad: Tensor,
    groups: Groups,
    out: Tensor,
    add: bool = False,
    tile: GradientTile | None = None,
) -> None:
    """Write the gradient of each pair's input to out [pairs, columns], or with `add` add it.

    `grad` is that of its output, [T, rows] or [pairs, rows]. Dtypes are as in `multiply`.
    """
    packed = isinstance(operands.weights, Words)
    tile = tile or gradient_tile_for(groups.size, grad.element_size())
    (codes, scales, factors), all_rows, decode = operands.arguments()
    columns = BLOCK_COLUMNS if packed else DENSE_COLUMNS.value
    grouped_input_gradient[(len(groups.experts), triton.cdiv(operands.columns, columns))](
        codes, scales, grad, groups.pairs, groups.experts, factors, out, groups.count, _pairs_a_row(grad, groups),
        operands.rows, all_rows, operands.columns, **decode, ADD=add, N=tile.n, M=groups.size, COLUMNS=columns,
        STAGES=tile.stages, num_warps=tile.warps, **dependent(grad.device),
    )  # fmt: skip


def dense_product(weights: Tensor, x: Tensor, groups: Groups, out: Tensor) -> None:
    """See `mixture_reference.dense_product`."""
    rows = weights.shape[1]
    tile = grouped_tile_for(groups.size, x.element_size())
    narrow = replace(tile, n=min(tile.n, max(triton.next_power_of_2(rows), 32)))  # for rows that are ranks
    multiply(GroupedOperands(weights.flatten(0, 1), rows, None, None), x, groups, out, tile=narrow)


def dense_input_gradient(weights: Tensor, grad: Tensor, groups: Groups, out: Tensor, add: bool = False) -> None:
    """See `mixture_reference.dense_input_gradient`."""
    input_gradient(GroupedOperands(weights.flatten(0, 1), weights.shape[1], None, None), grad, groups, out, add)


def dense_weight_gradient(grad: Tensor, x: Tensor, groups: Groups, experts: int) -> Tensor:
    """See `mixture_reference.dense_weight_gradient`."""
    (_, rows), (_, columns) = grad.shape, x.shape
    out = torch.empty(experts, rows, columns, dtype=torch.float32, device=x.device)
    # Blocks without pairs come last.
    owners = groups.experts.where(groups.experts >= 0, experts)
    starts = torch.searchsorted(owners, torch.arange(experts + 1, dtype=torch.int32, device=x.device)).int()
    tile = weight_gradient_tile_for(rows, columns, groups.size, x.element_size())
    grouped_weight_gradient[(experts, triton.cdiv(rows, tile.n), triton.cdiv(columns, tile.columns))](
        grad, x, groups.pairs, starts, out, groups.count, _pairs_a_row(x, groups), rows, columns, SIZE=groups.size,
        N=tile.n, M=max(groups.size, 16), COLUMNS=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
        **dependent(x.device),
    )  # fmt: skip
    return out


def _ranks(rank: int) -> int:
    """The ranks of an adapter that an instruction multiplies at a time."""
    return min(max(triton.next_power_of_2(rank), 16), 64)


def _pairs_a_row(x: Tensor, groups: Groups) -> int:
    return 1 if len(x) == groups.count else groups.chosen
